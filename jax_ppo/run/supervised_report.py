"""Reports of a supervised run: the metrics of each step, evaluations, and the summary."""

from pathlib import Path
from typing import Any

import jax

from jax_ppo.reporting import journal
from jax_ppo.run.supervised_build import SupervisedRun
from jax_ppo.runtime import compilation
from jax_ppo.training.progress import Progress


class Reporter(journal.Journal):
    """Writes the metrics of each step, one step late, and everything else that a run reports."""

    def __init__(
        self,
        run: SupervisedRun,
        workdir: Path,
        progress: Progress,
        compiled: compilation.Compilations,
    ) -> None:
        """Open the logs.

        Args:
          run: the parts of the run.
          workdir: the folder to write to.
          progress: how far the run has come.
          compiled: counts of compiled programs, for the summary.
        """
        super().__init__(
            config=run.config,
            total_steps=run.total_steps,
            layout=run.task.layout,
            workdir=workdir,
            progress=progress,
            compiled=compiled,
        )
        self._mesh = run.mesh
        self._pending: tuple[int, dict[str, jax.Array]] | None = None

    def report_later(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Keep the metrics of a step, counted from 1, until they can be fetched without waiting."""
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Fetch and write the pending metrics, if there are any.

        Raises:
          FloatingPointError: too many steps in a row were skipped.
        """
        if self._pending is None:
            return
        step, on_mesh = self._pending
        self._pending = None
        # This waits for the step. In the loop the next one has been dispatched before.
        fetched = jax.device_get(on_mesh)
        metrics = {f"train/{name}": float(value) for name, value in fetched.items()}
        self.write_step(
            step,
            metrics,
            tokens=metrics["train/tokens"],
            skipped=bool(metrics["train/skipped"]),
        )

    def report_evaluation(self, completed_steps: int, means: dict[str, float]) -> float:
        """Write an evaluation; return the quality that the best checkpoint is chosen by."""
        shown = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        self.write_evaluation(completed_steps, dict(means), shown)
        # Larger is better for the best checkpoint, hence the negative loss.
        return means.get("accuracy", -means["loss"])

    def finish(self, steps: int) -> dict[str, Any]:
        """Write the pending metrics and the summary; return the contents of summary.json."""
        self.flush()
        return self.write_summary(steps, self._mesh)
