"""Output files: unchanged by interruptions, with all curves and a summary for other tools."""

import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.config.schema import Trainer
from jax_ppo.errors import UserError
from jax_ppo.reporting import sinks
from jax_ppo.reporting.files import collect_versions, write_summary_file
from jax_ppo.reporting.sinks import MetricsLog, read_metrics_csv
from whole_run import read_rows

TRAINING = {
    "reward/mean": 0.1 + 0.2,
    "kl/reference": 1e-17,
    "actor/entropy": math.nan,
    "seconds/step": 1.5,
}
EVALUATION = {"eval/accuracy": 0.5, "eval/reward_mean": 0.25}


def open_log(folder, first_step=0, loggers=()):
    options = Trainer(logger=",".join(loggers))
    return MetricsLog(folder, options, {"experiment_name": "name", "seed": 0}, first_step)


def write_run(folder, first_step, last_step):
    """Write metrics as a run does.

    There is an evaluation before the first step and after every fourth, and a metric that first
    appears after step 5.
    """
    with open_log(folder, first_step) as writer:
        if first_step == 0:
            writer.write(0, EVALUATION)
        for step in range(first_step + 1, last_step + 1):
            writer.write(
                step, {"reward/mean": 1 / step} | ({"late/figure": 1.0 * step} if step > 5 else {})
            )
            if step % 4 == 0:
                writer.write(step, {"eval/accuracy": step / 100})


class TestCurveFile:
    def test_figures_come_back_to_the_last_bit(self, tmp_path):
        with open_log(tmp_path / "new/folder") as writer:
            writer.write(1, TRAINING)
            writer.write(2, TRAINING | {"reward/mean": jnp.float32(0.1)})
        text = (tmp_path / "new/folder/training_metrics.csv").read_text()
        assert text.splitlines()[0] == "step,actor/entropy,kl/reference,reward/mean,seconds/step"
        first, second = read_rows(tmp_path / "new/folder")
        assert float(first["reward/mean"]) == 0.1 + 0.2 and float(first["kl/reference"]) == 1e-17
        assert first["actor/entropy"] == "nan" and float(second["reward/mean"]) == np.float32(0.1)

    def test_later_figures_widen_the_file_and_join_their_step(self, tmp_path):
        with open_log(tmp_path) as writer:
            writer.write(0, EVALUATION)
            writer.write(1, {"reward/mean": 1.0})
            writer.write(2, {"reward/mean": 2.0})
            writer.write(2, {"eval/accuracy": 0.75})
            writer.write(3, {"reward/mean": 3.0})
        assert (tmp_path / "training_metrics.csv").read_text() == (
            "step,eval/accuracy,eval/reward_mean,reward/mean\n0,0.5,0.25,\n1,,,1.0\n2,0.75,,2.0\n3,,,3.0\n"
        )

    @pytest.mark.parametrize("checkpoint", [1, 4, 5, 7])
    @pytest.mark.parametrize("stopped", [7, 9])
    def test_an_interruption_leaves_no_trace(self, tmp_path, checkpoint, stopped):
        write_run(tmp_path / "whole", 0, 10)
        write_run(tmp_path / "broken", 0, stopped)
        # Resumed, and stopped before it did anything.
        write_run(tmp_path / "broken", checkpoint, checkpoint)
        expected = [
            row["step"] for row in read_rows(tmp_path / "whole") if int(row["step"]) <= checkpoint
        ]
        assert [row["step"] for row in read_rows(tmp_path / "broken")] == expected
        write_run(tmp_path / "broken", checkpoint, 10)
        whole, broken = (tmp_path / name / "training_metrics.csv" for name in ("whole", "broken"))
        assert broken.read_text() == whole.read_text()

    def test_a_line_cut_short_is_dropped(self, tmp_path):
        write_run(tmp_path, 0, 3)
        path = tmp_path / "training_metrics.csv"
        path.write_text(path.read_text() + "4,0.12")
        assert [row["step"] for row in read_metrics_csv(path)] == ["0", "1", "2", "3"]
        write_run(tmp_path, 4, 5)
        assert [row["step"] for row in read_rows(tmp_path)] == ["0", "1", "2", "3", "5"]

    @pytest.mark.parametrize("line", [b"1,2,3,4,5,6", b"1", b"one,2", b"1,a", b"1,\xff"])
    def test_a_damaged_line_is_named_before_the_run_continues(self, tmp_path, line):
        write_run(tmp_path, 0, 3)
        path = tmp_path / "training_metrics.csv"
        path.write_bytes(path.read_bytes() + b"\n\r\n" + line + b"\n")  # blank lines count, too
        with pytest.raises(UserError, match=r"metrics.csv: line 8 does not .* remove the line"):
            open_log(tmp_path, 3)

    def test_a_run_that_begins_anew_forgets_the_one_before(self, tmp_path):
        write_run(tmp_path, 0, 3)
        write_run(tmp_path, 0, 1)
        assert [row["step"] for row in read_rows(tmp_path)] == ["0", "1"]

    def test_other_processes_write_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sinks.distributed, "is_main", lambda: False)
        with open_log(tmp_path / "other", loggers=("tensorboard", "wandb")) as writer:
            writer.write(1, TRAINING)
        assert not (tmp_path / "other").exists()


class TestTensorBoard:
    def read(self, folder):
        accumulator = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator",
            reason="needs the extra `parity`",
        )
        events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
        return {
            tag: [(e.step, e.value) for e in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }

    def write(self, folder, first_step, last_step, value):
        with open_log(folder, first_step, ("tensorboard",)) as writer:
            for step in range(first_step + 1, last_step + 1):
                writer.write(step, {"reward/mean": value})

    def test_tensorboard_shows_each_step_once(self, tmp_path):
        self.write(tmp_path, 0, 5, 1.0)
        assert self.read(tmp_path) == {"reward/mean": [(step, 1.0) for step in (1, 2, 3, 4, 5)]}
        # Within the same second: it must not reuse the first one's file.
        self.write(tmp_path, 3, 6, 2.0)
        resumed = [(step, 1.0 if step <= 3 else 2.0) for step in range(1, 7)]
        assert self.read(tmp_path)["reward/mean"] == resumed
        self.write(tmp_path, 0, 1, 3.0)
        assert self.read(tmp_path)["reward/mean"] == [(1, 3)]


# Weights & Biases and MLflow, as they are installed, without a server.
TRACKED = {
    "experiment_name": "my run",
    "seed": 0,
    "actor": {"optim": {"lr": 1e-6}},
    "note": "n" * 9000,
}


def write_steps(folder, logger, first_step, last_step, value):
    options = Trainer(logger=logger, project_name="maths")
    with MetricsLog(folder, options, TRACKED, first_step) as log:
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


def fail_to_connect(*_, **__):
    raise ConnectionError("the server\x1b is down\nfor a while")


def test_a_server_that_fails_later_costs_its_record_alone(tmp_path, monkeypatch):
    run = types.SimpleNamespace(
        log=fail_to_connect, finish=fail_to_connect, define_metric=lambda *_, **__: None
    )
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run))
    warnings = []
    options = Trainer(logger="wandb")
    with MetricsLog(tmp_path, options, TRACKED, 0, warn=warnings.append) as log:
        for step in (1, 2, 3):
            log.write(step, {"reward/mean": 0.5})
    (warning,) = warnings
    assert warning.startswith(
        "wandb took no metrics of step 1: ConnectionError: the server· is down;"
    )
    assert len(read_metrics_csv(tmp_path / "training_metrics.csv")) == 3


def test_a_server_that_cannot_be_used_is_named_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=fail_to_connect))
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
    sinks.require_installed(["tensorboard"])
    with pytest.raises(UserError, match=r"not installed: pip install 'jax_ppo\[wandb\]'"):
        sinks.require_installed(["tensorboard", "wandb"])


def test_summary_is_json_as_others_read_it(tmp_path):
    write_summary_file(
        tmp_path,
        {
            "a": math.nan,
            "b": [1, -math.inf, (np.float32(0.5), jnp.int32(3))],
            "c": {"d": None, 1: np.array([1.0, np.nan])},
        },
    )

    def refuse(name):
        raise AssertionError(name)

    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert read == {"a": None, "b": [1, None, [0.5, 3]], "c": {"d": None, "1": [1.0, None]}}
    with pytest.raises(TypeError):
        write_summary_file(tmp_path, {"a": object()})
    # The previous one is still complete.
    assert json.loads((tmp_path / "summary.json").read_text()) == read


def test_versions():
    versions = collect_versions()
    assert versions["jax"] and versions["orbax"] and versions["transformers"]
    assert versions["device_kind"] == "cpu"
    assert (versions["device_count"], versions["process_count"]) == (8, 1)
