"""The watchdog of runs in which nothing moves."""

import queue
import subprocess
import sys
import time

import pytest

from jax_ppo.runtime import watchdog


def test_a_stall_is_named_after_the_last_phase_that_was_reached(capfd):
    stalls: queue.Queue = queue.Queue()
    with watchdog.watch(0.2, stalls.put):
        watchdog.report_progress("sampling")
        reason = stalls.get(timeout=10)
    assert "nothing has moved for 0.2 s" in reason and "'sampling'" in reason
    # The stack of this thread is shown as well.
    assert "test_a_stall_is_named" in capfd.readouterr().err


def test_progress_within_the_limit_is_no_stall():
    stalls: queue.Queue = queue.Queue()
    with watchdog.watch(0.5, stalls.put):
        for _ in range(10):
            time.sleep(0.1)
            watchdog.report_progress("sampling")
    time.sleep(0.6)  # nor is the time after the run
    assert stalls.empty()


def test_no_limit_is_no_watch():
    with watchdog.watch(0, pytest.fail):
        watchdog.report_progress("sampling")
        time.sleep(0.05)


def test_a_hung_run_ends_with_one_line():
    program = """
import time
from jax_ppo.runtime import distributed, watchdog
with watchdog.watch(0.2, distributed.end_stalled_run):
    watchdog.report_progress("reward")
    time.sleep(60)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert process.returncode == 75
    assert process.stderr.splitlines()[-1] == (
        "error: nothing has moved for 0.2 s (config.distributed.stall_seconds) since the phase "
        "'reward'; the stacks are above"
    )
