"""Weights & Biases and MLflow, as they are installed, without a server."""

import sys
import types

import pytest

from jax_ppo.config.schema import Trainer
from jax_ppo.errors import UserError
from jax_ppo.reporting import trackers
from jax_ppo.reporting.sinks import MetricsLog, read_metrics_csv

CONFIG = {
    "experiment_name": "my run",
    "seed": 0,
    "actor": {"optim": {"lr": 1e-6}},
    "note": "n" * 9000,
}


def write_steps(folder, logger, first_step, last_step, value):
    options = Trainer(logger=logger, project_name="maths")
    with MetricsLog(folder, options, CONFIG, first_step) as log:
        for step in range(first_step + 1, last_step + 1):
            log.write(step, {"reward/mean": value * step, "seconds/step": 1.0})


def test_wandb_takes_our_step_as_a_metric_since_its_own_cannot_decrease(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda metrics: calls.append(metrics),
        finish=lambda: calls.append("finish"),
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
    )
    starts = []
    fake = types.SimpleNamespace(init=lambda **arguments: starts.append(arguments) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    write_steps(tmp_path, "wandb", 0, 1, 0.5)
    metrics = {"step": 1, "reward/mean": 0.5, "seconds/step": 1.0}
    assert calls == [("*", "step"), metrics, "finish"]
    write_steps(tmp_path, "wandb", 1, 2, 0.5)
    write_steps(tmp_path, "wandb", 0, 1, 0.5)
    assert starts[0]["id"] == starts[1]["id"] != starts[2]["id"]


@pytest.mark.slow
def test_wandb_continues_the_record_of_a_resumed_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra `parity`")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    starts = []
    init = wandb.init
    monkeypatch.setattr(
        wandb, "init", lambda **arguments: starts.append(arguments) or init(**arguments)
    )
    write_steps(tmp_path, "wandb", 0, 4, 0.5)
    write_steps(tmp_path, "wandb", 2, 3, 0.5)
    write_steps(tmp_path / "another", "wandb", 0, 1, 0.5)
    first, resumed, another = starts
    assert first == resumed and first["id"] != another["id"]
    assert (first["project"], first["name"]) == ("maths", "my run")
    # The values arrived in wandb's own files, with our step as a metric.
    records = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(records) == 2 and all(b"reward/mean" in record for record in records)


def test_mlflow_continues_the_record_of_a_resumed_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs the extra `parity`")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_steps(tmp_path, "mlflow", 0, 4, 0.5)
    write_steps(tmp_path, "mlflow", 2, 5, 0.5)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("maths")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "my run"
    assert run.data.params["actor.optim.lr"] == "1e-06" and len(run.data.params["note"]) == 500
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert {(point.step, point.value) for point in history} == {
        (step, 0.5 * step) for step in (1, 2, 3, 4, 5)
    }


def fail(*_, **__):
    raise ConnectionError("the server\x1b is down\nfor a while")


def test_a_server_that_fails_later_costs_its_record_alone(tmp_path, monkeypatch):
    run = types.SimpleNamespace(log=fail, finish=fail, define_metric=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    warnings = []
    options = Trainer(logger="wandb")
    with MetricsLog(tmp_path, options, CONFIG, 0, warn=warnings.append) as log:
        for step in (1, 2, 3):
            log.write(step, {"reward/mean": 0.5})
    (warning,) = warnings
    assert warning.startswith(
        "wandb took no metrics of step 1: ConnectionError: the server· is down;"
    )
    assert len(read_metrics_csv(tmp_path / "training_metrics.csv")) == 3


def test_a_server_that_cannot_be_used_is_named_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=fail))
    with pytest.raises(UserError) as error:
        write_steps(tmp_path, "wandb", 0, 1, 0.5)
    expected = "config.trainer.logger=wandb: ConnectionError: the server· is down; WANDB_MODE="
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_missing_tracker_is_named_before_anything_loads(has_folder, tmp_path, monkeypatch):
    if has_folder:  # wandb's own logs, where the run was started
        (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    trackers.require_installed(["tensorboard"])
    with pytest.raises(UserError, match=r"not installed: pip install 'jax_ppo\[wandb\]'"):
        trackers.require_installed(["tensorboard", "wandb"])
