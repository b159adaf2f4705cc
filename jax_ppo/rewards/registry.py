"""Reward functions from options, and scores of a batch of responses.

A reward function takes an Example and the text of a response and returns a RewardResult.
`resolve_reward_function` returns the built-in one, which applies a rule by each row's data_source,
or wraps a user-defined one with verl's signature.
"""

import dataclasses
import logging
import math
import traceback
from collections.abc import Callable, Sequence

import numpy as np

from jax_ppo.config import plugins
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.rewards import rules
from jax_ppo.rewards.custom import REWARD_ARGUMENTS, parse_reward_output
from jax_ppo.rewards.rules import RewardResult
from jax_ppo.types import Example

log = logging.getLogger(__name__)

RewardFunction = Callable[[Example, str], RewardResult]

NUMERIC_SOURCES = ("openai/gsm8k", "arithmetic")  # their ground truth is a number
_LARGEST = float(np.finfo(np.float32).max)
SOURCES = (*NUMERIC_SOURCES, "stories")


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """Scores of n responses.

    Attributes:
      scores: float32 [n], finite.
      correct: float32 [n], 1 or 0, and NaN if the rule does not define correctness or failed.
      failures: number of responses whose rule raised an error or returned a score that is not
        finite; they have the fallback score.
      extra: other numbers that the rule reported, by name: float32 [n], NaN if a response has no
        such number.
      step_rewards: rewards within each response, as in RewardResult.
    """

    scores: np.ndarray
    correct: np.ndarray
    failures: int
    extra: dict[str, np.ndarray]
    step_rewards: list[tuple[tuple[int, float], ...]]


def resolve_reward_function(function: str = "", gsm8k_method: str = "strict") -> RewardFunction:
    """Return the reward function that the options reward.function and reward.gsm8k_method select.

    Args:
      function: "" for the built-in rule of each row's data_source, or `module:function`, where the
        module is importable or a path to a .py file. It is called as f(data_source=, solution_str=,
        ground_truth=, extra_info=) and returns a number, or a dict with "score", optionally "acc",
        and other numbers to report.
      gsm8k_method: "strict" or "flexible".

    Raises:
      UserError: there is no such module or function, or it does not accept those arguments.
    """
    if gsm8k_method not in rules.GSM8K_METHODS:
        raise UserError(
            f"config.reward.gsm8k_method={gsm8k_method!r}: expected one of {rules.GSM8K_METHODS}."
            f"{did_you_mean(gsm8k_method, rules.GSM8K_METHODS)}"
        )
    if not function:
        return lambda example, response: _apply_built_in_rule(example, response, gsm8k_method)
    user_function = plugins.load_plugin(function, "reward.function", REWARD_ARGUMENTS, by_name=True)

    def call_user_function(example: Example, response: str) -> RewardResult:
        return parse_reward_output(
            user_function(
                data_source=example.data_source,
                solution_str=response,
                ground_truth=example.ground_truth,
                extra_info=example.extra_info,
            )
        )

    return call_user_function


def validate_data_sources(examples: Sequence[Example], function: str = "") -> None:
    """Raise UserError for the first example that the reward function cannot score.

    Call it before a run. A user-defined function accepts everything. Otherwise each data_source
    must have a built-in rule, and the ground truth of a numeric one must be a number.

    Args:
      examples: the rows.
      function: config.reward.function.
    """
    if function:
        return
    for row, example in enumerate(examples, 1):
        source = example.data_source
        if source not in SOURCES:
            raise UserError(
                f"example {row}: data_source={source!r} has no built-in rule; expected one of "
                f"{SOURCES}, or config.reward.function=module:function."
                f"{did_you_mean(source, SOURCES)}"
            )
        if source in NUMERIC_SOURCES and rules.parse_number(str(example.ground_truth)) is None:
            raise UserError(
                f"example {row}: ground_truth={example.ground_truth!r} is not a number, as "
                f"data_source={source!r} requires; correct the data, or set "
                "config.reward.function=module:function"
            )


def score_batch(
    reward_function: RewardFunction,
    examples: Sequence[Example],
    responses_text: Sequence[str],
    fallback_score: float = 0.0,
) -> ScoredBatch:
    """Score each response for its example. A sample that cannot be scored affects no other.

    Args:
      reward_function: see `resolve_reward_function`.
      examples: n examples.
      responses_text: n texts; response i answers example i.
      fallback_score: score of a sample whose reward raised an error or is not finite in float32.
        Such samples are counted, and the first one of the batch is logged with its traceback.

    Raises:
      ValueError: the numbers of responses and examples differ.
    """
    results: list[RewardResult] = []
    first_failure = ""
    failures = 0
    for row, (example, response) in enumerate(zip(examples, responses_text, strict=True)):
        try:
            results.append(_validate_result(reward_function(example, response), response))
        except Exception:
            failures += 1
            results.append(RewardResult(score=fallback_score))
            first_failure = first_failure or _describe_failure(row, example, response)
    if failures:
        log.warning(
            "%d of %d responses could not be scored and got config.reward.fallback_score=%g. "
            "The first was %s",
            failures,
            len(results),
            fallback_score,
            first_failure,
        )
    names = sorted({name for result in results for name in result.extra})
    return ScoredBatch(
        scores=np.array([result.score for result in results], np.float32),
        correct=np.array(
            [math.nan if result.correct is None else result.correct for result in results],
            np.float32,
        ),
        failures=failures,
        extra={
            name: np.array([result.extra.get(name, math.nan) for result in results], np.float32)
            for name in names
        },
        step_rewards=[result.step_rewards for result in results],
    )


def _apply_built_in_rule(example: Example, response: str, gsm8k_method: str) -> RewardResult:
    if example.data_source == "openai/gsm8k":
        return rules.score_gsm8k(response, example.ground_truth, gsm8k_method)
    if example.data_source == "arithmetic":
        return rules.score_arithmetic(response, example.ground_truth)
    if example.data_source == "stories":
        return rules.score_story(response)
    raise UserError(
        f"data_source={example.data_source!r} has no built-in rule; expected one of {SOURCES}"
    )


def _validate_result(result: RewardResult, response: str) -> RewardResult:
    # Written so that NaN fails too.
    if not abs(result.score) <= _LARGEST:
        raise UserError(f"the score is {result.score}; expected a finite float32")
    for end, reward in result.step_rewards:
        if not (0 <= end <= len(response) and abs(reward) <= _LARGEST):
            raise UserError(
                f"the step reward {(end, reward)}: expected an end within the {len(response)} "
                "characters of the response and a finite float32"
            )
    return result


def _describe_failure(row: int, example: Example, response: str) -> str:
    """Return the sample and the traceback of the exception that is being handled."""
    return (
        f"row {row} of the batch, data_source={example.data_source!r}, "
        f"extra_info={_shorten_repr(example.extra_info)}, "
        f"response ending in {response[-200:]!r}:\n{traceback.format_exc()}"
    )


def _shorten_repr(value: object, width: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= width else text[:width] + "..."
