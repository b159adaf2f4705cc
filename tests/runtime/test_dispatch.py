"""Programs run concurrently where that is safe, and one after the other elsewhere."""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest

import tiny
from jax_ppo.runtime import dispatch


def run_programs(mesh, *functions):
    with jax.set_mesh(mesh):
        return dispatch.run_together(
            [(function, (number,)) for number, function in enumerate(functions)]
        )


@functools.partial(jax.jit, static_argnames="turns")
def spin(x, turns):
    return jax.lax.fori_loop(0, turns, lambda i, x: jnp.cos(x @ x), x)


@pytest.mark.parametrize("aside", [True, False])
def test_on_one_cpu_device_they_run_side_by_side(aside):
    with jax.set_mesh(tiny.make_mesh()):
        programs = [(spin, (jnp.eye(64), turns)) for turns in (40_000, 1)]
        for function, arguments in programs:
            function.lower(*arguments).compile()
        long, short = (
            dispatch.run_together(programs)
            if aside
            else [function(*arguments) for function, arguments in programs]
        )
        short.block_until_ready()
        # Programs dispatched by one thread run one after the other, hence the threads.
        assert long.is_ready() != aside
        long.block_until_ready()


def test_they_are_begun_in_their_order_under_the_mesh():
    """The next program reuses what was compiled for the first."""
    mesh, started = tiny.make_mesh(), []

    def begin(number):
        started.append(number)
        return jax.sharding.get_mesh()

    assert run_programs(mesh, begin, begin, begin) == [mesh] * 3
    assert started == [0, 1, 2]


def test_nothing_to_begin():
    assert run_programs(tiny.make_mesh()) == []


def test_no_thread_begins_two():
    threads = run_programs(tiny.make_mesh(), *[lambda number: threading.current_thread()] * 3)
    assert len(set(threads)) == 3


def test_on_several_devices_they_are_begun_in_one_order_by_the_thread_that_asks():
    mesh, started = tiny.make_mesh(2), []

    def begin(number):
        started.append((number, threading.current_thread()))
        return number

    assert run_programs(mesh, begin, begin, begin) == [0, 1, 2]
    assert started == [(number, threading.current_thread()) for number in range(3)]


def test_an_accelerator_is_given_them_in_turn(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (
        run_programs(tiny.make_mesh(), *[lambda number: threading.current_thread()] * 2)
        == [threading.current_thread()] * 2
    )


def test_an_error_comes_out():
    def fail(number):
        raise FloatingPointError(f"program {number}")

    with pytest.raises(FloatingPointError, match="program 1"):
        run_programs(tiny.make_mesh(), lambda number: number, fail)
