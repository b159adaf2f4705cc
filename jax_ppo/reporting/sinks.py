"""What a run writes: figures of steps in files, curves in a picture, a summary.

Everything is written by the main process alone. `training_metrics.csv` is the record: a row for each step, to full
precision, the same after an interruption as without one (but for the seconds that things took).
"""

import contextlib
import csv
import importlib.metadata
import json
import math
import os
import platform
import time
import uuid
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError


class CurveFile:
    """training_metrics.csv: `step`, then the metrics by name; a row a step, empty where it has no such metric."""

    def __init__(self, path: Path, steps_done: int):
        """Opens the file of a run that begins (0 steps done), or goes on: rows of later steps are dropped."""
        self._path = path
        rows = (
            [row for row in read_curves(path) if int(row["step"]) <= steps_done]
            if steps_done
            else []
        )
        self._rewrite(rows)

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Adds a row, or figures to the last row if that is of the same step."""
        row = {"step": str(step)} | {name: repr(float(value)) for name, value in figures.items()}
        if step != self._last_step and row.keys() <= set(self._columns):
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
            self._last_step = step
            return
        rows = read_curves(self._path)
        if step == self._last_step:
            row = rows.pop() | row
        self._rewrite([*rows, row])

    def _rewrite(self, rows):
        names = {name for row in rows for name, value in row.items() if value} - {"step"}
        self._columns = ["step", *sorted(names)]
        self._last_step = int(rows[-1]["step"]) if rows else None
        with _replacing(self._path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def read_curves(path: Path) -> list[dict[str, str]]:
    """The rows of training_metrics.csv; none if it does not exist. A last line that a crash cut short is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return list(csv.DictReader(whole.splitlines()))


class MetricsLog:
    """Writes the figures of each step to training_metrics.csv and to the loggers."""

    def __init__(
        self,
        workdir: Path,
        loggers: tuple[str, ...],
        experiment_name: str,
        config_dict: dict,
        first_step: int,
        is_main: bool,
    ):
        """Opens the files and goes on where a run left off.

        Args:
          workdir: a folder, made if need be.
          loggers: of "tensorboard" (events in WORKDIR/tensorboard) and "wandb".
          experiment_name: the run's name in wandb.
          config_dict: the resolved configuration, shown by wandb.
          first_step: steps done: 0 begins anew; else what was written of later steps is dropped.
          is_main: other processes write nothing.

        Raises:
          UserError: wandb is asked for and not installed.
        """
        self._sinks, self._closers = [], []
        if not is_main:
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._sinks.append(CurveFile(workdir / "training_metrics.csv", first_step).write)
        if "tensorboard" in loggers:
            self._open_tensorboard(workdir / "tensorboard", first_step)
        if "wandb" in loggers:
            self._open_wandb(workdir, experiment_name, config_dict, first_step)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Writes figures of a step; a second call for the same step adds to it. Steps never go back."""
        for sink in self._sinks:
            sink(step, metrics)

    def close(self) -> None:
        """Writes out what is buffered."""
        for closer in self._closers:
            closer()
        self._closers = []

    def _open_tensorboard(self, folder, first_step):
        import tensorboardX  # here, because it takes a second

        # purge_step hides what an earlier process wrote from there on. Files are read in the order of their names, that
        # tell seconds; the suffix orders those of one second.
        writer = tensorboardX.SummaryWriter(
            str(folder),
            purge_step=first_step + 1 if first_step else 0,
            flush_secs=10,
            filename_suffix=f".{time.time_ns()}",
        )

        def write(step, metrics):
            for name, value in metrics.items():
                writer.add_scalar(name, float(value), step)

        self._sinks.append(write)
        self._closers.append(writer.close)

    def _open_wandb(self, workdir, name, config_dict, first_step):
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "config.trainer.logger asks for wandb, which is not installed: "
                "pip install 'jax_ppo[wandb]'"
            ) from error
        remembered = workdir / "wandb_id.txt"
        if not (first_step and remembered.exists()):
            remembered.write_text(uuid.uuid4().hex[:8])
        run = wandb.init(
            project="jax_ppo",
            name=name,
            id=remembered.read_text(),
            resume="allow",
            config=config_dict,
            dir=str(workdir),
        )
        # wandb's own step cannot go back, as it must when a run goes on from a checkpoint: ours is one of the figures.
        run.define_metric("*", step_metric="step")
        self._sinks.append(lambda step, metrics: run.log({"step": step} | metrics))
        self._closers.append(run.finish)


def plot_curves(csv_path: Path, evaluations: list[dict[str, Any]], png_path: Path, panels) -> None:
    """Draws training_curves.png.

    Args:
      csv_path: training_metrics.csv.
      evaluations: dicts of step and of figures (accuracy, reward_mean, ...), each a number or None: the panels' eval/NAME.
      png_path: what to write; it is replaced as a whole.
      panels: of each plot its title, the label of its vertical axis, and {legend: figure}.
    """
    from matplotlib.figure import (
        Figure,  # not pyplot, which keeps every figure and may look for a display
    )

    rows = read_curves(Path(csv_path))

    def points(name):
        source, key = (
            (evaluations, name.removeprefix("eval/")) if name.startswith("eval/") else (rows, name)
        )
        return [
            (int(row["step"]), float(row[key])) for row in source if row.get(key) not in (None, "")
        ]

    rows_of_panels = -(-len(panels) // 4)
    across = len(panels) // rows_of_panels
    figure = Figure(figsize=(4 * across, 3.5 * rows_of_panels), layout="constrained")
    for axes, (title, unit, curves) in zip(
        figure.subplots(rows_of_panels, across, squeeze=False).flat, panels, strict=True
    ):
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.grid(alpha=0.3)
        for legend, name in curves.items():
            if curve := points(name):
                marker = "o" if name.startswith("eval/") else None
                axes.plot(
                    *zip(*curve, strict=True),
                    label=legend,
                    marker=marker,
                    markersize=4,
                    linewidth=1.2,
                )
        if axes.lines:
            axes.legend(frameon=False)
    with _replacing(Path(png_path)) as temporary:
        figure.savefig(temporary, dpi=100, format="png")


def write_summary(workdir: Path, summary: dict[str, Any]) -> None:
    """Writes WORKDIR/summary.json as a whole; NaN and infinities become null."""
    with _replacing(Path(workdir) / "summary.json") as temporary:
        temporary.write_text(json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n")


def versions() -> dict[str, Any]:
    """What the run runs on: versions of Python and the libraries, kind and number of devices, number of processes."""
    import jax

    packages = {name: name for name in ("jax", "jaxlib", "flax", "optax", "transformers")}
    packages["orbax"] = "orbax-checkpoint"
    return (
        {"python": platform.python_version()}
        | {name: importlib.metadata.version(package) for name, package in packages.items()}
        | {
            "device_kind": jax.devices()[0].device_kind,
            "device_count": jax.device_count(),
            "process_count": jax.process_count(),
        }
    )


def _plain(value):
    """The value as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's and JAX's numbers and arrays
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextlib.contextmanager
def _replacing(path):
    """A temporary path beside `path`, which takes its place at the end: readers see the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    os.replace(temporary, path)
