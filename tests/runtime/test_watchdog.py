"""The watchdog of runs in which nothing moves."""

import queue
import subprocess
import sys
import threading
import traceback

import pytest

from jax_ppo.runtime import compat, watchdog
from waiting import HANG_SECONDS, wait_until


class Clock:
    """A clock that a test sets, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._was_read = threading.Event()

    def monotonic(self) -> float:
        self._was_read.set()
        return self.now

    def advance(self, seconds: float) -> None:
        """Move on, and wait until the watchdog has looked, if it still does."""
        self.now += seconds
        self._was_read.clear()
        wait_until(lambda: self._was_read.is_set() or not is_watched())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def test_a_stall_is_named_after_the_last_phase_that_was_reached(capfd, clock):
    stalls: queue.Queue = queue.Queue()
    is_over = threading.Event()
    # More threads than faulthandler shows.
    others = [threading.Thread(target=is_over.wait) for _ in range(110)]
    for thread in others:
        thread.start()
    try:
        with watchdog.watch(0.2, stalls.put):
            watchdog.report_progress("sampling")
            clock.advance(0.3)
            reason = stalls.get(timeout=HANG_SECONDS)
    finally:
        is_over.set()
        for thread in others:
            thread.join()
    assert "nothing has moved for 0.2 s" in reason and "'sampling'" in reason
    # The stack of this thread is shown as well.
    assert "test_a_stall_is_named" in capfd.readouterr().err


def test_progress_within_the_limit_is_no_stall(clock):
    stalls: queue.Queue = queue.Queue()
    with watchdog.watch(0.2, stalls.put):
        for _ in range(3):
            clock.advance(0.15)
            watchdog.report_progress("sampling")
    clock.now += 1  # nor is the time after the run
    assert not is_watched() and stalls.empty()


def test_no_limit_is_no_watch():
    with watchdog.watch(0, pytest.fail):
        watchdog.report_progress("sampling")
        assert not is_watched()


def is_watched() -> bool:
    return "watchdog" in {thread.name for thread in threading.enumerate()}


def test_a_hung_run_ends_with_one_line():
    program = """
import time, types
from jax_ppo.runtime import distributed, watchdog
watchdog.time = types.SimpleNamespace(monotonic=lambda: 0.0)  # until the phase is reached
with watchdog.watch(0.2, distributed.end_stalled_run):
    watchdog.report_progress("reward")
    watchdog.time = time
    time.sleep(3600)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert process.returncode == 75
    assert process.stderr.splitlines()[-1] == (
        "error: nothing has moved for 0.2 s (config.distributed.stall_seconds) since the phase "
        "'reward'; the stacks are above"
    )


def test_the_frame_of_the_main_thread_is_the_present_one():
    def callers() -> list[str]:
        frame = compat.main_thread_frame()
        return [entry.name for entry in traceback.extract_stack(frame)]

    def later() -> list[str]:
        return callers()

    assert "later" not in callers()
    assert "later" in later()
