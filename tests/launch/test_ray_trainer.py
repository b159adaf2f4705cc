"""Ray's JaxTrainer: with stand-ins for Ray, and with two workers where Ray is installed."""

import importlib
import importlib.util
import json
import os
import pathlib
import sys
import types

import pytest

from stand_ins import LAUNCH
from whole_run import run_python

SCRIPT = LAUNCH / "ray_trainer.py"
SPEC = importlib.util.spec_from_file_location("ray_trainer", SCRIPT)
ray_trainer = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ray_trainer)


class Recorded(dict):
    """A stand-in for a class of Ray: its positional and keyword arguments."""

    def __init__(self, *positional, **named):
        super().__init__(named, positional=positional)

    def fit(self):
        Recorded.fitted = self
        if self["train_loop_config"]["arguments"][-1:] == ["--config.seed=13"]:
            raise TrainingFailedError("Training failed due to worker errors")


class TrainingFailedError(RuntimeError):
    pass


@pytest.fixture
def ray(monkeypatch):
    """Install the stand-ins; process 1 of 2 runs."""
    context = types.SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: 2)
    config = {name: Recorded for name in ("FailureConfig", "RunConfig", "ScalingConfig")}
    modules = {
        "ray": {},
        "ray.train": {"get_context": lambda: context, **config},
        "ray.train.collective": {"broadcast_from_rank_zero": lambda own: "first:1234"},
        "ray.train.v2": {},
        "ray.train.v2.api": {},
        "ray.train.v2.api.exceptions": {"TrainingFailedError": TrainingFailedError},
        "ray.train.v2.jax": {"JaxConfig": Recorded, "JaxTrainer": Recorded},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def start(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["ray_trainer.py", *words])
    ray_trainer.main()
    return Recorded.fitted


def test_workers_restarts_and_the_shared_folder(ray, monkeypatch, tmp_path):
    run = ["--config=arithmetic", f"--workdir={tmp_path}"]
    monkeypatch.delenv("MAX_RESTARTS", raising=False)
    trainer = start(monkeypatch, "--accelerator=H100:16", "--cpus=4", "--", *run)
    assert trainer["train_loop_config"]["arguments"] == run
    assert trainer["scaling_config"]["num_workers"] == 16
    assert trainer["scaling_config"]["accelerator_type"] == "H100"
    assert trainer["scaling_config"]["resources_per_worker"] == {"CPU": 4, "GPU": 1}
    assert trainer["run_config"]["storage_path"] == str(tmp_path)
    assert trainer["run_config"]["failure_config"]["max_failures"] == 3
    monkeypatch.setenv("MAX_RESTARTS", "5")
    trainer = start(monkeypatch, "--workers=2", "--", *run)
    assert trainer["run_config"]["failure_config"]["max_failures"] == 5
    scaling = trainer["scaling_config"]
    assert scaling["num_workers"] == 2 and scaling["resources_per_worker"] == {"CPU": 1}
    trainer = start(monkeypatch, "--max-restarts=0", "--", *run)
    assert trainer["run_config"]["failure_config"]["max_failures"] == 0


def test_a_tpu_slice_has_a_worker_per_host(ray, monkeypatch):
    words = ("--accelerator=v5e-16", "--", "--config=arithmetic")
    scaling = start(monkeypatch, *words)["scaling_config"]
    scaling.pop("positional")
    tpu = {"use_tpu": True, "accelerator_type": "TPU-V5LITEPOD", "topology": "4x4"}
    assert scaling == {"num_workers": 4} | tpu


def test_a_mistake_is_one_line_before_anything_starts(monkeypatch):
    with pytest.raises(SystemExit, match="^error: .*actor.ppo_epoch") as stopped:
        start(monkeypatch, "--", "--config=arithmetic", "--config.actor.ppo_epoch=2")
    assert "\n" not in str(stopped.value)


def test_a_run_that_fails_ends_with_one_line(ray, monkeypatch):
    with pytest.raises(SystemExit, match="^error: Training failed due to worker errors$"):
        start(monkeypatch, "--", "--config=arithmetic", "--config.seed=13")


def test_a_worker_runs_the_command_as_one_of_the_processes(ray, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(importlib.import_module("jax_ppo.train"), "main", seen.append)
    monkeypatch.chdir(pathlib.Path.cwd())  # the worker leaves it
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.setenv(name, "")
    ray_trainer.train_on_worker(
        {"command": "train", "arguments": ["--config=x"], "folder": str(tmp_path)}
    )
    assert seen == [["train", "--config=x"]]
    assert pathlib.Path.cwd() == tmp_path
    assert os.environ["JAX_COORDINATOR_ADDRESS"] == "first:1234"
    assert (os.environ["JAX_NUM_PROCESSES"], os.environ["JAX_PROCESS_ID"]) == ("2", "1")


def test_secrets_reach_the_workers_and_are_not_among_the_settings(ray, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    trainer = start(monkeypatch, "--", "--config=arithmetic")
    assert "hidden" not in str(trainer["train_loop_config"])
    monkeypatch.delenv("HF_TOKEN")
    seen = []
    monkeypatch.setattr(
        ray_trainer, "train_on_worker", lambda _: seen.append(os.environ["HF_TOKEN"])
    )
    (on_worker,) = trainer["positional"]
    on_worker(trainer["train_loop_config"])
    assert seen == ["hidden"] and "WANDB_API_KEY" not in os.environ
    monkeypatch.delenv("HF_TOKEN")


@pytest.mark.slow
def test_two_workers_of_a_local_cluster_train_and_resume(tmp_path):
    pytest.importorskip("ray.train.v2.jax")
    options = {
        "data.train_files": "arithmetic:64",
        "data.val_files": "arithmetic:8:heldout",
        "data.train_batch_size": 16,
        "data.val_batch_size": 8,
        "actor.ppo_mini_batch_size": 16,
        "trainer.critic_warmup": 0,
        "trainer.save_freq": 1,
    }
    arguments = [f"--config.{name}={value}" for name, value in options.items()]
    for steps in (2, 3):
        output = run_python(
            *(SCRIPT, "--workers=2", "--cpus=0.5", "--max-restarts=0"),
            *("--", "--config=arithmetic", f"--workdir={tmp_path / 'run'}", *arguments),
            f"--config.trainer.total_training_steps={steps}",
            cwd=tmp_path,
            PYTHONPATH=str(LAUNCH.parent),
            XLA_FLAGS="",
        )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["evaluations"][-1]["step"] == 3
    assert "step 2/3" not in output.stdout and "step 3/3" in output.stdout
