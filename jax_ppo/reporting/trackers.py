"""Experiment trackers: Weights & Biases and MLflow.

A resumed run continues its record, whose id is stored in the work directory.
"""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax_ppo.config.schema import Trainer
from jax_ppo.errors import UserError

MetricSink = Callable[[int, dict[str, float]], None]

_MAX_PARAMETER = 500  # characters of an option's value in MLflow


class Tracker(NamedTuple):
    """An open record.

    Attributes:
      write: takes a step and metrics by name.
      close: finishes the record.
    """

    write: MetricSink
    close: Callable[[], object]


def open_wandb(
    options: Trainer, workdir: Path, name: str, config_dict: dict[str, Any], first_step: int
) -> Tracker:
    """Open a run of Weights & Biases.

    Args:
      options: `config.trainer`: project, entity and tags.
      workdir: holds the run's id and wandb's own files.
      name: the run's name.
      config_dict: all options.
      first_step: steps that are complete; 0 begins a new run.

    Raises:
      UserError: wandb is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise _missing_package("wandb") from error
    id_file = workdir / "wandb_id.txt"
    # A new run gets a new id; a resumed one continues its record under the old id.
    if not (first_step and id_file.exists()):
        id_file.write_text(uuid.uuid4().hex[:8])
    run = wandb.init(
        project=options.project_name,
        entity=options.wandb_entity or None,
        name=name,
        tags=_parse_tags(options.tags),
        id=id_file.read_text(),
        resume="allow",
        config=config_dict,
        dir=str(workdir),
    )
    # wandb's own step cannot decrease, but a run's does when it resumes from a checkpoint, so it is
    # logged as one of the metrics.
    run.define_metric("*", step_metric="step")
    return Tracker(write=lambda step, metrics: run.log({"step": step} | metrics), close=run.finish)


def open_mlflow(
    options: Trainer, workdir: Path, name: str, config_dict: dict[str, Any], first_step: int
) -> Tracker:
    """Open a run of MLflow, on the server that MLFLOW_TRACKING_URI names or in WORKDIR/mlruns.

    The arguments are those of `open_wandb`; the project is MLflow's experiment.

    Raises:
      UserError: mlflow is not installed.
    """
    # Since MLflow 3, its file store requires this consent.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise _missing_package("mlflow") from error
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
        tags = {tag: "true" for tag in _parse_tags(options.tags)}
        run_id = client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
        id_file.write_text(run_id)
        for option, value in _flatten(config_dict):
            client.log_param(run_id, option, str(value)[:_MAX_PARAMETER])

    def write(step: int, metrics: dict[str, float]) -> None:
        for metric, value in metrics.items():
            client.log_metric(run_id, metric, float(value), step=step)

    return Tracker(write=write, close=lambda: client.set_terminated(run_id))


def _missing_package(name: str) -> UserError:
    return UserError(
        f"config.trainer.logger asks for {name}, which is not installed: "
        f"pip install 'jax_ppo[{name}]'"
    )


def _parse_tags(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _flatten(options: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted names and values."""
    flat = []
    for name, value in options.items():
        if isinstance(value, dict):
            flat += _flatten(value, f"{prefix}{name}.")
        else:
            flat.append((prefix + name, value))
    return flat
