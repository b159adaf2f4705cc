"""Reward functions from options.

A reward function takes a RewardRow and the text of a response and returns a RewardResult.
`resolve_reward_function` returns the built-in one, which applies a rule by each row's data_source,
or wraps a user-defined one with verl's signature.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_ppo.config import plugins
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.rewards import rules
from jax_ppo.rewards.custom import REWARD_ARGUMENTS, parse_reward_output
from jax_ppo.rewards.rules import RewardResult
from jax_ppo.rewards.samples import RewardFunction, RewardRow

if TYPE_CHECKING:  # `jax_ppo.types` imports jax, which reward workers do not load
    from jax_ppo.types import Example

NUMERIC_SOURCES = ("openai/gsm8k", "arithmetic")  # their ground truth is a number
SOURCES = (*NUMERIC_SOURCES, "stories")


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
        return lambda row, response: _apply_built_in_rule(row, response, gsm8k_method)
    user_function = plugins.load_plugin(function, "reward.function", REWARD_ARGUMENTS, by_name=True)

    def call_user_function(row: RewardRow, response: str) -> RewardResult:
        return parse_reward_output(
            user_function(
                data_source=row.data_source,
                solution_str=response,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
            )
        )

    return call_user_function


def validate_data_sources(examples: Sequence["Example"], function: str = "") -> None:
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


def _apply_built_in_rule(row: RewardRow, response: str, gsm8k_method: str) -> RewardResult:
    if row.data_source == "openai/gsm8k":
        return rules.score_gsm8k(response, row.ground_truth, gsm8k_method)
    if row.data_source == "arithmetic":
        return rules.score_arithmetic(response, row.ground_truth)
    if row.data_source == "stories":
        return rules.score_story(response)
    raise UserError(
        f"data_source={row.data_source!r} has no built-in rule; expected one of {SOURCES}"
    )
