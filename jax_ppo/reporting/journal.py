"""What the runs of all commands tell alike: figures of steps, evaluations, and a summary at the end."""

import dataclasses
import time
from pathlib import Path

import numpy as np

from jax_ppo.reporting import console
from jax_ppo.reporting import sinks as metrics
from jax_ppo.runtime import compilation, distributed
from jax_ppo.training.checkpoint import Progress

SPEED = (
    ("", "seconds/step", 5, ".2f", " s"),
    ("", "tokens_per_second", 7, ",.0f", " tok/s"),
)  # columns


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a command's figures are shown.

    Attributes:
      columns: as console.format_step_line takes them.
      panels: as metrics.plot_curves takes them.
      rate: the option to lower where gradients are not finite.
      optional: columns that are left out where a step has no such figure.
    """

    columns: tuple
    panels: tuple
    rate: str
    optional: tuple[str, ...] = ()


class Journal:
    """The logs, the bar and the clock of a run; shown and written by the main process alone."""

    def __init__(
        self,
        run,
        layout: Layout,
        workdir: Path,
        progress: Progress,
        compiled: compilation.Compilations,
    ):
        """`run`: with config, total_steps and mesh."""
        self.progress, self._run, self._layout, self._workdir, self._compiled = (
            progress,
            run,
            layout,
            workdir,
            compiled,
        )
        trainer = run.config.trainer
        self._log = metrics.MetricsLog(
            workdir,
            tuple(filter(None, trainer.logger.split(","))),
            run.config.experiment_name,
            dataclasses.asdict(run.config),
            progress.step,
            distributed.is_main(),
        )
        self._bar = console.ProgressBar(run.total_steps, progress.step, distributed.is_main())
        self._skipped = 0
        self._started = self._step_started = time.monotonic()

    def __enter__(self):
        self._log.__enter__()
        self._bar.__enter__()
        return self

    def __exit__(self, *error):
        self._bar.__exit__(*error)
        self._log.__exit__(*error)

    def phase(self, name: str):
        """Times what the host does in it, for the next step that is written."""
        return self._bar.phase(name)

    def write_step(
        self, step: int, figures: dict[str, float], tokens: float, skipped: bool
    ) -> None:
        """Writes a step's figures, with its seconds. Raises FloatingPointError after too many in a row that were skipped."""
        figures = figures | self._bar.take_seconds()
        now = time.monotonic()
        figures["seconds/step"], self._step_started = now - self._step_started, now
        figures["tokens_per_second"] = tokens / figures["seconds/step"]
        self._log.write(step, figures)
        self._bar.advance(
            console.format_step_line(
                step, self._run.total_steps, figures, self._layout.columns, self._layout.optional
            )
        )
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped == self._run.config.trainer.max_skipped_updates:
            raise FloatingPointError(
                f"step {step}: the gradient was not finite for {self._skipped} steps in a row (config.trainer."
                f"max_skipped_updates); a smaller config.{self._layout.rate} or config.model.dtype=float32 may help"
            )

    def write_evaluation(self, done: int, means: dict[str, float | None], shown: str) -> None:
        """Keeps and writes an evaluation: means by name (logs leave out those that are None), and what the console shows."""
        self.progress.evaluations.append({"step": done} | means)
        self._log.write(
            done, {f"eval/{name}": value for name, value in means.items() if value is not None}
        )
        self._bar.print_line(f"evaluation after step {done}: {shown}")
        self._plot()
        self.restart_clock()

    def restart_clock(self) -> None:
        """What has passed since the last step's figures is no part of the next step."""
        self._bar.take_seconds()
        self._step_started = time.monotonic()

    def write_summary(self, steps: int) -> dict:
        """Writes the curves and summary.json after so many steps of the whole run. Returns what summary.json holds."""
        run = self._run
        summary = {
            "experiment_name": run.config.experiment_name,
            "steps": steps,
            "total_steps": run.total_steps,
            "evaluations": self.progress.evaluations,
            "seconds": time.monotonic() - self._started,
            "devices": np.prod(list(run.mesh.shape.values())).item(),
            "mesh": dict(run.mesh.shape),
            "compilations": dataclasses.asdict(self._compiled),
            "versions": metrics.versions(),
        }
        self._plot()
        if distributed.is_main():
            metrics.write_summary(self._workdir, summary)
        return summary

    def _plot(self):
        if distributed.is_main():
            metrics.plot_curves(
                self._workdir / "training_metrics.csv",
                self.progress.evaluations,
                self._workdir / "training_curves.png",
                self._layout.panels,
            )
