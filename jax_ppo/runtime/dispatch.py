"""Dispatch programs that do not depend on each other so that they run side by side."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

Program = tuple[Callable, tuple]  # a jitted function and its arguments


def num_lanes() -> int:
    """Return the number of programs to split divisible work into: 1 unless programs overlap.

    They overlap on a single CPU device, where one program uses the cores while another waits
    between its matrix products. Accelerators run programs in the order of dispatch, and programs
    that exchange data between devices must be dispatched in the same order everywhere.
    """
    mesh = jax.sharding.get_mesh()
    # The mesh may be that of another machine, which programs are only compiled for.
    is_cpu = mesh.empty or mesh.devices.flat[0].platform == "cpu"
    overlaps = mesh.size == 1 and is_cpu and jax.default_backend() == "cpu"
    return 2 if overlaps else 1


def run_together(programs: list[Program]) -> list[Any]:
    """Dispatch the programs and return their results without blocking.

    They are dispatched in order, so that a program compiled for the first is found by the next. JAX
    runs programs that one thread dispatches one after the other; to overlap, each program but the
    first is dispatched by its own thread. The intermediate memory of all programs is needed at
    once.
    """
    if num_lanes() == 1:
        return [_dispatch(program) for program in programs]
    return [*map(_dispatch, programs[:1]), *map(_dispatch_in_thread, programs[1:])]


def _dispatch(program: Program) -> Any:
    function, arguments = program
    return function(*arguments)


def _dispatch_in_thread(program: Program) -> Any:
    mesh = jax.sharding.get_mesh()

    def run() -> Any:
        with jax.set_mesh(mesh):  # the mesh context belongs to a thread
            return _dispatch(program)

    # Dispatch returns before the program ends, so this waits for the thread only.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
