"""Programs are begun side by side where that is safe, and in turn elsewhere."""

import threading

import jax
import pytest

import tiny
from jax_ppo import dispatch


def run(mesh, *functions):
    with jax.set_mesh(mesh):
        return dispatch.together([(function, (number,)) for number, function in enumerate(functions)])


def test_on_one_cpu_device_they_are_begun_side_by_side_under_the_mesh():
    mesh, both_are_there = tiny.make_mesh(), threading.Barrier(2, timeout=30)

    def begin(number):
        both_are_there.wait()  # in turn they would wait for each other until the time is out
        return number, jax.sharding.get_mesh()

    assert run(mesh, begin, begin) == [(0, mesh), (1, mesh)]


def test_no_thread_begins_two():
    threads = run(tiny.make_mesh(), *[lambda number: threading.current_thread()] * 3)
    assert len(set(threads)) == 3


def test_on_several_devices_they_are_begun_in_one_order_by_the_thread_that_asks():
    mesh, begun = tiny.make_mesh(2), []

    def begin(number):
        begun.append((number, threading.current_thread()))
        return number

    assert run(mesh, begin, begin, begin) == [0, 1, 2]
    assert begun == [(number, threading.current_thread()) for number in range(3)]


def test_an_accelerator_is_given_them_in_turn(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert run(tiny.make_mesh(), *[lambda number: threading.current_thread()] * 2) == [threading.current_thread()] * 2


def test_an_error_comes_out():
    def fail(number):
        raise FloatingPointError(f"program {number}")

    with pytest.raises(FloatingPointError, match="program 1"):
        run(tiny.make_mesh(), lambda number: number, fail)
