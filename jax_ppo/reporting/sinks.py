"""Destinations of step metrics: training_metrics.csv, TensorBoard and experiment trackers.

Only the main process writes. `training_metrics.csv` is the record of a run: one row per step in
full precision, and the same file whether or not the run was interrupted (except for timings).
"""

import contextlib
import csv
import importlib.util
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jax_ppo.config.parsing import parse_names
from jax_ppo.config.schema import Trainer
from jax_ppo.errors import UserError, named_file
from jax_ppo.reporting.files import replace_file
from jax_ppo.reporting.trackers import TRACKERS, MetricSink, open_tracker
from jax_ppo.runtime import distributed


class CurveFile:
    """Writer of training_metrics.csv: `step`, then metrics by name, empty where there is none."""

    def __init__(self, path: Path, steps_done: int) -> None:
        """Open the file, and drop the rows of steps after `steps_done`; 0 starts a new file.

        Raise `UserError` for a row that does not hold the metrics of a step.
        """
        self._path = path
        self._columns: list[str] = []
        self._last_step: int | None = None
        # Steps after the checkpoint are computed again: their old rows are dropped.
        rows = _validated_rows(path) if steps_done and path.exists() else ()
        self._rewrite([row for row in rows if int(row["step"]) <= steps_done])

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append a row, or merge the metrics into the last row if it is of the same step."""
        row = {"step": str(step)} | {name: repr(float(x)) for name, x in metrics.items()}
        if step != self._last_step and row.keys() <= set(self._columns):
            with named_file(self._path), self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
            self._last_step = step
            return
        # A new column, or an addition to the last row, changes lines that are already written.
        rows = read_metrics_csv(self._path)
        if step == self._last_step:
            row = rows.pop() | row
        self._rewrite([*rows, row])

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        # Sorted, so that an interrupted run writes the same file as an uninterrupted one.
        names = {name for row in rows for name, value in row.items() if value}
        self._columns = ["step", *sorted(names - {"step"})]
        self._last_step = int(rows[-1]["step"]) if rows else None
        with (
            replace_file(self._path) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def read_metrics_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of training_metrics.csv, if any; a last line that a crash cut is skipped."""
    return [row for _, row in _read_lines(path)] if path.exists() else []


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of the line and the values of each row, without blank lines."""
    # A damaged byte is replaced: `_validated_rows` names its line.
    complete_lines, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    reader = csv.DictReader(complete_lines.split("\n"))
    for row in reader:
        yield reader.line_num, row


def _validated_rows(path: Path) -> Iterator[dict[str, str]]:
    for line, row in _read_lines(path):
        try:
            int(row["step"])
            for value in row.values():
                float("nan" if value == "" else value)
        except (KeyError, TypeError, ValueError):  # also of a row that is too short or too long
            raise UserError(
                f"{path}: line {line} does not hold the metrics of a step that line 1 names; "
                "remove the line"
            ) from None
        yield row


class MetricsLog(contextlib.ExitStack):
    """Writer of step metrics to training_metrics.csv and loggers, closed as its context ends."""

    def __init__(
        self,
        workdir: Path,
        options: Trainer,
        config_dict: dict[str, Any],
        first_step: int,
        warn: Callable[[str], None] = print,
    ) -> None:
        """Open the files of the loggers in `options`; continue those of an interrupted run.

        Arguments and errors are those of `open_tracker`. Only the main process writes.
        """
        super().__init__()
        self._sinks: list[MetricSink] = []
        if not distributed.is_main():
            return
        workdir.mkdir(parents=True, exist_ok=True)
        self._sinks.append(CurveFile(workdir / "training_metrics.csv", first_step).write)
        loggers = parse_names(options.logger)
        for name in TRACKERS:
            if name in loggers:
                tracker = open_tracker(name, options, workdir, config_dict, first_step, warn)
                self._sinks.append(tracker.write)
                self.callback(tracker.close)
        # What is opened last is closed first: a tracker may wait for its server.
        if "tensorboard" in loggers:
            self._open_tensorboard(workdir / "tensorboard", first_step)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write metrics of a step, or more of the last one; steps must not decrease."""
        for sink in self._sinks:
            sink(step, metrics)

    def _open_tensorboard(self, folder: Path, first_step: int) -> None:
        # Imported late because it takes a second.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        # Event files are read in the order of their names, which have a resolution of one second;
        # the suffix orders the files of one second. tensorboardX's SummaryWriter is not used, since
        # its thread prints a separate traceback when a disk is full.
        folder.mkdir(exist_ok=True)
        writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")

        def write_event(step: int, **content: Any) -> None:
            writer.write_event(event_pb2.Event(wall_time=time.time(), step=step, **content))
            writer.flush()

        # This event hides the values that an earlier process wrote from that step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        write_event(first_step + 1 if first_step else 0, session_log=start)

        def write_scalars(step: int, metrics: dict[str, float]) -> None:
            summary = summary_pb2.Summary()
            for name, value in metrics.items():
                summary.value.add(tag=name, simple_value=float(value))
            write_event(step, summary=summary)

        self._sinks.append(write_scalars)
        self.callback(writer.close)


def describe_curves(workdir: str | Path) -> str:
    """Return the line that says how to see the curves."""
    # Event files are written without it: with its server it takes 50 MB.
    remedy = "" if importlib.util.find_spec("tensorboard") else "  (after: pip install tensorboard)"
    return f"curves: tensorboard --logdir {shlex.quote(f'{workdir}/tensorboard')}{remedy}"
