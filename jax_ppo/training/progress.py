"""How far a run has come, as checkpoints store it."""

import copy
import dataclasses
import time
from typing import Any

# Fields of `Progress` that a resumed run continues from, besides its step and position.
HISTORY = (
    "evaluations",
    "evaluation_pending",
    "started_at",
    "kept_seconds",
    "solve_rates",
    "warnings",
    "changed_options",
)


@dataclasses.dataclass
class Progress:
    """How far a run has come.

    Together with the trained arrays and the options, this is everything that a checkpoint holds.

    Attributes:
      step: number of completed steps.
      position: training examples consumed.
      evaluations: for each evaluation so far a dict of `step` and the means by name; `None` for a
        mean that is undefined.
      evaluation_pending: whether a signal interrupted the evaluation after this step, so that a
        resumed run begins with it.
      started_at: when the run was set up for the first time, in seconds since 1970.
      kept_seconds: time of the steps that still count: not of those that were repeated after an
        interruption, nor of those whose update was skipped.
      solve_rates: the share of correct responses by the row of the training data, as text, for
        `data.curriculum`; empty without one.
      warnings: by kind, `text`, `first_step`, `last_step` and `count` of a warning.
      changed_options: lines about options that a resume has changed.
    """

    step: int = 0
    position: int = 0
    evaluations: list[dict] = dataclasses.field(default_factory=list)
    evaluation_pending: bool = False
    started_at: float = dataclasses.field(default_factory=time.time)
    kept_seconds: float = 0.0
    solve_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    warnings: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    changed_options: list[str] = dataclasses.field(default_factory=list)

    def warn(self, kind: str, text: str, step: int) -> bool:
        """Record a warning after `step` steps; return whether it is the first of its kind."""
        known = self.warnings.get(kind)
        # Replaced, not changed: a checkpoint is written while the run continues.
        self.warnings[kind] = {
            "text": known["text"] if known else text,
            "first_step": known["first_step"] if known else step,
            "last_step": step,
            "count": known["count"] + 1 if known else 1,
        }
        return known is None

    def warning_texts(self) -> list[str]:
        """Return the warnings so far; how often each was repeated, and the last step."""
        return [
            warning["text"]
            + f"\n({warning['count']} times, last in step {warning['last_step']})"
            * (warning["count"] > 1)
            for warning in self.warnings.values()
        ]

    def history(self) -> dict[str, Any]:
        """Return the part of a checkpoint's `meta` that reports of the run continue from."""
        # Copies: a checkpoint is written while the run continues.
        return {name: copy.copy(getattr(self, name)) for name in HISTORY}
