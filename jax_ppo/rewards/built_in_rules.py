"""The table of built-in rules: how each is bound to its argument, and which rows it scores."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from jax_ppo.rewards import math_rules, rules, text_rules
from jax_ppo.rewards.numbers import parse_number
from jax_ppo.rewards.rules import RewardResult
from jax_ppo.rewards.samples import RewardFunction


@dataclasses.dataclass(frozen=True)
class Rule:
    """A built-in rule.

    Attributes:
      bind: returns the reward function for the argument in a term's brackets, "" without one;
        raises `ValueError` if the argument is invalid.
      sources: the values of `data_source` that select the rule.
      obstacle: returns what is wrong with a ground truth, "" if nothing is.
      is_isolated: whether its time is unbounded, so that it runs only in worker processes.
    """

    bind: Callable[[str], RewardFunction]
    sources: tuple[str, ...] = ()
    obstacle: Callable[[Any], str] = lambda ground_truth: ""
    is_isolated: bool = False


def _without_argument(score: Callable[[str, Any], RewardResult]) -> Callable[[str], RewardFunction]:
    """Return the `bind` of a rule that takes the response, the ground truth and no argument."""

    def bind(argument: str) -> RewardFunction:
        if argument:
            raise ValueError("takes no argument")
        return lambda row, response: score(response, row.ground_truth)

    return bind


def _bind_gsm8k(argument: str) -> RewardFunction:
    method = argument or "strict"
    if method not in rules.GSM8K_METHODS:
        raise ValueError(f"expected one of {', '.join(rules.GSM8K_METHODS)}")
    return lambda row, response: rules.score_gsm8k(response, row.ground_truth, method)


def _bind_story(argument: str) -> RewardFunction:
    return lambda row, response: rules.score_story(response)


def _bind_format(argument: str) -> RewardFunction:
    tags = tuple(tag.strip() for tag in (argument or "think,answer").split(","))
    if not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise ValueError("expected tag names, as in format[think,answer]")
    return lambda row, response: text_rules.score_format(response, tags)


def _bind_length(argument: str) -> RewardFunction:
    bounds = re.fullmatch(r"(\d{1,9}):(\d{1,9})", argument)
    if bounds is None or int(bounds[1]) > int(bounds[2]):
        raise ValueError("expected the minimum and maximum number of words, as in length[5:200]")
    least, most = map(int, bounds.groups())
    return lambda row, response: text_rules.score_length(response, least, most)


def _number_obstacle(ground_truth: Any) -> str:
    if parse_number(str(ground_truth)) is None:
        return "is not a number"
    return ""


def _integer_obstacle(ground_truth: Any) -> str:
    number = parse_number(str(ground_truth))
    if number is None or number.is_time or number.value.denominator > 1:
        return "is not a whole number"
    return ""


def _text_obstacle(ground_truth: Any) -> str:
    if not isinstance(ground_truth, str) or not ground_truth.strip():
        return "is empty or not text"
    return ""


def _pattern_obstacle(ground_truth: Any) -> str:
    try:
        re.compile(ground_truth)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"is not a regular expression: {error}"
    return _text_obstacle(ground_truth)


def _schema_obstacle(ground_truth: Any) -> str:
    try:
        schema = text_rules.parse_schema(ground_truth)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    if not isinstance(schema, dict):
        return "is not a JSON schema"
    return ""


RULES = {
    "gsm8k": Rule(bind=_bind_gsm8k, sources=("openai/gsm8k",), obstacle=_number_obstacle),
    "arithmetic": Rule(
        bind=_without_argument(rules.score_arithmetic),
        sources=("arithmetic",),
        obstacle=_integer_obstacle,
    ),
    "sums": Rule(
        bind=_without_argument(functools.partial(rules.score_gsm8k, method="flexible")),
        sources=("sums",),
        obstacle=_number_obstacle,
    ),
    "stories": Rule(bind=_bind_story, sources=("stories",)),
    "math": Rule(
        bind=_without_argument(math_rules.score_math),
        sources=(
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "EleutherAI/hendrycks_math",
            "HuggingFaceH4/MATH-500",
            "HuggingFaceH4/aime_2024",
            "math_dapo",
            "math",
        ),
        obstacle=_text_obstacle,
        is_isolated=True,
    ),
    "multiple_choice": Rule(
        bind=_without_argument(text_rules.score_choice),
        sources=("multiple_choice",),
        obstacle=_text_obstacle,
    ),
    "exact": Rule(
        bind=_without_argument(text_rules.score_exact), sources=("exact",), obstacle=_text_obstacle
    ),
    # The data choose the pattern and a model the text, so that the time to match has no bound.
    "regex": Rule(
        bind=_without_argument(text_rules.score_regex),
        sources=("regex",),
        obstacle=_pattern_obstacle,
        is_isolated=True,
    ),
    "json_schema": Rule(
        bind=_without_argument(text_rules.score_json),
        sources=("json_schema",),
        obstacle=_schema_obstacle,
        is_isolated=True,
    ),
    "format": Rule(bind=_bind_format),
    "length": Rule(bind=_bind_length),
}

RULE_OF_SOURCE = {source: name for name, rule in RULES.items() for source in rule.sources}

SOURCES = tuple(RULE_OF_SOURCE)
