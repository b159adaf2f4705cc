"""Logging shared by all commands: step metrics, evaluations and the summary at the end."""

import collections
import contextlib
import dataclasses
import json
import operator
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jax_ppo.config import command_line
from jax_ppo.config.parsing import parse_names
from jax_ppo.config.schema import Trainer
from jax_ppo.errors import UserError, closed_outputs, printable_lines, shorten
from jax_ppo.reporting import console, files
from jax_ppo.reporting.files import collect_versions, write_summary_file
from jax_ppo.reporting.html_report import OUTCOMES, HTMLReport, Panel, known_outcomes
from jax_ppo.reporting.sinks import MetricsLog, describe_curves, read_metrics_csv
from jax_ppo.runtime import compiled_programs, devices, distributed, signals, work_directory
from jax_ppo.runtime.devices import measure_device_memory
from jax_ppo.runtime.heartbeat import activity
from jax_ppo.training.progress import Progress

_TIME_FORMAT = "%Y-%m-%d %H:%M %Z"
SPEED_PANEL = Panel("speed", "tokens per second", {"all devices": "tokens_per_second"})
REPORT_FREQUENCY = 20  # steps between updates of report.html, besides evaluations and samples
# Beginnings of fields of generation_config.json that change no token; ids are the run's own.
_NEUTRAL_DEFAULTS = ("_", "transformers_version", "use_cache", "output_")


@dataclasses.dataclass(frozen=True)
class ReportLayout:
    """Presentation of a command's metrics."""

    columns: tuple[console.Column, ...]  # the line printed after each step
    panels: tuple[Panel, ...]  # the first plots of report.html
    learning_rate_option: str  # the option to lower when gradients are not finite
    best_metric: str  # that of `OUTCOMES` by which summary.json names the best step


class Journal:
    """The logs, progress bar and clock of a run; evaluations are appended to its `progress`.

    Only the main process writes and prints.
    """

    @activity("opening the logs")
    def __init__(
        self,
        *,
        trainer: Trainer,
        options: dict[str, Any],
        total_steps: int,
        layout: ReportLayout,
        workdir: Path,
        progress: Progress,
        compiled: compiled_programs.Compilations,
    ) -> None:
        """Open the logs, which continue after the step that the progress has reached.

        `options` are all options, by section; config.json keeps its own if no step is left.
        """
        self.progress = progress
        # No step is left that would read other options.
        if 0 < total_steps <= progress.step:
            with contextlib.suppress(OSError, ValueError):
                options = json.loads((workdir / "config.json").read_text())
        self._trainer = trainer
        self._experiment_name = options["experiment_name"]
        self._total_steps = total_steps
        self._layout = layout
        self._workdir = workdir
        self._compiled = compiled
        # Before the log drops the rows that the run repeats.
        run_before = self._describe_run_before()
        self._log = MetricsLog(workdir, trainer, options, progress.step, self.warn)
        self._report = HTMLReport(workdir, options, layout.panels)
        # On one process only: others would read files while this one deletes them.
        if distributed.is_main():
            command_line.write_config(options, workdir)
            work_directory.fetch_folder(workdir, files.SAMPLES_FOLDER)
            files.drop_samples_after(workdir, progress.step)
            self._report.add_logged_samples()
        self._bar = console.ProgressBar(total_steps, progress.step)
        self.phase = self._bar.phase  # measures a block, and reports it with the next step
        self._lines = console.StepLines(total_steps, layout.columns)
        self._first_step = progress.step
        self._models: list[str] = []
        self._pending: Callable[[], object] | None = None
        self._skipped_in_a_row = 0
        self._last_step = progress.step
        self._compiled_before = dataclasses.replace(compiled)
        self._last_seconds = collections.deque[float](maxlen=10)
        # Monotonic: a change of the system's clock does not affect durations.
        self._started = time.monotonic()
        self._step_started = self._started
        if run_before:
            self.warn(run_before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._bar.close()
        # The report says when and why the run ended; a full disk has its own message.
        end = "complete"
        if received := signals.received_signal():
            end = f"stopped by {received.name}"
        elif error is not None:
            kind_of_end = "error" if isinstance(error, UserError) else type(error).__name__
            end = f"{kind_of_end}: {printable_lines(shorten(str(error), 500))}"
        self._write_report(self._last_step, f", ended {time.strftime(_TIME_FORMAT)}: {end}")
        self._log.close()

    def write_later(self, write: Callable[[], object]) -> None:
        """Keep a function that fetches and writes a step's metrics, for when it need not wait."""
        self._pending = write

    def write_pending_report(self) -> None:
        """Write the pending metrics, if there are any; raises as `write_step` does."""
        write, self._pending = self._pending, None
        if write is not None:
            write()

    def write_step(
        self,
        step: int,
        metrics: dict[str, float],
        tokens: float,
        skipped: bool,
        flops: float | None = None,
    ) -> dict[str, float]:
        """Write the metrics of a step, numbered from 1, and return them with those that are added.

        These are seconds, throughput by the `tokens`, `perf/mfu` by the model `flops`, if counted,
        and the memory that devices report. Raise `UserError` after
        config.trainer.max_skipped_updates `skipped` steps in a row, whose gradients were not
        finite.
        """
        self._report_closed_outputs()
        # The seconds of a step are the wall-clock time since the row before.
        phases = self._bar.take_seconds()
        metrics = metrics | measure_device_memory() | phases
        now = time.monotonic()
        seconds = now - self._step_started
        metrics["seconds/step"] = seconds
        metrics["tokens_per_second"] = tokens / seconds
        metrics["perf/tokens_per_second_per_device"] = tokens / seconds / jax.device_count()
        self._step_started = now
        before, self._compiled_before = self._compiled_before, dataclasses.replace(self._compiled)
        metrics["perf/compiled_programs"] = self._compiled.programs - before.programs
        metrics["seconds/compile"] = self._compiled.seconds - before.seconds
        # Later steps compile nothing. Background threads may compile longer than the step takes.
        self._last_seconds.append(max(seconds - metrics["seconds/compile"], 0.0))
        metrics["perf/seconds_left"] = self._seconds_left(step)
        if jax.default_backend() != "cpu":  # where the host itself computes
            metrics["seconds/host"] = seconds - sum(phases.values())
        if not skipped:
            self.progress.kept_seconds += seconds
        # By the system's clock: the run may have started in another process, on another machine.
        run_seconds = time.time() - self.progress.started_at
        metrics["perf/goodput"] = self.progress.kept_seconds / max(run_seconds, seconds)
        peak = devices.total_peak_flops()
        if flops is not None and peak is not None:
            metrics["perf/mfu"] = flops / (seconds * peak)
        self._last_step = step
        self._log.write(step, metrics)
        self._bar.advance(self._lines.format(step, metrics), metrics["perf/seconds_left"])
        if step % REPORT_FREQUENCY == 0 and step < self._total_steps:
            self._write_report(step)
        self._count_skipped_update(step, skipped)
        return metrics

    def _count_skipped_update(self, step: int, skipped: bool) -> None:
        """Raise `UserError` after too many skipped steps in a row: the run has diverged."""
        if not skipped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == self._trainer.max_skipped_updates:
            raise UserError(
                f"step {step}: the gradient was not finite for {self._skipped_in_a_row} steps in a "
                "row (config.trainer.max_skipped_updates); a smaller "
                f"config.{self._layout.learning_rate_option} or config.model.dtype=float32 may "
                "help, and a loss, an estimator or a KL of your own must not return NaN"
            )

    def _seconds_left(self, step: int) -> float:
        """Return the seconds left if each step takes the median, without compilation."""
        return statistics.median(self._last_seconds) * (self._total_steps - step)

    def _describe_run_before(self) -> str:
        """Return how a run in the folder ended, if killed, and that nothing of it continues."""
        if not distributed.is_main():
            return ""
        text = work_directory.lost_run(self._workdir)
        rows = read_metrics_csv(self._workdir / "training_metrics.csv")
        last_step = f", after step {rows[-1].get('step')}" if rows else ""
        if self._total_steps and not self.progress.step and (text or rows):
            text = text or "the run before ended"
            last_step += "; it left no checkpoint: this run begins anew"
        return text and text + last_step

    def report_model(self, path: Path, option: str, reader: str = "transformers") -> None:
        """Say at the end where an exported model is, and what reads it besides an option."""
        folder = f"{work_directory.shown_path(self._workdir)}/{path.relative_to(self._workdir)}"
        self._models.append(f"model: {folder} (for {reader} or --config.{option})")
        defaults = path / "generation_config.json"
        if option == "model.path" and defaults.exists():
            values = json.loads(defaults.read_text(encoding="utf-8"))
            names = [x for x in values if not x.startswith(_NEUTRAL_DEFAULTS)]
            if kept := [f"{x}={values[x]}" for x in names if not x.endswith("_token_id")]:
                console.print_on_main(
                    f"note: {folder}/generation_config.json keeps {', '.join(kept)}: transformers "
                    "and servers sample with that, evaluations here with config.rollout.val_kwargs"
                )

    def warn(self, text: str, kind: str = "") -> None:
        """Show a warning in the report, and on the console if its kind, or text, is new."""
        if self.progress.warn(kind or text, text, self._last_step):
            console.print_on_main(f"warning: {text}")

    def _report_closed_outputs(self) -> None:
        """Warn in the report that an output has lost its reader; no console can show that."""
        while closed_outputs:
            self.warn(
                f"the reader of {closed_outputs.pop()} has gone (`| head`?): the run continues; "
                "its lines are in the files of its work directory alone"
            )

    def write_samples(self, kind: str, step: int, records: list[dict[str, Any]]) -> None:
        """Write sampled responses to a file and to the report; see `files.write_samples`."""
        if distributed.is_main():
            files.write_samples(self._workdir, kind, step, records)
            self._report.add_samples(kind, step, records)
            self._write_report(step)

    def write_evaluation(
        self, steps_done: int, means: dict[str, float | None], shown: str, title: str = ""
    ) -> None:
        """Write an evaluation's means; show `shown` after `title` or "evaluation after step N"."""
        self.progress.evaluations.append({"step": steps_done} | means)
        # Logs contain only numbers, while the progress has None for an undefined mean.
        defined = {f"eval/{name}": value for name, value in means.items() if value is not None}
        self._log.write(steps_done, defined)
        console.print_on_main(f"{title or f'evaluation after step {steps_done}'}: {shown}")
        self._write_report(steps_done)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the next step's seconds."""
        self._bar.take_seconds()
        self._compiled_before = dataclasses.replace(self._compiled)
        self._step_started = time.monotonic()

    def write_summary(self, steps_done: int, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        """Write summary.json, return its contents, and print the last lines of the run."""
        self._report_closed_outputs()
        rows = read_metrics_csv(self._workdir / "training_metrics.csv")
        steps = [{name: float(value) for name, value in row.items() if value} for row in rows]
        metric, training = self._layout.best_metric, dict[str, Any]()
        if taken := [step for step in steps if metric in step]:
            _, better = OUTCOMES[metric]
            best = better(taken, key=operator.itemgetter(metric))
            training = {"last": taken[-1], "best": {name: best[name] for name in ("step", metric)}}
        summary = {
            "experiment_name": self._experiment_name,
            "steps": steps_done,
            "total_steps": self._total_steps,
            "evaluations": self.progress.evaluations,
            "training": training,
            "warnings": self.progress.warning_texts(),
            "changed_options": self.progress.changed_options,
            "seconds": time.monotonic() - self._started,
            "devices": np.prod(list(mesh.shape.values())).item(),
            "mesh": dict(mesh.shape),
            "compilations": dataclasses.asdict(self._compiled),
            "versions": collect_versions(),
        }
        if distributed.is_main():
            write_summary_file(self._workdir, summary)
        folder = work_directory.shown_path(self._workdir)
        lines = [self._describe_outcome(steps), f"report: {folder}/report.html", *self._models]
        if self._total_steps and "tensorboard" in parse_names(self._trainer.logger):
            lines.insert(0, describe_curves(folder))
        for line in filter(None, lines):
            console.print_on_main(line)
        return summary

    def _describe_outcome(self, steps: list[dict[str, float]]) -> str:
        """Return first, last with its interval, and best outcome in words, "" without one."""
        last_rows = {name: row for row, step in enumerate(steps) for name in step}
        if not (known := known_outcomes(last_rows, self._trainer.critic_only)):
            return ""
        metric = known[0]
        title, better = OUTCOMES[metric]
        points = [step for step in steps if metric in step]
        last, best = points[-1], better(points, key=operator.itemgetter(metric))
        outcome, details = f"{title} {points[0][metric]:.3f}", []
        if (low := last.get(f"{metric}_low")) is not None:
            high = last[f"{metric}_high"]
            details.append(f"95 % {low:.2f}{'-' if low >= 0 else ' to '}{high:.2f}")
        if len(points) > 1:
            outcome += f" → {last[metric]:.3f}"
            details.append(f"best {best[metric]:.3f} after step {best['step']:.0f}")
        if last["step"] < steps[-1]["step"]:  # stopped since the last evaluation
            outcome += f" after step {last['step']:.0f}"
        outcome += f" ({'; '.join(details)})" * bool(details)
        if self._first_step < self._last_step or not self._total_steps:
            outcome += f" in {console.format_duration(time.monotonic() - self._started)}"
            outcome += f" since step {self._first_step}" * bool(self._first_step)
        return outcome

    def _write_report(self, step: int, end: str = "") -> None:
        """Write report.html after `step` steps; `end` says how the run has ended, if it has."""
        if not distributed.is_main():
            return
        status = f"{step} of {self._total_steps} steps" if self._total_steps else "no training"
        if not end:
            end = f" at {time.strftime(_TIME_FORMAT)}"
            if self._last_seconds and step < self._total_steps:
                end += f", about {self._seconds_left(step) / 60:,.0f} min left"
        status += end
        try:
            self._report.write(status, self.progress)
        except OSError as error:  # other files hold what it shows: the run goes on
            self.warn(f"report.html is not written: {error.strerror}", kind="report.html")
