"""Programs that do not depend on each other, begun together."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax

Program = tuple[Callable, tuple]  # a jitted function and its arguments


def together(programs: list[Program]) -> list:
    """What each program gives, without a wait for it.

    On one CPU device each is begun by a thread of its own: what one thread begins runs there one after the other, and two
    programs side by side use the cores while one of them waits between its products. Accelerators run programs in the order in
    which they are begun; and those that exchange data between devices must be begun in one order everywhere. What programs
    need beside arguments and results is there for each of them at once.
    """
    mesh = jax.sharding.get_mesh()
    if len(programs) < 2 or mesh.size != 1 or jax.default_backend() != "cpu":
        return [function(*arguments) for function, arguments in programs]

    def begin(program: Program):
        function, arguments = program
        with jax.set_mesh(mesh):  # a thread has none
            return function(*arguments)

    with contextlib.ExitStack() as threads:  # a pool of several would have a thread that is quick begin two
        others = [threads.enter_context(ThreadPoolExecutor(1)).submit(begin, program) for program in programs[1:]]
        return [begin(programs[0]), *(other.result() for other in others)]
