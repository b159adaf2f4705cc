"""Pause a training loop that runs by itself between two steps until the next turn."""

import os
import queue
import threading
import time
from collections.abc import Callable

import harness


class Turnstile:
    """Runs one step of a training loop per turn.

    The loop runs in the main thread and calls `step_done` between its steps.

    Args:
      plain_turns: Turns without added work in the loop. After these, `phase` measures.
      packages: Packages whose versions are reported.
      wait: Blocks until its argument is computed, for programs with asynchronous dispatch.
    """

    def __init__(
        self, plain_turns: int, packages: tuple[str, ...], wait: Callable = lambda work: None
    ):
        self._plain_turns, self._packages, self._wait = plain_turns, packages, wait
        self._go, self._figures = queue.Queue(), queue.Queue()
        self._turns, self._phases = 0, {}
        self._channel = os.dup(1)
        os.dup2(2, 1)  # output before the first turn is not an answer

    def step_done(self, figures: dict | None = None) -> None:
        """End a turn and return when the next one begins.

        Args:
          figures: Results of the turn; `None` before the first step.
        """
        if figures is None:
            threading.Thread(target=self._serve, daemon=True).start()
        else:
            self._figures.put(figures | ({"phases": dict(self._phases)} if self._phases else {}))
        self._go.get()
        self._phases.clear()
        self._turns += 1

    def phase(self, name: str, work: Callable) -> Callable:
        """Wrap `work` to add its seconds to the phase once the plain turns are over."""

        def timed(*args, **kwargs):
            if self._turns <= self._plain_turns:
                return work(*args, **kwargs)
            self._wait((args, kwargs))
            start = time.perf_counter()
            result = work(*args, **kwargs)
            self._wait(result)
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start
            return result

        return timed

    def _serve(self) -> None:
        os.dup2(self._channel, 1)
        harness.serve(self._turn, self._packages)
        os._exit(0)  # the loop itself does not end

    def _turn(self) -> dict:
        self._go.put(None)
        return self._figures.get()
