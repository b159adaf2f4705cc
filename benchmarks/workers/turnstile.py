"""For programs whose training loop runs by itself: stops it between two steps until the next turn."""

import os
import queue
import threading
import time
from collections.abc import Callable

import harness


class Turnstile:
    """One step of a training loop a turn. The loop runs in the main thread and calls `step_done` between its steps.

    Args:
      plain_turns: turns in which nothing is added to the loop. From there on `phase` measures.
      packages: whose versions to report.
      wait: returns when the work given as an argument is done, for programs that run ahead of their results.
    """

    def __init__(
        self, plain_turns: int, packages: tuple[str, ...], wait: Callable = lambda work: None
    ):
        self._plain_turns, self._packages, self._wait = plain_turns, packages, wait
        self._go, self._figures = queue.Queue(), queue.Queue()
        self._turns, self._phases = 0, {}
        self._channel = os.dup(1)
        os.dup2(2, 1)  # what is printed before the first turn is no answer

    def step_done(self, figures: dict | None = None) -> None:
        """Ends a turn with these figures (None before the first step) and returns when the next one begins."""
        if figures is None:
            threading.Thread(target=self._serve, daemon=True).start()
        else:
            self._figures.put(figures | ({"phases": dict(self._phases)} if self._phases else {}))
        self._go.get()
        self._phases.clear()
        self._turns += 1

    def phase(self, name: str, work: Callable) -> Callable:
        """`work`, its seconds added to the phase's once the plain turns are over."""

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

    def _serve(self):
        os.dup2(self._channel, 1)
        harness.serve(self._turn, self._packages)
        os._exit(0)  # the loop itself knows no end

    def _turn(self):
        self._go.put(None)
        return self._figures.get()
