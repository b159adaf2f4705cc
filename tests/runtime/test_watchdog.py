"""The watchdog of runs in which nothing moves."""

import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import types

import pytest

from jax_ppo.runtime import compat, watchdog
from waiting import HANG_SECONDS


class Looks:
    """What the watchdog waits for between its looks, which a test allows one after the other."""

    def __init__(self) -> None:
        self._waits: queue.Queue = queue.Queue()
        self._answers: queue.Queue = queue.Queue()

    def wait(self, seconds: float) -> bool:
        self._waits.put(seconds)
        return self._answers.get()

    def set(self) -> None:
        self._answers.put(True)

    def take(self, seconds: float) -> None:
        """Let the watchdog look as often as it would in `seconds`."""
        while seconds > 0:
            seconds = round(seconds - self._waits.get(timeout=HANG_SECONDS), 6)
            self._answers.put(False)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    threads = types.SimpleNamespace(Thread=threading.Thread, Event=lambda: looks)
    monkeypatch.setattr(watchdog, "threading", threads)
    return looks


def test_a_stall_is_named_after_the_last_phase_that_was_reached(capfd, looks):
    stalls: queue.Queue = queue.Queue()
    is_over = threading.Event()
    # More threads than faulthandler shows.
    others = [threading.Thread(target=is_over.wait) for _ in range(110)]
    for thread in others:
        thread.start()
    try:
        with watchdog.watch(0.2, stalls.put):
            watchdog.report_progress("sampling")
            looks.take(0.21)  # the first look may have followed at once
            reason = stalls.get(timeout=HANG_SECONDS)
    finally:
        is_over.set()
        for thread in others:
            thread.join()
    assert "nothing has moved for 0.2 s" in reason and "'sampling'" in reason
    # The stack of this thread is shown as well.
    assert "test_a_stall_is_named" in capfd.readouterr().err


def test_progress_within_the_limit_is_no_stall(looks):
    stalls: queue.Queue = queue.Queue()
    with watchdog.watch(0.2, stalls.put):
        for _ in range(3):
            looks.take(0.18)
            watchdog.report_progress("sampling")
    # Nor is the time after the run.
    assert not is_watched() and stalls.empty()


def test_a_suspended_run_is_no_stalled_one():
    program = """
from jax_ppo.runtime import watchdog
with watchdog.watch(3, print):
    print("started", flush=True)
    input()
"""
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.1)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert process.communicate("go on\n", timeout=HANG_SECONDS) == ("", None)


def test_no_limit_is_no_watch():
    with watchdog.watch(0, pytest.fail):
        watchdog.report_progress("sampling")
        assert not is_watched()


def is_watched() -> bool:
    return "watchdog" in {thread.name for thread in threading.enumerate()}


def test_a_hung_run_ends_with_one_line():
    program = """
import time
from jax_ppo.runtime import distributed, watchdog
with watchdog.watch(2, distributed.end_stalled_run):
    watchdog.report_progress("reward")
    time.sleep(3600)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert process.returncode == 75
    assert process.stderr.splitlines()[-1] == (
        "error: nothing has moved for 2 s (config.distributed.stall_seconds) since the phase "
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
