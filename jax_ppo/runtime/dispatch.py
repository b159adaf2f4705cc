"""Dispatch programs that do not depend on each other so that they run side by side."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax

T = TypeVar("T")
Program = tuple[Callable, tuple]  # a jitted function and its arguments


def programs_overlap() -> bool:
    """Return whether programs that do not depend on each other may run side by side.

    They do on a single CPU device, where one program uses the cores while another waits
    between its matrix products. Accelerators run programs in the order of dispatch, and programs
    that exchange data between devices must be dispatched in the same order everywhere.
    """
    mesh = jax.sharding.get_mesh()
    # The mesh may be that of another machine, which programs are only compiled for.
    is_cpu = mesh.empty or mesh.devices.flat[0].platform == "cpu"
    return mesh.size == 1 and is_cpu and jax.default_backend() == "cpu"


def run_together(programs: list[Program]) -> list[Any]:
    """Dispatch the programs and return their results without blocking.

    They are dispatched in order, so that a program compiled for the first is found by the next.
    The intermediate memory of all programs is needed at once.
    """
    results = [function(*arguments) for function, arguments in programs[:1]]
    return results + [beside(function, *arguments) for function, arguments in programs[1:]]


def beside(function: Callable[..., T], *arguments: Any) -> T:
    """Dispatch a program so that it overlaps with those before, and return without blocking.

    JAX runs programs that one thread dispatches one after the other; to overlap, this one is
    dispatched by its own thread.
    """
    if not programs_overlap():
        return function(*arguments)
    mesh = jax.sharding.get_mesh()

    def run() -> T:
        with jax.set_mesh(mesh):  # the mesh context belongs to a thread
            return function(*arguments)

    # Dispatch returns before the program ends, so this waits for the thread only.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
