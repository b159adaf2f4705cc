"""Processes of a run end together, and one in which nothing moves ends."""

import signal
import sys

import pytest

from jax_ppo.runtime import faults
from waiting import HANG_SECONDS, finish_all
from whole_run import run_python, start_processes


def test_errors_of_a_single_process_are_raised_as_they_are():
    assert faults.run_or_abort(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        faults.run_or_abort(lambda: 1 / 0)
    with pytest.raises(SystemExit, match="enough"):
        faults.run_or_abort(lambda: sys.exit("enough"))


PROGRAM = """
import os, signal, sys, time, jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax_ppo.config import schema
from jax_ppo.runtime import distributed, faults, signals

number, address, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
faults._REASON_SECONDS = 60 if way in ("raise", "interrupt", "message") else 1
announce = faults.announce_failure
faults.announce_failure = lambda *failure: (announce(*failure), time.sleep(0.5))  # ends slowly

def main():
    distributed.barrier("start")
    print("main" if distributed.is_main() else "other", flush=True)
    for _ in range(3):
        indices = multihost_utils.process_allgather(np.float32(jax.process_index()))
        assert indices.tolist() == [0.0, 1.0]
    assert distributed.allgather_json({"number": number}) == [{"number": 0}, {"number": 1}]
    if number == 1 and way == "raise":
        raise ZeroDivisionError("on purpose")
    if number == 1 and way == "interrupt":
        raise KeyboardInterrupt
    if number == 1 and way == "message":
        sys.exit("error: fix this")
    if way == f"kill {number}":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == f"kill late {number}":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if way.startswith("kill late"):
        return  # the work of the other is done
    if way == f"freeze {number}":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == f"terminate {number}":
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "finish":
        sys.exit(0)
    while True:
        multihost_utils.process_allgather(np.float32(0))

options = schema.Distributed(
    coordinator_address=address,
    num_processes=2,
    process_id=number,
    heartbeat_seconds=100 if way in ("raise", "interrupt", "message", "terminate 1") else 10,
)
distributed.initialize(options)
distributed.initialize(options)  # a second time does nothing
with signals.handle_stop_signals(ends_process=True):
    faults.run_or_abort(main)
"""


def start_two_processes(way, address):
    return start_processes("-c", PROGRAM, own=[(number, address, way) for number in "01"])


@pytest.mark.slow
def test_a_frozen_process_ends_the_others(coordinator_address):
    processes = start_two_processes("freeze 1", coordinator_address)
    try:
        _, errors = processes[0].communicate(timeout=HANG_SECONDS)
        assert processes[1].poll() is None
    finally:
        processes[1].kill()
        processes[1].communicate()
    # JAX aborts it and names the other: launchers start again after 128 + SIGABRT.
    assert "(stopped sending heartbeats):\n1\n" in errors
    assert processes[0].returncode == -signal.SIGABRT


SLOW = ("raise", "finish", "message", "terminate 1")
EXHAUSTIVE = ("interrupt", "kill 0", "kill late 0", "kill late 1")


@pytest.mark.parametrize(
    "way",
    [
        "kill 1",
        *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW),
        *(pytest.param(way, marks=pytest.mark.exhaustive) for way in EXHAUSTIVE),
    ],
)
def test_two_processes_end_together(way, coordinator_address):
    processes = start_two_processes(way, coordinator_address)
    (output, errors), (other_output, other_errors) = finish_all(processes)
    codes = [process.returncode for process in processes]
    assert (output.split()[-1], other_output.split()[-1]) == ("main", "other")
    if way == "finish":
        assert codes == [0, 0]
        return
    if way.startswith("kill"):
        killed = int(way[-1])
        # A collective of the other fails, or JAX aborts it: launchers start the run again.
        assert codes[killed] == -signal.SIGKILL, errors + other_errors
        assert codes[1 - killed] in (75, -signal.SIGABRT), errors + other_errors
        return
    if way == "terminate 1":
        # One that a signal ends before there is a step to save: all are restarted.
        assert codes == [143, 143], errors + other_errors
        assert "process 0 of 2 ends the run: process 1: stopped by SIGTERM before a step" in errors
        return
    assert codes == [1, 1], errors + other_errors
    reason = {
        "raise": "ZeroDivisionError: on purpose",
        "interrupt": "KeyboardInterrupt",
        "message": "error: fix this",
    }[way]
    assert f"process 0 of 2 ends the run: process 1: {reason}" in errors
    assert "Traceback" not in errors
    assert f"process 1 of 2 ends the run: {reason}" in other_errors
    assert ("Traceback" in other_errors) == (way != "message")


STALLS = """
import time
from jax_ppo.runtime import faults

def hang():
    time.sleep(3600)

with faults.limit_stalls({limit}):
    for _ in range(4):
        time.sleep({seconds})
        faults.report_progress()
    {end}
"""


def run_stalls(**values):
    return run_python("-c", STALLS.format(**values), check=False)


def test_a_process_in_which_nothing_moves_shows_its_stacks_and_ends():
    process = run_stalls(limit=1, seconds=0, end="hang()")
    assert process.returncode == 1
    assert process.stderr.startswith("Timeout (0:00:01)!\nThread")
    assert "in hang\n" in process.stderr


@pytest.mark.parametrize(
    "values",
    [
        # Together longer than the limit.
        {"limit": 2, "seconds": 0.6, "end": "pass"},
        {"limit": 0, "seconds": 0, "end": "time.sleep(0.1)"},
    ],
    ids=["progress", "no limit"],
)
def test_progress_within_the_limit_is_not_a_stall(values):
    process = run_stalls(**values)
    assert (process.returncode, process.stderr) == (0, "")
