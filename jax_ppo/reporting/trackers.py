"""Experiment trackers: Weights & Biases and MLflow.

A resumed run continues its record, whose id is stored in the work directory.
"""

import importlib.util
import os
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from jax_ppo.config.schema import Trainer, flatten_options
from jax_ppo.errors import UserError, printable_lines

MetricSink = Callable[[int, dict[str, float]], None]

_OFFLINE = {"wandb": "; WANDB_MODE=offline keeps the record here, for `wandb sync` later"}
_WAIT_SECONDS = 30  # for wandb's server, whose default is 90
_MAX_PARAMETER = 500  # characters of an option's value in MLflow


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
        settings={"init_timeout": _WAIT_SECONDS},
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
