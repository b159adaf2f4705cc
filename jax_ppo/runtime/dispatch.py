"""Programs that do not depend on each other, begun together."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax

Program = tuple[Callable, tuple]  # a jitted function and its arguments


def lanes() -> int:
    """Into how many programs work is shared out that can be: more than one where programs run side by side.

    That is so on one CPU device, where one uses the cores while another waits between its products. Accelerators run programs
    in the order in which they are begun; and those that exchange data between devices must be begun in one order everywhere.
    """
    return 2 if jax.sharding.get_mesh().size == 1 and jax.default_backend() == "cpu" else 1


def together(programs: list[Program]) -> list:
    """What each program gives, without a wait for it.

    They are begun in their order, so that one compiled for the first is there for the next. What one thread begins runs one
    after the other: for programs to run side by side each but the first is begun by a thread of its own. What they need beside
    arguments and results is there for each of them at once.
    """
    aside = _begin_aside if lanes() > 1 else _begin
    return [*map(_begin, programs[:1]), *map(aside, programs[1:])]


def _begin(program: Program):
    function, arguments = program
    return function(*arguments)


def _begin_aside(program: Program):
    mesh = jax.sharding.get_mesh()

    def begin():
        with jax.set_mesh(mesh):  # a thread has none
            return _begin(program)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(begin).result()
