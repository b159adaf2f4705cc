"""Destinations of step metrics: training_metrics.csv, TensorBoard, Weights & Biases and MLflow.

Only the main process writes. `training_metrics.csv` is the record of a run: one row per step in
full precision, and the same file whether or not the run was interrupted (except for timings). A
resumed run continues the records of trackers, whose ids are stored in the work directory.
"""

import contextlib
import csv
import importlib.util
import os
import shlex
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax_ppo.config.parsing import parse_names
from jax_ppo.config.schema import Trainer, flatten_options
from jax_ppo.errors import UserError, named_file, printable_lines
from jax_ppo.reporting.files import replace_file
from jax_ppo.runtime import distributed

MetricSink = Callable[[int, dict[str, float]], None]

_OFFLINE = {"wandb": "; WANDB_MODE=offline keeps the record here, for `wandb sync` later"}
_MAX_PARAMETER = 500  # characters of an option's value in MLflow


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


class Tracker(NamedTuple):
    """An open record."""

    write: MetricSink
    close: Callable[[], object]


def require_installed(loggers: Collection[str]) -> None:
    """Raise `UserError` for a tracker that is asked for and cannot be imported."""
    for name in TRACKERS:
        if name in loggers:
            spec = importlib.util.find_spec(name)
            # Without a file it is a folder of that name, such as one with wandb's logs.
            if spec is None or spec.origin is None:
                raise UserError(
                    f"config.trainer.logger asks for {name}, which is not installed: "
                    f"pip install 'jax_ppo[{name}]'"
                )


def open_tracker(
    name: str,
    options: Trainer,
    workdir: Path,
    config_dict: dict[str, Any],
    first_step: int,
    warn: Callable[[str], None],
) -> Tracker:
    """Open a record that does not end the run if its server fails later.

    `config_dict` has all options of the run, by section. `workdir` holds the id of the record,
    which a `first_step` of 0 begins anew. `warn` shows a failure, once; the record then gets no
    more metrics until the run is resumed: each attempt may wait for minutes. Raise `UserError` if
    the tracker or its server cannot be used.
    """
    try:
        tracker = TRACKERS[name](options, workdir, config_dict, first_step)
    # Each tracker raises its own errors, and errors of the libraries that it uses.
    except Exception as error:
        raise UserError(
            f"config.trainer.logger={name}: {_first_line(error)}{_OFFLINE.get(name, '')}"
        ) from error
    has_failed = False

    def run_unless_failed(action: Callable[[], object], text: str) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            action()
        except Exception as error:
            has_failed = True
            warn(
                f"{name} {text}: {_first_line(error)}; training_metrics.csv has all metrics, and "
                f"{name} gets metrics again after a resume"
            )

    return Tracker(
        write=lambda step, metrics: run_unless_failed(
            lambda: tracker.write(step, metrics), f"took no metrics of step {step}"
        ),
        close=lambda: run_unless_failed(tracker.close, "did not close the record"),
    )


def _first_line(error: Exception) -> str:
    """Return the type and the first line of an error, without control characters."""
    line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {printable_lines(line)}"


def open_wandb(
    options: Trainer, workdir: Path, config_dict: dict[str, Any], first_step: int
) -> Tracker:
    """Open a run of Weights & Biases, whose own files are in the work directory."""
    import wandb

    id_file = workdir / "wandb_id.txt"
    # A new run gets a new id; a resumed one continues its record under the old id.
    if not (first_step and id_file.exists()):
        id_file.write_text(uuid.uuid4().hex[:8])
    run = wandb.init(
        project=options.project_name,
        name=config_dict["experiment_name"],
        id=id_file.read_text(),
        resume="allow",
        config=config_dict,
        dir=str(workdir),
        settings={"init_timeout": 30},  # seconds that it waits for its server; its default is 90
    )
    # wandb's own step cannot decrease, but a run's does when it resumes from a checkpoint, so it is
    # logged as one of the metrics.
    run.define_metric("*", step_metric="step")
    return Tracker(write=lambda step, metrics: run.log({"step": step} | metrics), close=run.finish)


def open_mlflow(
    options: Trainer, workdir: Path, config_dict: dict[str, Any], first_step: int
) -> Tracker:
    """Open a run of MLflow, on the server that MLFLOW_TRACKING_URI names or in WORKDIR/mlruns."""
    # Since MLflow 3, its file store requires this consent.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or (workdir.resolve() / "mlruns").as_uri()
    client = MlflowClient(tracking_uri=uri)
    id_file = workdir / "mlflow_id.txt"
    if first_step and id_file.exists():
        run_id = id_file.read_text()
        client.update_run(run_id, status="RUNNING")
    else:
        experiment = client.get_experiment_by_name(options.project_name)
        if experiment is None:
            experiment_id = client.create_experiment(options.project_name)
        else:
            experiment_id = experiment.experiment_id
        name = config_dict["experiment_name"]
        run_id = client.create_run(experiment_id, run_name=name).info.run_id
        id_file.write_text(run_id)
        for option, value in flatten_options(config_dict).items():
            client.log_param(run_id, option, str(value)[:_MAX_PARAMETER])

    def write(step: int, metrics: dict[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(
            run_id, [Metric(name, float(value), now, step) for name, value in metrics.items()]
        )

    return Tracker(write=write, close=lambda: client.set_terminated(run_id))


TRACKERS: dict[str, Callable[..., Tracker]] = {"wandb": open_wandb, "mlflow": open_mlflow}
