"""Reward functions in worker processes: what one of them does costs its own sample only."""

import dataclasses
import errno
import os
import pathlib
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pebble.pool.process
import pytest

from jax_ppo import timed_threads
from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError
from jax_ppo.registries import keep_in_memory
from jax_ppo.rewards import worker_pool
from jax_ppo.rewards.batch import score_batch
from jax_ppo.rewards.reward_functions import resolve_reward_function
from jax_ppo.rewards.samples import RewardRow
from jax_ppo.rewards.worker_pool import RewardWorkers, isolate
from jax_ppo.types import Example
from waiting import is_running, wait_until

ROOT = pathlib.Path(__file__).parents[2]
MODULE = """
import os
import pathlib
import re
import subprocess
import sys
import threading
from concurrent.futures import Future
import time

def announce_hang():
    pathlib.Path(__file__).with_name(f"{os.getpid()}.hangs").touch()

def misbehaves(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "sleep":
        announce_hang()
        time.sleep(3600)
    if solution_str == "regex":  # holds the interpreter: no handler of a signal runs
        announce_hang()
        re.match(r"(a+)+$", "a" * 60 + "b")
    if solution_str == "children":
        subprocess.Popen(["sleep", f"3600.{os.getppid()}"])
        announce_hang()
        time.sleep(3600)
    if solution_str.startswith("exit"):
        os._exit(int(solution_str[4:]))
    if solution_str == "leave":
        sys.exit()
    if solution_str == "interrupt":
        raise KeyboardInterrupt
    extra_info["changed"] = True
    return {"score": len(solution_str) + len(extra_info), "index": extra_info["index"]}

def process(data_source, solution_str, ground_truth, extra_info):
    main = getattr(sys.modules["__main__"], "__file__", None)
    return {"score": os.getpid(), "jax": "jax" in sys.modules, "main": main is not None}
"""
RESPONSES = [
    *("abc", "sleep", "x", "exit0", "fine", "exit7", "leave", "interrupt", "regex", "children"),
    "last one",
]
LIMIT = 3600.0  # seconds for a sample; no test waits for as long


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(MODULE)
    return str(path)


def options(function, **changes):
    return dataclasses.replace(Reward(), function=function, **{"timeout": LIMIT} | changes)


@pytest.fixture
def hangs_are_over_at_once(module, monkeypatch):
    """Let the time of a sample be over once its worker has announced that it hangs."""

    def is_over(task):
        assert task.timeout == LIMIT
        return task.started and hangs(module, task.worker_id)

    monkeypatch.setattr(pebble.pool.process.TaskManager, "timeout", staticmethod(is_over))


def hangs(module, worker):
    return pathlib.Path(module).with_name(f"{worker}.hangs").exists()


def test_a_task_that_the_pool_has_lost_is_not_awaited_for_ever(monkeypatch):
    """Regression: a worker's exit was noticed before its task was, and the run hung."""
    monkeypatch.setattr(worker_pool, "_LONGEST_START", 0.0)
    lost, other = Future(), Future()
    other.set_running_or_notify_cancel()
    ends = threading.Timer(0.05, other.set_result, [0])
    ends.start()
    result = RewardWorkers(options("a:b"), 1)._wait(lost, [lost, other], limit=0.01)
    assert other.done() and result.cause == "its worker process ended, and no result came back"
    assert RewardWorkers(options("a:b"), 1)._wait(other, [lost, other], limit=0.0) == 0


def test_workers_that_never_take_a_response_end_the_run(tmp_path, monkeypatch):
    """Their module hangs where it is imported a second time, such as at a lock that the run has."""
    (tmp_path / "locked.py").write_text(
        "import multiprocessing, time\n"
        "if multiprocessing.parent_process(): time.sleep(3600)\n"
        "def score(data_source, solution_str, ground_truth, extra_info): return 1\n"
    )
    monkeypatch.setattr(worker_pool, "_LONGEST_START", 0.1)
    reward = options(f"{tmp_path}/locked.py:score", timeout=0.1)
    with RewardWorkers(reward, 2) as pool, pytest.raises(UserError) as raised:
        score_batch(pool, [Example("q", "mine")] * 3, ["a"] * 3)
    assert "none has taken a response within 0.2 s" in str(raised.value)


@pytest.mark.usefixtures("hangs_are_over_at_once")
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_a_hung_or_dead_worker_costs_its_sample_only(module, workers, caplog):
    """Results are in the order of the responses and do not depend on the number of workers."""
    examples = [Example("q", "mine", "4", {"index": i}) for i in range(len(RESPONSES))]
    progress = []
    with RewardWorkers(options(f"{module}:misbehaves"), workers) as pool:
        batch = score_batch(
            pool,
            examples,
            RESPONSES,
            options=Reward(fallback_score=-1.0),
            report_progress=progress.append,
        )
    assert progress == list(range(1, len(RESPONSES) + 1))
    expected = [5, -1, 3, -1, 6, -1, -1, -1, -1, -1, 10]
    assert batch.scores.tolist() == expected
    assert batch.failed.tolist() == [score == -1 for score in expected]
    np.testing.assert_array_equal(
        batch.extra["index"], [np.nan if score == -1 else i for i, score in enumerate(expected)]
    )
    (record,) = caplog.records
    for words in (
        "7 of 11 responses could not be scored",
        "row 1 of the batch, data_source='mine'",
        "response ending in 'sleep'",
        "no result within config.reward.timeout=3600 seconds; its worker process was replaced",
    ):
        assert words in record.getMessage()
    # The system may take a while to end what was killed.
    wait_until(lambda: f"sleep\x003600.{os.getpid()}\x00" not in _commands_of_processes())


@pytest.mark.usefixtures("hangs_are_over_at_once")
@pytest.mark.parametrize(
    "workers",
    [pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(3, marks=pytest.mark.slow)],
)
def test_after_consecutive_time_outs_the_rest_of_a_batch_fails_at_once(module, workers, caplog):
    """They are consecutive in the order of the samples, whatever the workers finish first.

    The longest response fills the pipe to the workers, so that sending the others is interrupted.
    """
    hangs = ["abc", "sleep", "sleep", "exit7", "regex", "sleep", "sleep"]
    untried = ["sleep", "x" * 10**7, "abc", "sleep"]
    rows = [Example("q", "mine", "4", {"index": 0})] * (len(hangs) + len(untried))
    folder = pathlib.Path(module).parent
    with RewardWorkers(options(f"{module}:misbehaves", max_timeouts=3), workers) as pool:
        before = len(list(folder.glob("*.hangs")))
        batch = score_batch(pool, rows, [*hangs, *untried], options=Reward(fallback_score=-1.0))
        assert batch.scores.tolist() == [5] + [-1] * 10 and batch.failures == 10
        # With several workers, some may have begun the samples that follow the third time-out.
        assert len(list(folder.glob("*.hangs"))) - before <= 5 + workers - 1
        # The next batch is tried again, in new workers.
        assert score_batch(pool, rows[:1], ["abc"]).scores.tolist() == [5]
    line, summary = [record.getMessage() for record in caplog.records]
    assert line == (
        "3 consecutive responses ran out of time (config.reward.max_timeouts), so the other 4 of "
        "this batch count as failed"
    )
    assert "10 of 11 responses could not be scored" in summary


def _commands_of_processes():
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            yield (folder / "cmdline").read_text()
        except OSError:  # it has ended in the meantime
            pass


def test_workers_survive_signals_load_no_jax_and_are_replaced_while_idle(module):
    with RewardWorkers(options(f"{module}:process"), 1) as pool:
        batch = score_batch(pool, [Example("q", "mine")], ["a"])
        # The run's main module, here pytest, is not imported again.
        assert batch.extra == {"jax": [0], "main": [0]}
        (worker,) = (int(score) for score in batch.scores)
        assert os.getpgid(worker) == worker  # Ctrl-C goes to the group of the run
        os.kill(worker, signal.SIGTERM)  # a cluster may send it to every process
        assert score_batch(pool, [Example("q", "mine")], ["a"]).scores.tolist() == [worker]
        os.kill(worker, signal.SIGKILL)
        batch = score_batch(pool, [Example("q", "mine")] * 2, ["a", "b"])
        assert batch.failures == 0 and worker not in batch.scores
    wait_until(lambda: not is_running(int(batch.scores[0])))


PROGRAM = """
import dataclasses, sys
from jax_ppo.config.schema import Reward
from jax_ppo.rewards.samples import RewardRow
from jax_ppo.rewards.worker_pool import RewardWorkers

folder = sys.argv[1]
# Without a guard against being imported as the main module of a worker.
for function in ("process", "misbehaves"):
    options = dataclasses.replace(Reward(), function=f"{folder}:{function}", timeout=3600.0)
    pool = RewardWorkers(options, 1)
    if function == "process":
        print(int(pool.score([RewardRow("x")], ["a"])[0].score), flush=True)
    else:
        pool.score([RewardRow("x", "", {"index": 0})], ["abc"])
        print("hanging", flush=True)
        pool.score([RewardRow("x")], ["regex"])
"""


def test_no_worker_outlives_a_killed_run(module):
    """Not even one whose reward function never lets the interpreter look at a signal."""
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, module], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    idle = int(run.stdout.readline())
    assert run.stdout.readline() == "hanging\n" and is_running(idle)
    wait_until(lambda: any(hangs(module, child) for child in _children(run.pid)))
    children = _children(run.pid)
    assert idle in children and len(children) >= 2
    run.kill()
    run.wait()
    run.stdout.close()
    wait_until(lambda: not any(map(is_running, children)))


def _children(parent):
    """Return the process ids of the children of `parent`."""
    children = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, fields = path.read_text().rpartition(")")
        except OSError:
            continue
        if int(fields.split()[1]) == parent:
            children.append(int(path.parent.name))
    return children


def test_user_functions_run_in_one_worker_unless_configured_otherwise():
    def count(needs_workers, function, **changes):
        isolated = isolate(len, options(function, **changes), needs_workers)
        return 0 if isolated is len else isolated._workers

    assert count(False, "") == 0
    assert count(True, "mine.py:f") == 1
    assert count(True, "mine.py:f", workers=0) == 0
    assert count(False, "", workers=2) == 2


hanging = threading.Event()


async def hangs_at_even_lengths(solution_str, **_):
    """Score as a notebook's function may: with `await`, which needs a loop in its thread."""
    if len(solution_str) % 2 == 0:
        hanging.set()
        threading.Event().wait()
    return {"score": len(solution_str), "process": os.getpid()}


def hangs_with_a_batch(data_sources, solution_strs, ground_truths, extra_infos):
    hanging.set()
    threading.Event().wait()


def in_threads(function, **changes):
    """Return the threads that call a function of this process."""
    name = keep_in_memory("f", function, function.__name__)
    return isolate(resolve_reward_function(Reward(name)), options(name, **changes), True)


@pytest.fixture
def calls_that_hang_are_late(monkeypatch):
    def wait(futures, seconds):
        wait_until(lambda: futures[0].done() or hanging.is_set())
        if not futures[0].done():
            hanging.clear()

    monkeypatch.setattr(timed_threads.concurrent.futures, "wait", wait)


def test_late_calls_of_a_function_of_this_process_are_left_in_their_threads(
    calls_that_hang_are_late,
):
    responses = ["a", "bc", "def", "gh", "ijkl", "not tried", "m"]
    threads = in_threads(hangs_at_even_lengths, max_timeouts=2)
    for _ in range(2):  # nothing of the first batch is in the way of the second
        with threads as pool:
            outcomes = pool.score([RewardRow("x")] * 7, responses)
        assert [outcomes[0].score, outcomes[2].score] == [1, 3]
        assert outcomes[0].extra["process"] == os.getpid()
        assert [outcome.timed_out for outcome in (outcomes[1], *outcomes[3:5])] == [True] * 3
        assert "=3600 seconds; its call goes on in a thread" in outcomes[1].cause
        assert ["2 consecutive" in outcome.cause for outcome in outcomes[5:]] == [True] * 2


def test_calls_that_a_given_up_batch_leaves_behind_take_no_thread_from_the_next():
    threads, began, results = timed_threads.TimedThreads(1), threading.Event(), []

    def hang():
        began.set()
        threading.Event().wait()

    calls = threads.call_all([threading.Event().wait, hang], 0.01)
    next(calls)
    assert began.wait(60)
    calls.close()
    next_batch = threading.Thread(
        target=lambda: results.extend(threads.call_all([lambda: 1], 60)), daemon=True
    )
    next_batch.start()
    next_batch.join(60)
    assert results and results[0].result() == 1


def test_a_late_batch_function_of_this_process_fails_for_all(calls_that_hang_are_late):
    outcomes = in_threads(hangs_with_a_batch).score([RewardRow("x")] * 2, ["a"] * 2)
    assert ["for each of 2 responses" in outcome.cause for outcome in outcomes] == [True] * 2


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.ENOENT])
def test_a_full_or_missing_shared_memory_is_named_with_the_option_without_workers(
    reason, monkeypatch
):
    def refuse(*arguments):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", refuse)
    match = f"^/dev/shm, .*: {os.strerror(reason)}; .*--shm-size.*config.reward.workers=0"
    with pytest.raises(UserError, match=match):
        RewardWorkers(Reward(function="rewards.py:process"), workers=1).__enter__()
