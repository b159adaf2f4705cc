"""The code of a reward worker process, which resolves the reward function and scores samples.

A worker imports the reward function by its name in the options. It does not load JAX.
"""

import os
import signal
from collections.abc import Sequence
from types import FrameType

from jax_ppo import processes
from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError, print_any_text, printable_lines
from jax_ppo.rewards import registry, samples
from jax_ppo.rewards.batch_functions import BatchFunction, score_whole_batch
from jax_ppo.rewards.judge import Judge

_function: samples.RewardFunction | BatchFunction | None = None
_obstacle: UserError | None = None


def initialize_worker(parent: int, options: Reward) -> None:
    """Prepare this process to score samples; it ends with the process `parent`, the run's."""
    global _function, _obstacle
    # In a separate session, the worker does not receive signals to the run's process group
    # (Ctrl-C), and can be killed together with the processes that the reward function started.
    os.setsid()
    _ignore_sigterm()
    print_any_text()  # the reward function may
    processes.end_with_parent(parent)
    # A reward function that uses JAX must not take the accelerator of the run.
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        _function = registry.resolve_reward_function(options, Judge.from_options(options))
    except UserError as error:  # the run could import it, but this process cannot
        _obstacle = error


def score_batch_in_worker(
    rows: Sequence[samples.RewardRow], responses: Sequence[str]
) -> list[samples.Outcome]:
    """Score all responses of a batch in an initialized worker, with a function for batches."""
    if not isinstance(_function, BatchFunction):
        return [samples.ScoringFailure(printable_lines(str(_obstacle)))] * len(rows)
    try:
        return score_whole_batch(_function, rows, responses)
    except KeyboardInterrupt:  # the function's own: Ctrl-C does not reach this process
        return [samples.ScoringFailure("KeyboardInterrupt")] * len(rows)


def score_in_worker(row: samples.RewardRow, response: str) -> samples.Outcome:
    """Score one response in an initialized worker."""
    if _function is None:
        return samples.ScoringFailure(printable_lines(str(_obstacle)))
    assert not isinstance(_function, BatchFunction), "it is called with whole batches"
    try:
        return samples.score_sample(_function, row, response)
    except KeyboardInterrupt:  # the function's own: Ctrl-C does not reach this process
        return samples.ScoringFailure("KeyboardInterrupt")


def _ignore_sigterm() -> None:
    """Leave SIGTERM to the run, which finishes its step and saves when a cluster stops it."""
    worker = os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        # Processes that the reward function forks inherit the handler but not the exemption.
        if os.getpid() != worker:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, handle)
