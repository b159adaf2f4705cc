"""The clock of runs that end at a held-out accuracy: evaluations do not count."""

import math
import sys
import time
from collections.abc import Callable

import harness


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
) -> dict:
    """Train until the clock ends the run; return its figures.

    Args:
      clock: Measures before the first step and after each.
      step: Starts the next step.
      wait: Returns when the step is complete.
      accuracy: Evaluates the held-out sums.
    """
    steps = 0
    while not clock.measure(steps, accuracy):
        step()
        wait()
        steps += 1
    return clock.figures()
