"""What a reward function of the user's own is called with, and how its answer is read."""

import math
from typing import Any

from jax_ppo.rewards.rules import RewardResult

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def parse_reward_output(value: Any) -> RewardResult:
    """The result behind what a function returned.

    A number (Python's, NumPy's, an array of one) is the score. A dict holds "score", and may hold "acc", correct from
    0.5 on, "step_rewards", pairs of characters up to a step's end and its reward, and other numbers to report. What else it
    holds, such as the answer that was found, is left out.

    Raises:
      TypeError: something else, a dict without "score", a score that is text, or steps that are no pairs of numbers.
    """
    if not isinstance(value, dict):
        return RewardResult(_number(value))
    if "score" not in value:
        raise TypeError(
            f"the reward function returned a dict with {', '.join(map(repr, value)) or 'nothing'}; "
            "expected 'score'"
        )
    extra = {}
    for name, item in value.items():
        if name not in ("score", "acc", "step_rewards") and _is_number(item):
            extra[str(name)] = _number(item)
    acc = math.nan if value.get("acc") is None else _number(value["acc"])
    steps = () if value.get("step_rewards") is None else tuple(map(_step, value["step_rewards"]))
    return RewardResult(
        _number(value["score"]), None if math.isnan(acc) else acc >= 0.5, extra, steps
    )


def _step(pair):
    end, reward = (
        map(_number, pair) if getattr(pair, "__len__", lambda: 0)() == 2 else (math.nan, 0)
    )
    if not end.is_integer():
        raise TypeError(
            f"the reward function returned {pair!r} among its step_rewards; expected (characters, reward)"
        )
    return int(end), reward


def _is_number(value):
    return (
        not isinstance(value, (str, bytes))
        and hasattr(value, "__float__")
        and getattr(value, "size", 1) == 1
    )


def _number(value):
    if not _is_number(value):
        raise TypeError(
            f"the reward function returned {value!r} of type {type(value).__name__}; expected a number"
        )
    return float(value.item() if hasattr(value, "item") else value)
