"""Rewards of steps within a response, assigned to its tokens by positions in its text."""

import bisect
from collections.abc import Callable, Sequence

import numpy as np

_INCOMPLETE_CHARACTER = "\ufffd"


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
            token_counts, end, key=lambda count: _count_characters(decode(tokens[:count]))
        )
        rewards[last_token] += reward
    return rewards


def _count_characters(text: str) -> int:
    """Return the number of characters that are complete."""
    return len(text.rstrip(_INCOMPLETE_CHARACTER))
