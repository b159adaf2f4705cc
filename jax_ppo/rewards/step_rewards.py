"""Rewards of steps within a response: from places in its text to its tokens."""

import bisect
from collections.abc import Callable, Sequence

import numpy as np


def assign_step_rewards(
    steps: Sequence[tuple[int, float]],
    tokens: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    longest: int,
) -> np.ndarray:
    """Each step's reward at the token with which the step's text is complete.

    Args:
      steps: (end, reward) of each step: characters of the response's text up to the step's end, 0..len(text).
      tokens: the response, at least one.
      decode: the text of the first so many tokens; it must not get shorter with more of them, but for a last character of which
        a part is missing yet (U+FFFD).
      longest: T.

    Returns:
      float32 [T]; rewards of steps that the same token ends add up.
    """
    rewards = np.zeros(longest, np.float32)
    for end, reward in steps:
        rewards[
            bisect.bisect_left(
                range(1, len(tokens)), end, key=lambda count: _whole(decode(tokens[:count]))
            )
        ] += reward
    return rewards


def _whole(text):
    """Characters that are all there."""
    return len(text.rstrip("\ufffd"))
