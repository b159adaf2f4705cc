"""Scoring of one response: the columns that a reward function reads, and its failures."""

import copy
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jax_ppo.errors import UserError, printable_lines
from jax_ppo.rewards.rules import RewardResult

if TYPE_CHECKING:  # `jax_ppo.types` imports jax, which reward workers do not load
    from jax_ppo.types import Example

LARGEST_SCORE = 3.4028234663852886e38  # of float32
_MAX_TRACEBACK = 4000  # characters


class RewardRow(NamedTuple):
    """The columns of a row that a reward function reads.

    Attributes:
      data_source: selects the built-in rule.
      ground_truth: the reference answer.
      extra_info: further columns.
      prompt: text, or the messages of a chat.
    """

    data_source: str
    ground_truth: str = ""
    extra_info: dict[str, Any] = {}
    prompt: str | tuple[dict[str, str], ...] = ""

    @classmethod
    def from_example(cls, example: "Example") -> "RewardRow":
        """Copy the columns of an example: a function may change them, but of no other sample."""
        return cls(
            data_source=example.data_source,
            ground_truth=copy.deepcopy(example.ground_truth),
            extra_info=copy.deepcopy(example.extra_info),
            prompt=copy.deepcopy(example.prompt),
        )


class ScoringFailure(NamedTuple):
    """A sample that could not be scored.

    Attributes:
      cause: the traceback, or why there is none; printable characters and line breaks only.
    """

    cause: str


RewardFunction = Callable[[RewardRow, str], RewardResult]
Outcome = RewardResult | ScoringFailure


def score_sample(function: RewardFunction, row: RewardRow, response: str) -> Outcome:
    """Return the result of a reward function; a failure if it raised or its result is invalid."""
    try:
        return validate_result(function(row, response), response)
    except KeyboardInterrupt:
        raise
    # This includes SystemExit: a reward function must not end the run as if it had succeeded.
    except BaseException:
        text = printable_lines(traceback.format_exc())
        if len(text) > _MAX_TRACEBACK:
            text = f"...{text[-_MAX_TRACEBACK:]}"
        return ScoringFailure(text)


def validate_result(result: RewardResult, response: str) -> RewardResult:
    """Return the result of scoring `response`.

    Raises:
      UserError: a number in it is not finite in float32, or a step ends outside of the response.
    """
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
