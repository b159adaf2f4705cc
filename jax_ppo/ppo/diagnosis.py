"""Watch a run for the problems of the table `DIAGNOSTICS`."""

import collections
import math
from collections.abc import Sequence

from jax_ppo.config.schema import Config
from jax_ppo.ppo.diagnostics import DIAGNOSTICS, Metrics


class Diagnosis:
    """Watches the metrics of a run."""

    def __init__(self, config: Config) -> None:
        """Start watching a run with these options."""
        self._config = config
        self._history = collections.deque[Metrics](maxlen=max(d.steps for d in DIAGNOSTICS))
        self._present: set[str] = set()

    def observe(self, metrics: Metrics, misses: Sequence[str] = ()) -> dict[str, str]:
        """Record the next step; return the messages of problems that have newly appeared, by name.

        Args:
          metrics: the step's metrics.
          misses: descriptions of some of its wrong responses.
        """
        self._history.append(metrics)
        messages = {}
        for diagnostic in DIAGNOSTICS:
            history = list(self._history)[-diagnostic.steps :]
            # NaN is no figure: nothing is concluded from it.
            is_complete = not any(
                math.isnan(row.get(name, math.nan)) for row in history for name in diagnostic.reads
            )
            message = None
            if len(history) == diagnostic.steps and is_complete:
                message = diagnostic.check(self._config, history)
            if message is None:
                self._present.discard(diagnostic.name)
            elif diagnostic.name not in self._present:
                # Shown when it becomes true, not at every step.
                self._present.add(diagnostic.name)
                lines = [message]
                if diagnostic.shows_misses:
                    lines += misses
                messages[diagnostic.name] = "\n  ".join(lines)
        return messages
