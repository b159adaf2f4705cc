"""Lines that say what a run does while it prints nothing, by a clock that the test sets."""

import threading
import time

import jax
import pytest

from jax_ppo.runtime import compiled_programs, heartbeat
from waiting import wait_until


class Clock:
    """A clock in place of the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(heartbeat, "_activities", [])
    return clock


@pytest.fixture
def beats(clock, monkeypatch):
    """Return a function that moves the clock, and returns the lines that this causes."""
    lines: list[str] = []
    current = heartbeat.Heartbeat(lines.append)
    monkeypatch.setattr(heartbeat, "_active", current)

    def advance(seconds):
        lines.clear()
        for _ in range(seconds):
            clock.now += 1
            current.beat()
        return list(lines)

    return advance


def test_ten_seconds_never_pass_without_a_line(beats):
    assert beats(8) == []
    assert beats(1) == ["... running (9 s)"]
    assert beats(8) == []
    heartbeat.line_printed()
    assert beats(8) == [], "a line of the run itself counts"
    assert beats(10) == ["... running (26 s)", "... running (35 s)"]


def test_the_innermost_activity_of_each_thread_is_named_with_its_seconds(beats):
    def compile_until(is_over):
        with heartbeat.activity("compiling the actor"):
            is_over.wait()

    with heartbeat.activity("starting the state"):
        beats(2)
        with heartbeat.activity("loading the actor") as loading:
            loading.update("3/20 tensors")
            is_over = threading.Event()
            thread = threading.Thread(target=compile_until, args=[is_over])
            thread.start()
            wait_until(lambda: len(heartbeat._activities) == 3)
            (line,) = beats(7)
            is_over.set()
            thread.join()
        assert line == "... loading the actor: 3/20 tensors (7 s); compiling the actor (7 s)"
        assert beats(9) == ["... starting the state (18 s)"]
    assert beats(9) == ["... running (27 s)"], "what has ended is not named"


def test_what_is_compiled_is_said_in_words():
    phases = []

    def update(x):
        phases.append(heartbeat.describe_activities(time.monotonic()))
        return 2 * x

    with compiled_programs.run_on_shapes():
        compiled_programs.CompiledProgram(update, "update_actor")(
            jax.ShapeDtypeStruct((2,), "int32")
        )
    assert phases == ["compiling the update of the actor (0 s)"]


def test_once_steps_are_printed_a_minute_may_pass(beats):
    heartbeat.line_printed(is_step=True)
    with heartbeat.activity("rollout"):
        assert beats(59) == []
        assert beats(1) == ["... rollout (60 s)"]
    assert beats(60) == ["... running (120 s)"]


def test_work_that_fails_is_over(beats):
    with pytest.raises(ValueError), heartbeat.activity("loading"):
        raise ValueError
    assert beats(9) == ["... running (9 s)"]


def test_the_thread_ends_with_the_run_even_where_nothing_can_be_printed(monkeypatch):
    monkeypatch.setattr(heartbeat, "START_SECONDS", 0)
    monkeypatch.setattr(heartbeat, "_CHECK_SECONDS", 0.001)
    called = threading.Event()

    def report(line):
        called.set()
        raise BrokenPipeError

    with heartbeat.beating(report):
        called.wait()
        wait_until(lambda: not beats_now())
    with pytest.raises(RuntimeError), heartbeat.beating(lambda line: time.sleep(0)):
        assert beats_now()
        raise RuntimeError
    assert heartbeat._active is None
    wait_until(lambda: not beats_now())  # the run waits for the thread a thousandth of a second


def beats_now():
    return "heartbeat" in {thread.name for thread in threading.enumerate()}
