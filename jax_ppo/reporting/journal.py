"""Logging shared by all commands: step metrics, evaluations and the summary at the end."""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jax_ppo.config.schema import Config
from jax_ppo.reporting import console
from jax_ppo.reporting.curves import Panel, plot_curves
from jax_ppo.reporting.sinks import MetricsLog
from jax_ppo.reporting.summary import collect_versions, write_summary_file
from jax_ppo.runtime import compilation, distributed
from jax_ppo.training.checkpoint import Progress

SPEED_COLUMNS = (
    console.Column(metric="seconds/step", width=5, format=".2f", unit=" s"),
    console.Column(metric="tokens_per_second", width=7, format=",.0f", unit=" tok/s"),
)


@dataclasses.dataclass(frozen=True)
class ReportLayout:
    """Presentation of a command's metrics.

    Attributes:
      columns: the line printed after each step.
      panels: the plots of training_curves.png.
      learning_rate_option: the option to lower when gradients are not finite.
    """

    columns: tuple[console.Column, ...]
    panels: tuple[Panel, ...]
    learning_rate_option: str


class Journal:
    """The logs, the progress bar and the clock of a run. Only the main process writes and prints.

    Attributes:
      progress: how far the run has come. Evaluations are appended to it.
    """

    def __init__(
        self,
        *,
        config: Config,
        total_steps: int,
        layout: ReportLayout,
        workdir: Path,
        progress: Progress,
        compiled: compilation.Compilations,
    ) -> None:
        """Open the logs.

        Args:
          config: all options; wandb shows them.
          total_steps: number of steps of the whole run.
          layout: how metrics are shown.
          workdir: the folder to write to.
          progress: of the run; the logs continue after its step.
          compiled: counts of compiled programs, for the summary.
        """
        self.progress = progress
        self._config = config
        self._total_steps = total_steps
        self._layout = layout
        self._workdir = workdir
        self._compiled = compiled
        self._log = MetricsLog(
            workdir=workdir,
            loggers=tuple(filter(None, config.trainer.logger.split(","))),
            experiment_name=config.experiment_name,
            config_dict=dataclasses.asdict(config),
            first_step=progress.step,
            is_main=distributed.is_main(),
        )
        self._bar = console.ProgressBar(total_steps, progress.step, distributed.is_main())
        self._skipped_in_a_row = 0
        # Monotonic: a change of the system's clock does not affect durations.
        self._started = time.monotonic()
        self._step_started = self._started

    def __enter__(self) -> Self:
        self._log.__enter__()
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)
        self._log.__exit__(*error)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure the host's seconds in the block, and report them with the next step."""
        return self._bar.phase(name)

    def write_step(
        self, step: int, metrics: dict[str, float], tokens: float, skipped: bool
    ) -> None:
        """Write the metrics of a step, together with its seconds and throughput.

        Args:
          step: the step, from 1.
          metrics: values by name.
          tokens: tokens that the step processed, for the throughput.
          skipped: whether an update was skipped because its gradient was not finite.

        Raises:
          FloatingPointError: config.trainer.max_skipped_updates steps in a row were skipped.
        """
        # Wall-clock time between two rows, whatever the host waited for.
        metrics = metrics | self._bar.take_seconds()
        now = time.monotonic()
        metrics["seconds/step"] = now - self._step_started
        metrics["tokens_per_second"] = tokens / metrics["seconds/step"]
        self._step_started = now
        self._log.write(step, metrics)
        self._bar.advance(
            console.format_step_line(step, self._total_steps, metrics, self._layout.columns)
        )
        # A single skipped step is harmless; many in a row mean that the run has diverged.
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == self._config.trainer.max_skipped_updates:
            raise FloatingPointError(
                f"step {step}: the gradient was not finite for {self._skipped_in_a_row} steps in a "
                "row (config.trainer.max_skipped_updates); a smaller "
                f"config.{self._layout.learning_rate_option} or config.model.dtype=float32 may help"
            )

    def write_evaluation(self, steps_done: int, means: dict[str, float | None], shown: str) -> None:
        """Record and write an evaluation.

        Args:
          steps_done: steps of training before the evaluation.
          means: values by name; logs leave out those that are None.
          shown: the text for the console.
        """
        self.progress.evaluations.append({"step": steps_done} | means)
        # Logs hold numbers only, while the progress keeps None for an undefined mean.
        defined = {f"eval/{name}": value for name, value in means.items() if value is not None}
        self._log.write(steps_done, defined)
        self._bar.print_line(f"evaluation after step {steps_done}: {shown}")
        self._plot()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the next step's seconds."""
        self._bar.take_seconds()
        self._step_started = time.monotonic()

    def write_summary(self, steps_done: int, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        """Write the curves and summary.json, and return the contents of summary.json.

        Args:
          steps_done: steps of the whole run that are complete.
          mesh: the devices that the run used.
        """
        summary = {
            "experiment_name": self._config.experiment_name,
            "steps": steps_done,
            "total_steps": self._total_steps,
            "evaluations": self.progress.evaluations,
            "seconds": time.monotonic() - self._started,
            "devices": np.prod(list(mesh.shape.values())).item(),
            "mesh": dict(mesh.shape),
            "compilations": dataclasses.asdict(self._compiled),
            "versions": collect_versions(),
        }
        self._plot()
        if distributed.is_main():
            write_summary_file(self._workdir, summary)
        return summary

    def _plot(self) -> None:
        if distributed.is_main():
            plot_curves(
                csv_path=self._workdir / "training_metrics.csv",
                evaluations=self.progress.evaluations,
                png_path=self._workdir / "training_curves.png",
                panels=self._layout.panels,
            )
