"""Reward functions in worker processes: a hung or dead worker costs one sample, not the run.

A worker imports the reward function by its name in the options. It does not load JAX. A function
that is only in the memory of this process runs in threads here.
"""

import concurrent.futures
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import Any

import pebble

from jax_ppo import processes
from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError, print_any_text, printable_lines
from jax_ppo.registries import IN_MEMORY
from jax_ppo.rewards.custom import BatchFunction, score_whole_batch
from jax_ppo.rewards.reward_functions import resolve_reward_function
from jax_ppo.rewards.samples import (
    Outcome,
    ProgressReporter,
    RewardFunction,
    RewardRow,
    ScoringFailure,
    TimeoutCounter,
    score_sample,
)
from jax_ppo.timed_threads import CallTimeout, TimedThreads

_MAX_ATTEMPTS = 3  # to score a sample whose pool broke before a worker took it
_LONGEST_STOP = 10.0  # seconds to wait for the threads of a pool whose workers are killed
_LONGEST_START = 300.0  # seconds until a new worker has imported the function and takes a task
# Stands for exit code 0 of a worker, which Pebble would take for the end that it asked for.
_ENDED_WITH_ZERO = 256


class _WorkerProcess(processes.WorkerProcess):
    """A worker that is killed with all processes that it started, and never ends by itself."""

    @property
    def exitcode(self) -> int | None:
        """Return the exit code, never 0: workers do not end by themselves."""
        code = super().exitcode
        return _ENDED_WITH_ZERO if code == 0 else code

    def terminate(self) -> None:
        """Kill the worker and the processes that it started; it ignores SIGTERM."""
        assert self.pid is not None, "the worker has not been started"
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it is not the leader of its group yet, or has ended
            self.kill()


class _WorkerContext(processes.WorkerContext):
    Process = _WorkerProcess  # type: ignore[assignment]


def isolate(
    function: RewardFunction | BatchFunction, options: Reward, needs_workers: bool
) -> "RewardFunction | BatchFunction | RewardWorkers":
    """Return the workers that apply a reward function, or the function if there are none.

    By default it is one, where needed, which keeps the order of calls.
    """
    workers = int(needs_workers) if options.workers is None else options.workers
    if not workers:
        return function
    if options.function in IN_MEMORY:
        return RewardThreads(options, workers, function)
    return RewardWorkers(options, workers, takes_batches=isinstance(function, BatchFunction))


class RewardWorkers:
    """Worker processes that apply the reward function of the options.

    Results do not depend on the number of workers, unless the function keeps a state between
    calls. The workers start with the first batch, or when the context is entered.
    """

    def __init__(self, options: Reward, workers: int, takes_batches: bool = False) -> None:
        """Prepare the pool: one process if the function takes whole batches, else at least one."""
        self._options = options
        self._takes_batches = takes_batches
        self._workers = 1 if takes_batches else max(1, workers)
        self._pool: pebble.ProcessPool | None = None

    def __enter__(self) -> "RewardWorkers":
        self._running_pool()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.stop()
            # A process that has left a worker's group may keep the pool's pipe open, and full.
            waiting = threading.Thread(target=self._pool.join, daemon=True)
            waiting.start()
            waiting.join(_LONGEST_STOP)
            self._pool = None

    def score(
        self,
        rows: Sequence[RewardRow],
        responses: Sequence[str],
        report_progress: ProgressReporter = lambda done: None,
    ) -> list[Outcome]:
        """Score each response for its row; return results and failures in the order of the rows."""
        if not self._takes_batches:
            tasks = list(zip(rows, responses, strict=True))
            return self._run(tasks, self._options.timeout, report_progress)
        # One call, which may take as long as responses without a result before a batch is given up.
        limit = self._options.timeout * max(1, min(len(rows), self._options.max_timeouts))
        [outcomes] = self._run([(list(rows), list(responses))], limit, lambda done: None)
        return [outcomes] * len(rows) if isinstance(outcomes, ScoringFailure) else outcomes

    def _run(
        self, tasks: Sequence[tuple[Any, Any]], limit: float, report_progress: ProgressReporter
    ) -> list[Any]:
        """Return what `score_in_worker` returns for each task, within `limit` seconds each."""
        outcomes: list[Any] = [None] * len(tasks)
        for _ in range(_MAX_ATTEMPTS):
            missing = [index for index, outcome in enumerate(outcomes) if outcome is None]
            if not missing:
                break
            pool = self._running_pool()
            futures = {
                index: pool.schedule(score_in_worker, args=tasks[index], timeout=limit)
                for index in missing
            }
            timeouts = TimeoutCounter(self._options.max_timeouts)
            for index, future in futures.items():
                outcomes[index] = self._wait(future, futures.values(), limit)
                report_progress(index + 1)
                if timeouts.should_give_up(outcomes[index]):
                    # The workers would go on with the samples that they have been sent.
                    self.stop()
                    outcomes[index + 1 :] = timeouts.fail_rest(len(tasks) - index - 1)
                    break
        died_early = ScoringFailure("the worker processes ended before they took this task")
        return [died_early if outcome is None else outcome for outcome in outcomes]

    def _running_pool(self) -> pebble.ProcessPool:
        """Return the pool; start it if there is none, or if all workers died while idle."""
        if self._pool is not None and not self._pool.active:
            self.stop()
        if self._pool is None:
            with processes.explained_semaphores(", or set config.reward.workers=0"):
                self._pool = pebble.ProcessPool(
                    max_workers=self._workers,
                    initializer=initialize_worker,
                    initargs=(os.getpid(), self._options),
                    context=_WorkerContext(),
                )
                if not self._pool.active:  # reading it starts the workers
                    raise RuntimeError("the worker processes of the reward function did not start")
        return self._pool

    def _wait(self, future: Future[Any], futures: Collection[Future[Any]], limit: float) -> Any:
        """Return the result of a task, or its failure; `None` if no worker took it."""
        is_last = False
        while concurrent.futures.wait([future], limit + _LONGEST_START).not_done:
            waiting = [other for other in futures if not other.done()]
            is_idle = not any(other.running() for other in waiting)
            # A lost task may be all that is left: see below.
            if is_idle and (len(waiting) > 1 or len(futures) == 1):
                raise UserError(
                    "the reward's worker processes (config.reward.function="
                    f"{self._options.function!r}, config.reward.terms={self._options.terms!r}): "
                    f"none has taken a response within {limit + _LONGEST_START:g} s: importing "
                    "the module of a function may hang there"
                )
            if is_last:
                # The pool can miss that a process ended as soon as it had taken a task.
                return ScoringFailure("its worker process ended, and no result came back")
            is_last = all(other.done() for other in futures if other is not future)
        try:
            return future.result()
        except TimeoutError:
            return self._late(limit, "its worker process was replaced")
        except pebble.ProcessExpired as error:
            code = error.exitcode
            end = f"exit code {code % _ENDED_WITH_ZERO}"
            if code < 0:
                end = f"signal {signal.Signals(-code).name}"
            return ScoringFailure(f"its worker process ended with {end} and was replaced")
        except BrokenProcessPool:
            return None
        except Exception as error:  # such as columns that cannot be sent to another process
            return ScoringFailure(printable_lines(f"{type(error).__name__}: {error}"))

    def _late(self, limit: float, end: str) -> ScoringFailure:
        seconds = f"config.reward.timeout={self._options.timeout:g} seconds"
        if limit != self._options.timeout:
            count = round(limit / self._options.timeout)
            seconds += f" for each of {count} responses (config.reward.max_timeouts at most)"
        return ScoringFailure(f"no result within {seconds}; {end}", timed_out=True)


class RewardThreads(RewardWorkers):
    """Threads of this process, for a function that no other process can import.

    Python cannot end a thread: a call that takes too long counts as failed, but goes on.
    """

    def __init__(
        self, options: Reward, threads: int, function: RewardFunction | BatchFunction
    ) -> None:
        super().__init__(options, threads, takes_batches=isinstance(function, BatchFunction))
        self._function = function
        self._threads = TimedThreads(self._workers)

    def __enter__(self) -> "RewardThreads":
        return self

    def _run(
        self, tasks: Sequence[tuple[Any, Any]], limit: float, report_progress: ProgressReporter
    ) -> list[Any]:
        outcomes: list[Any] = []
        timeouts = TimeoutCounter(self._options.max_timeouts)
        calls = [functools.partial(_score, self._function, *task) for task in tasks]
        with contextlib.closing(self._threads.call_all(calls, limit)) as results:
            for result in results:
                try:
                    outcomes.append(result.result())
                except CallTimeout:
                    outcomes.append(self._late(limit, "its call goes on in a thread"))
                report_progress(len(outcomes))
                if timeouts.should_give_up(outcomes[-1]):
                    break
        return outcomes + timeouts.fail_rest(len(tasks) - len(outcomes))


# Of a worker process: its reward function, or why it has none.
_worker_function: RewardFunction | BatchFunction | None = None
_worker_obstacle: UserError | None = None


def initialize_worker(parent: int, options: Reward) -> None:
    """Prepare this process to score samples; it ends with the process `parent`, the run's."""
    global _worker_function, _worker_obstacle
    # In a separate session, the worker does not receive signals to the run's process group
    # (Ctrl-C), and can be killed together with the processes that the reward function started.
    os.setsid()
    _ignore_sigterm()
    print_any_text()  # the reward function may
    processes.end_with_parent(parent)
    # A reward function that uses JAX must not take the accelerator of the run.
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        _worker_function = resolve_reward_function(options)
    except UserError as error:  # the run could import it, but this process cannot
        _worker_obstacle = error


def score_in_worker(row: Any, response: Any) -> Outcome | list[Outcome]:
    """Score one response in an initialized worker, or a list of them if the function takes one."""
    if _worker_function is None:
        return ScoringFailure(printable_lines(str(_worker_obstacle)))
    return _score(_worker_function, row, response)


def _score(
    function: RewardFunction | BatchFunction, row: Any, response: Any
) -> Outcome | list[Outcome]:
    try:
        if isinstance(function, BatchFunction):
            return score_whole_batch(function, row, response)
        return score_sample(function, row, response)
    except KeyboardInterrupt:  # the function's own: Ctrl-C reaches neither worker nor thread
        return ScoringFailure("KeyboardInterrupt")


def _ignore_sigterm() -> None:
    """Leave SIGTERM to the run, which finishes its step and saves when a cluster stops it."""
    worker = os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        # Processes that the reward function forks inherit the handler but not the exemption.
        if os.getpid() != worker:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, handle)
