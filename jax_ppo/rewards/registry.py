"""From an option to a reward function, and from a batch of responses to scores.

A reward function takes an Example and the text of a response and returns a RewardResult. `resolve_reward_function` gives the built-in
one, which goes by each row's data_source, or wraps one of the user's own with verl's signature.
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
from jax_ppo.rewards.custom import ARGUMENTS, parse_reward_output
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
      correct: float32 [n], 1 or 0, and NaN where the rule has no notion of it or failed.
      failures: responses whose rule raised an error or gave no finite number; they have the fallback score.
      extra: what else the rule reported, by name: float32 [n], NaN where a response has no such number.
      step_rewards: rewards within each response, as in RewardResult.
    """

    scores: np.ndarray
    correct: np.ndarray
    failures: int
    extra: dict[str, np.ndarray]
    step_rewards: list[tuple[tuple[int, float], ...]]


def resolve_reward_function(function: str = "", gsm8k_method: str = "strict") -> RewardFunction:
    """The reward function of the options reward.function and reward.gsm8k_method.

    Args:
      function: "" for the built-in rule of each row's data_source, or `module:function`, where the module is an
        importable one or a path to a .py file. It is called as f(data_source=, solution_str=, ground_truth=,
        extra_info=) and returns a number, or a dict with "score", "acc" if it has a notion of correct, and other
        numbers to report.
      gsm8k_method: "strict" or "flexible".

    Raises:
      UserError: no such module or function, or one that does not take those arguments.
    """
    if gsm8k_method not in rules.METHODS:
        raise UserError(
            f"config.reward.gsm8k_method={gsm8k_method!r}: expected one of {rules.METHODS}."
            f"{did_you_mean(gsm8k_method, rules.METHODS)}"
        )
    if not function:
        return lambda example, response: _built_in(example, response, gsm8k_method)
    call = plugins.load_plugin(function, "reward.function", ARGUMENTS, by_name=True)

    def reward(example: Example, response: str) -> RewardResult:
        return parse_reward_output(
            call(
                data_source=example.data_source,
                solution_str=response,
                ground_truth=example.ground_truth,
                extra_info=example.extra_info,
            )
        )

    return reward


def validate_data_sources(examples: Sequence[Example], function: str = "") -> None:
    """Raises UserError for an example that the reward function of `resolve_reward_function` can not score. To be called before a run.

    With a function of one's own everything passes. Otherwise each data_source must have a built-in rule, and the ground
    truth of a numeric one must be a number.
    """
    if function:
        return
    for row, example in enumerate(examples, 1):
        source = example.data_source
        if source not in SOURCES:
            raise UserError(
                f"example {row}: data_source={source!r} has no built-in rule; expected one of {SOURCES}, "
                f"or config.reward.function=module:function.{did_you_mean(source, SOURCES)}"
            )
        if source in NUMERIC_SOURCES and rules.parse_number(str(example.ground_truth)) is None:
            raise UserError(
                f"example {row}: ground_truth={example.ground_truth!r} is not a number, as "
                f"data_source={source!r} wants; mend the data, or set "
                "config.reward.function=module:function"
            )


def score_batch(
    reward_function: RewardFunction,
    examples: Sequence[Example],
    responses_text: Sequence[str],
    fallback_score: float = 0.0,
) -> ScoredBatch:
    """Scores each response for its example. A sample that can not be scored costs nobody else anything.

    Args:
      reward_function: of `resolve_reward_function`.
      examples: n.
      responses_text: n, response i for example i.
      fallback_score: of a sample whose reward raised an error or was not finite in float32. It is counted, and the
        first one of the batch is logged with its traceback.

    Raises:
      ValueError: not as many responses as examples.
    """
    results, first_failure, failures = [], None, 0
    for row, (example, response) in enumerate(zip(examples, responses_text, strict=True)):
        try:
            results.append(_checked(reward_function(example, response), response))
        except Exception:
            failures += 1
            results.append(RewardResult(fallback_score))
            first_failure = first_failure or _described(row, example, response)
    if failures:
        log.warning(
            "%d of %d responses could not be scored and got config.reward.fallback_score=%g. The first was %s",
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


def _built_in(example, response, gsm8k_method):
    if example.data_source == "openai/gsm8k":
        return rules.gsm8k(response, example.ground_truth, gsm8k_method)
    if example.data_source == "arithmetic":
        return rules.arithmetic(response, example.ground_truth)
    if example.data_source == "stories":
        return rules.stories(response)
    raise UserError(
        f"data_source={example.data_source!r} has no built-in rule; expected one of {SOURCES}"
    )


def _checked(result, response):
    if not abs(result.score) <= _LARGEST:  # NaN too
        raise UserError(f"the score is {result.score}; expected a finite float32")
    for end, reward in result.step_rewards:
        if not (0 <= end <= len(response) and abs(reward) <= _LARGEST):
            raise UserError(
                f"the step reward {(end, reward)}: expected an end within the {len(response)} characters of the "
                "response and a finite float32"
            )
    return result


def _described(row, example, response):
    """To be called where an error is handled: names the sample and gives the traceback."""
    return (
        f"row {row} of the batch, data_source={example.data_source!r}, extra_info={_short(example.extra_info)}, "
        f"response ending in {response[-200:]!r}:\n{traceback.format_exc()}"
    )


def _short(value, width=200):
    text = repr(value)
    return text if len(text) <= width else text[:width] + "..."
