"""The task of time_to_reward.py: two-digit addition, answered least significant digit first.

Example: "12+34=" -> "640". The splits of the data folder's `tinyadd`, the rule and the clock are
shared by both sides.
"""

import json
import os
import time
from collections.abc import Callable, Sequence

import harness

FOLDER = harness.DATA / "tinyadd"
PAD, EOS = 0, 1
PROMPT, RESPONSE = 6, 4  # tokens: two numbers and two signs; three digits and EOS
TARGET = 0.9  # greedy held-out accuracy at which the clock stops
EVAL_EVERY = 5  # steps
MAX_STEPS = int(os.environ.get("ADDITION_MAX_STEPS", "400"))


def splits() -> dict[str, list]:
    """Load the splits.

    Returns:
      `vocab`, the symbol of each token id; `train` and `held`, pairs of numbers.
    """
    return json.loads((FOLDER / "splits.json").read_text())


def prompt(pair: Sequence[int]) -> str:
    """Return the prompt of a sum."""
    return f"{pair[0]}+{pair[1]}="


def answer(pair: Sequence[int]) -> str:
    """Return the three digits of the sum, least significant first.

    A correct response is these digits followed by EOS.
    """
    return f"{sum(pair):03d}"[::-1]


def until_target(
    step: Callable[[], None], wait: Callable[[], None], accuracy: Callable[[], float]
) -> dict:
    """Train until the target accuracy, or for MAX_STEPS steps, timing everything but evaluations.

    Args:
      step: Starts the next step.
      wait: Returns when all started steps are complete.
      accuracy: Evaluates the held-out sums.

    Returns:
      `seconds` and `cpu_seconds` of training, `steps`,
      `accuracy_before` and `accuracy` (first and last evaluation),
      and `curve`, [steps, seconds, accuracy] of each evaluation.
    """
    seconds, cpu_seconds = 0.0, 0.0
    curve = [[0, 0.0, accuracy()]]
    while curve[-1][2] < TARGET and curve[-1][0] < MAX_STEPS:
        start, cpu_start = time.perf_counter(), harness.cpu_seconds()
        for _ in range(EVAL_EVERY):
            step()
        wait()
        seconds += time.perf_counter() - start
        cpu_seconds += harness.cpu_seconds() - cpu_start
        curve.append([curve[-1][0] + EVAL_EVERY, seconds, accuracy()])
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "steps": curve[-1][0],
        "accuracy_before": curve[0][2],
        "accuracy": curve[-1][2],
        "curve": curve,
    }
