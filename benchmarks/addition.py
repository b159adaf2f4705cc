"""The task of time_to_reward.py: two-digit addition, answered least significant digit first.

Example: "12+34=" -> "640". The splits of the data folder's `tinyadd` and the rule are shared by
both sides, and the clock by those of time_to_sums.py, too.
"""

import json
import math
import os
import sys
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


class Clock:
    """Times a run between evaluations; it starts when it is made.

    Args:
      target: Held-out accuracy that ends the run.
      max_steps: Steps that end it, too.
      max_cpu_seconds: Processor seconds that end it, too.
      first: Step of the first evaluation.
    """

    def __init__(
        self, target: float, max_steps: int, max_cpu_seconds: float = math.inf, first: int = 0
    ):
        self.target, self.max_steps, self.first = target, max_steps, first
        self.max_cpu_seconds = max_cpu_seconds
        self.seconds = self.cpu_seconds = 0.0
        self.curve = []  # of each evaluation: steps, seconds, accuracy, processor seconds
        self._start()

    def measure(self, steps: int, accuracy: Callable[[], float]) -> bool:
        """Evaluate with the clock stopped; return whether the run is over."""
        if steps < self.first:
            return False
        self.seconds += time.perf_counter() - self._seconds
        self.cpu_seconds += harness.cpu_seconds() - self._cpu_seconds
        self.curve.append([steps, self.seconds, accuracy(), self.cpu_seconds])
        print("steps, seconds, accuracy, processor seconds:", self.curve[-1], file=sys.stderr)
        self._start()
        return (
            self.curve[-1][2] >= self.target
            or steps >= self.max_steps
            or self.cpu_seconds >= self.max_cpu_seconds
        )

    def figures(self) -> dict:
        """Return `seconds`, `cpu_seconds`, `steps`, the last `accuracy` and the `curve`."""
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "steps": self.curve[-1][0],
            "accuracy": self.curve[-1][2],
            "curve": self.curve,
        }

    def _start(self) -> None:
        self._seconds, self._cpu_seconds = time.perf_counter(), harness.cpu_seconds()


def until_target(
    clock: Clock,
    step: Callable[[], None],
    wait: Callable[[], None],
    accuracy: Callable[[], float],
    every: int = EVAL_EVERY,
) -> dict:
    """Train until the clock ends the run; return its figures.

    Args:
      clock: Measures before the first step and after every few.
      step: Starts the next step.
      wait: Returns when all started steps are complete.
      accuracy: Evaluates the held-out sums.
      every: Steps between evaluations.
    """
    steps = 0
    while not clock.measure(steps, accuracy):
        for _ in range(every):
            step()
        wait()
        steps += every
    return clock.figures()
