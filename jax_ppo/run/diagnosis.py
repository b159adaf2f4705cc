"""Watch a run for the problems of the table `DIAGNOSTICS`."""

import collections
import math
from collections.abc import Sequence

from jax_ppo.config.schema import Config
from jax_ppo.run.diagnostics import DIAGNOSTICS, Metrics


class Diagnosis:
    """Watches the metrics of a run."""

    def __init__(self, config: Config, total_steps: int) -> None:
        """Start watching a run of `total_steps` steps with these options."""
        self._config = config
        self._total_steps = total_steps
        self._history = collections.deque[Metrics](maxlen=max(d.steps for d in DIAGNOSTICS))

    def observe(self, metrics: Metrics, misses: Sequence[str] = ()) -> dict[str, str]:
        """Record the next step; return the messages of the problems that it has, by name.

        Args:
          metrics: the step's metrics.
          misses: descriptions of some of its wrong responses.
        """
        self._history.append(metrics)
        messages = {}
        for diagnostic in DIAGNOSTICS:
            steps = diagnostic.steps
            if diagnostic.in_short_runs:
                steps = max(min(steps, self._total_steps), 1)
            history = list(self._history)[-steps:]
            # NaN is no figure: nothing is concluded from it.
            is_complete = not any(
                math.isnan(row.get(name, math.nan)) for row in history for name in diagnostic.reads
            )
            message = None
            if len(history) == steps and is_complete:
                message = diagnostic.check(self._config, history)
            if message is not None:
                lines = [message]
                if diagnostic.shows_misses:
                    lines += misses
                messages[diagnostic.name] = "\n  ".join(lines)
        return messages
