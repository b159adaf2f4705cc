"""Scoring of one response: what a reward function reads and returns, and how it fails."""

import copy
import dataclasses
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_ppo.errors import UserError, printable_lines
from jax_ppo.http_client import RequestTimeout

if TYPE_CHECKING:  # `jax_ppo.types` imports jax, which reward workers do not load
    from jax_ppo.types import Example

log = logging.getLogger(__name__)

LARGEST_SCORE = 3.4028234663852886e38  # of float32
_MAX_TRACEBACK = 4000  # characters


class RewardRow(NamedTuple):
    """The columns of a row that a reward function reads."""

    data_source: str  # selects the built-in rule
    ground_truth: str = ""  # the reference answer
    extra_info: dict[str, Any] = {}  # further columns
    prompt: str | tuple[dict[str, str], ...] = ""  # text, or the messages of a chat
    completion_ids: Sequence[int] | np.ndarray = ()  # the tokens of the response, if they are known
    thought: str = ""  # the mark of a thought that the prompt has opened; "" without one

    @classmethod
    def from_example(
        cls, example: "Example", completion_ids: Sequence[int] | np.ndarray = (), thought: str = ""
    ) -> "RewardRow":
        """Copy the columns of an example: a function that changes them changes no other sample."""
        columns = (example.ground_truth, example.extra_info, example.prompt)
        return cls(example.data_source, *copy.deepcopy(columns), completion_ids, thought)


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """The reward of one response."""

    score: float  # the reward, finite
    correct: bool | None = None  # `None` if the rule does not define correctness
    extra: dict[str, float] = dataclasses.field(default_factory=dict)  # other numbers, by name
    # Rewards within the response: (characters of its text up to the end of a step, reward of the
    # step).
    step_rewards: tuple[tuple[int, float], ...] = ()
    # The answer that the rule extracted from the response, in a form in which equal answers are
    # equal texts; `None` if there is none, or if the rule extracts no answers.
    answer: str | None = None
    ignored: tuple[str, ...] = ()  # what else a user-defined function returned: not reported
    is_missing: bool = False  # a user-defined function returned None: it does not apply


class ScoringFailure(NamedTuple):
    """A sample that could not be scored."""

    cause: str  # the traceback, or why there is none; printable characters and line breaks only
    timed_out: bool = False  # whether there was no result in time


RewardFunction = Callable[[RewardRow, str], RewardResult]
Outcome = RewardResult | ScoringFailure
ProgressReporter = Callable[[int], object]  # takes the number of samples that have an outcome


def grade_answer(
    answer: str | None, correct: bool = False, score: float | None = None
) -> RewardResult:
    """Return an answer's result, by default 1 or 0; `extra` has `answered`, 0 for `None`."""
    return RewardResult(
        score=float(correct) if score is None else score,
        correct=correct,
        extra={"answered": float(answer is not None)},
        answer=answer,
    )


class TimeoutCounter:
    """Counts time-outs in a row, by the order of samples; after `limit` the rest is not tried."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def should_give_up(self, outcome: Outcome | None) -> bool:
        """Count the outcome of the next sample; return whether the rest should not be tried."""
        timed_out = isinstance(outcome, ScoringFailure) and outcome.timed_out
        self._count = self._count + 1 if timed_out else 0
        return self._count >= self._limit

    def fail_rest(self, count: int) -> list[Outcome]:
        """Return the outcomes of the `count` samples that are not tried, and say so in one line."""
        cause = f"not tried: {self._limit} consecutive responses ran out of time before it"
        if count:
            log.warning(
                "%d consecutive responses ran out of time (config.reward.max_timeouts), so the "
                "other %d of this batch count as failed",
                self._limit,
                count,
            )
        return [ScoringFailure(cause)] * count


def score_sample(function: RewardFunction, row: RewardRow, response: str) -> Outcome:
    """Return the result of a reward function; a failure if it raised or its result is invalid."""
    try:
        return validate_result(function(row, response), response)
    except KeyboardInterrupt:
        raise
    # This includes SystemExit: a reward function must not end the run as if it had succeeded.
    except BaseException as error:
        return failure_of(error)


def failure_of(error: BaseException) -> ScoringFailure:
    """Return the failure of a function: what was wrong with its result, or the traceback's end."""
    if isinstance(error, UserError):
        return ScoringFailure(printable_lines(str(error)))
    text = printable_lines("".join(traceback.format_exception(error)))
    if len(text) > _MAX_TRACEBACK:
        text = f"...{text[-_MAX_TRACEBACK:]}"
    return ScoringFailure(text, timed_out=isinstance(error, RequestTimeout))


def validate_result(result: RewardResult, response: str) -> RewardResult:
    """Return a result; raise `UserError` if a number is not finite or a step ends past the text."""
    # Written so that NaN fails too.
    if not abs(result.score) <= LARGEST_SCORE:
        raise UserError(f"the score is {result.score}; expected a finite float32")
    for end, reward in result.step_rewards:
        if not (0 <= end <= len(response) and abs(reward) <= LARGEST_SCORE):
            raise UserError(
                f"the step reward {(end, reward)}: expected an end within the {len(response)} "
                "characters of the response and a finite float32"
            )
    return result
