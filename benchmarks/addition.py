"""The task of time_to_reward.py: two-digit addition, answers written least significant digit first ("12+34=" -> "640").

What both sides are given: the splits of the data folder's `tinyadd`, the rule, and the clock.
"""

import json
import time
from collections.abc import Callable

import harness

FOLDER = harness.DATA / "tinyadd"
PAD, EOS = 0, 1
PROMPT, RESPONSE = 6, 4  # tokens: two numbers and two signs; three digits and EOS
TARGET = 0.9  # share of held-out sums answered right, greedily, at which the clock stops
EVAL_EVERY, MAX_STEPS = 5, 400


def splits() -> dict[str, list]:
    """vocab: the symbol of each token id; train, held: pairs of numbers."""
    return json.loads((FOLDER / "splits.json").read_text())


def prompt(pair) -> str:
    return f"{pair[0]}+{pair[1]}="


def answer(pair) -> str:
    """Three digits, the least significant first. A right response is these and EOS."""
    return f"{sum(pair):03d}"[::-1]


def until_target(
    step: Callable[[], None], wait: Callable[[], None], accuracy: Callable[[], float]
) -> dict:
    """Takes steps until the target, or MAX_STEPS of them. The clock stands still in evaluations.

    Args:
      step: begins the next step.
      wait: returns when all steps begun are done.
      accuracy: on the held-out sums.

    Returns:
      seconds on the clock, steps, accuracy at the first and the last evaluation, and curve: [steps, seconds, accuracy] of
      each.
    """
    seconds, curve = 0.0, [[0, 0.0, accuracy()]]
    while curve[-1][2] < TARGET and curve[-1][0] < MAX_STEPS:
        start = time.perf_counter()
        for _ in range(EVAL_EVERY):
            step()
        wait()
        seconds += time.perf_counter() - start
        curve.append([curve[-1][0] + EVAL_EVERY, seconds, accuracy()])
    return {
        "seconds": seconds,
        "steps": curve[-1][0],
        "accuracy_before": curve[0][2],
        "accuracy": curve[-1][2],
        "curve": curve,
    }
