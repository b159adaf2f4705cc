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
      packages: Packages whose versions are reported.
      wait: Blocks until its argument is computed, for programs with asynchronous dispatch.
    """

    def __init__(self, packages: tuple[str, ...], wait: Callable = lambda work: None):
        self._packages, self._wait = packages, wait
        self._requests, self._figures = queue.Queue(), queue.Queue()
        self._split = False  # whether the current turn measures its phases
        self._phases = {}
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
            self._figures.put(figures | ({"phases": dict(self._phases)} if self._split else {}))
        self._split = self._requests.get()
        self._phases.clear()

    def phase(self, name: str, work: Callable) -> Callable:
        """Wrap `work` to wait for it and add its seconds to the phase in split turns."""

        def timed(*args, **kwargs):
            if not self._split:
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
        harness.serve(
            turn=lambda: self._run_turn(split=False),
            packages=self._packages,
            split_turn=lambda: self._run_turn(split=True),
        )
        os._exit(0)  # the loop itself does not end

    def _run_turn(self, split: bool) -> dict:
        self._requests.put(split)
        return self._figures.get()
