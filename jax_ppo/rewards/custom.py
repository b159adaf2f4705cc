"""The interface of user-defined reward functions: their arguments and return values."""

import asyncio
import bisect
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_ppo.rewards.rules import RewardResult

# A reward function is called with these keyword arguments, as in verl.
REWARD_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")

_RESERVED_KEYS = ("score", "acc", "step_rewards", "pred")


def call_and_wait(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return what a function returns, or what its coroutine does."""
    value = function(**arguments)
    if inspect.isawaitable(value):
        return _event_loop().run_until_complete(value)
    return value


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process: clients that a function keeps are bound to one."""
    return asyncio.new_event_loop()


def parse_reward_output(value: Any) -> RewardResult:
    """Convert the return value of a reward function to a RewardResult.

    Args:
      value: a number (also an array or tensor with one element) is the score. A dict must hold
        "score". It may hold "acc", which means correct from 0.5 on; "step_rewards", pairs of
        (characters up to the end of a step, reward); "pred", the answer extracted from the
        response; and other numbers to report. The names of other entries are in `ignored`.

    Raises:
      TypeError: the value has another type, a dict has no "score", the score is text, or the steps
        are not pairs of numbers.
    """
    if not isinstance(value, dict):
        return RewardResult(score=_to_float(value))
    if "score" not in value:
        keys = ", ".join(map(repr, value)) or "nothing"
        raise TypeError(f"the reward function returned a dict with {keys}; expected 'score'")
    correct = _parse_accuracy(value.get("acc"))
    step_rewards = value.get("step_rewards")
    if step_rewards is None:
        step_rewards = ()
    answer = value.get("pred")
    others = {str(name): item for name, item in value.items() if name not in _RESERVED_KEYS}
    extra = {name: _to_float(item) for name, item in others.items() if _is_number(item)}
    return RewardResult(
        score=_to_float(value["score"]),
        correct=correct,
        extra=extra,
        step_rewards=tuple(map(_parse_step_reward, step_rewards)),
        answer=None if answer is None else str(answer),
        ignored=tuple(name for name in others if name not in extra and others[name] is not None),
    )


def _parse_accuracy(value: Any) -> bool | None:
    """Return whether an accuracy means correct; `None` if it is missing or NaN."""
    if value is None:
        return None
    accuracy = _to_float(value)
    if math.isnan(accuracy):
        return None
    return accuracy >= 0.5


def _parse_step_reward(pair: Any) -> tuple[int, float]:
    if hasattr(pair, "__len__") and len(pair) == 2:
        end, reward = map(_to_float, pair)
        if end.is_integer():
            return int(end), reward
    raise TypeError(
        f"the reward function returned {pair!r} among its step_rewards; expected (characters, "
        "reward)"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    # Arrays of NumPy and JAX and tensors of torch have a shape.
    return hasattr(value, "__float__") and math.prod(getattr(value, "shape", ())) == 1


def _to_float(value: Any) -> float:
    if not _is_number(value):
        raise TypeError(
            f"the reward function returned {value!r} of type {type(value).__name__}; expected a "
            "number"
        )
    if hasattr(value, "item"):
        value = value.item()
    return float(value)


def assign_step_rewards(
    steps: Sequence[tuple[int, float]],
    tokens: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    longest: int,
) -> np.ndarray:
    """Return a reward per token: each step's reward at the token that completes the step's text.

    Args:
      steps: (end, reward) per step; `end` counts the characters of the response's text up to the
        end of the step, 0..len(text).
      tokens: the response, at least one token.
      decode: returns the text of a prefix of the tokens. The text of a longer prefix must not be
        shorter, except for an incomplete last character (U+FFFD).
      longest: T, the length of the result.

    Returns:
      float32 [T]. Rewards of steps that end in the same token are summed.
    """
    rewards = np.zeros(longest, np.float32)
    token_counts = range(1, len(tokens))
    for end, reward in steps:
        last_token = bisect.bisect_left(
            token_counts, end, key=lambda count: len(decode(tokens[:count]).rstrip("\ufffd"))
        )
        rewards[last_token] += reward
    return rewards
