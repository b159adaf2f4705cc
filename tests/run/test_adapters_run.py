"""Whole runs of the command with adapters: four roles on one base, resumed and exported."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_ppo.config import command_line
from jax_ppo.errors import UserError
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.models.hf.peft import save_adapters
from jax_ppo.models.lora import Lora, init_adapters
from jax_ppo.run import ppo_training
from llama_folder import write_arithmetic_llama
from trained_tokenizer import train_tokenizer
from whole_run import read_evaluations, read_steps, run_python

CONFIG = """
from jax_ppo.config import default_config

def get_config(arg=None):
    config = default_config()
    config.model.path, config.model.dtype = "{folder}/llama", "float32"
    config.model.lora.rank, config.model.lora.alpha = 4, 8.0
    config.model.lora.targets = "q_proj,v_proj,down_proj"
    config.data.train_files, config.data.val_files = "arithmetic:64", "arithmetic:8:heldout"
    config.data.train_batch_size, config.data.val_batch_size = 8, 8
    config.data.max_prompt_length, config.data.max_response_length = 64, 12
    config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = 4, 2
    config.actor.optim.lr = config.critic.optim.lr = 1e-2
    config.algorithm.use_kl_in_reward = True
    config.reward.model_path = config.critic.path = "{folder}/reward"
    config.critic.keep_head = True
    config.trainer.total_training_steps = 2
    config.trainer.save_freq, config.trainer.test_freq = 1, 0
    return config
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Write a tiny Llama, adapters of a reward model that belong to it, and a configuration."""
    folder = tmp_path_factory.mktemp("lora")
    architecture = read_architecture(write_arithmetic_llama(folder, problems=200))
    shape = Lora(2, 2.0, ("k_proj", "up_proj"))
    adapters = jax.tree.map(
        lambda x: 0.3 * jax.random.normal(jax.random.key(x.size), x.shape, jnp.float32),
        init_adapters(architecture, shape, jax.random.key(1), "scalar"),
    )
    save_adapters(adapters, architecture, shape, folder / "reward", (f"{folder}/llama", None))
    (folder / "config.py").write_text(CONFIG.format(folder=folder))
    return folder


# Rank and targets are those of the adapters that a run starts from.
EXPORTED = [f"--config.model.lora.{x}" for x in ("rank=0", "alpha=16", "targets=all-linear")]
# Shows what is loaded, however fast that is.
TRAIN = """
import sys
from jax_ppo.train import main
from jax_ppo.reporting import console
console.LEAST_REPORTED_SECONDS = 0
main(sys.argv)
"""


def run(files, workdir, *overrides, devices=1):
    options = f"--config={files}/config.py", f"--workdir={workdir}", *overrides
    return run_python("-c", TRAIN, *options, devices=devices).stdout


def train(files, workdir, *overrides):
    """Train in this process."""
    arguments = ["train", f"--config={files}/config.py", *overrides]
    ppo_training.train_ppo(command_line.read_command_line(arguments)[0], workdir)


@pytest.fixture(scope="module")
def undisturbed(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    return workdir, run(files, workdir)


@pytest.mark.slow
def test_a_run_learns_adapters_alone(files, undisturbed):
    workdir, output = undisturbed
    assert "loaded the base: 20 tensors" in output and "loaded the reference" not in output
    for role in ("critic", "reward model"):
        assert f"loaded the {role}'s adapters: 9 tensors" in output
    first, second = read_steps(workdir)
    assert abs(float(first["kl/reference"])) < 1e-6 < abs(float(second["kl/reference"]))
    for row in (first, second):
        assert float(row["actor/first_log_ratio"]) < 1e-5 < float(row["actor/log_ratio_max"])
    assert abs(float(first["critic/values_mean"])) > 1e-3  # the head is the reward model's

    base, merged = (
        load_file(folder / "model.safetensors") for folder in (files / "llama", workdir / "actor")
    )
    tensors = load_file(workdir / "adapter" / "adapter_model.safetensors")
    config = json.loads((workdir / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["base_model_name_or_path"] == f"{files}/llama" and len(tensors) == 12
    for name, weight in merged.items():
        prefix = "base_model.model." + name.removesuffix("weight")
        change = 0
        if f"{prefix}lora_A.weight" in tensors:
            change = 2 * tensors[f"{prefix}lora_B.weight"] @ tensors[f"{prefix}lora_A.weight"]
            assert np.abs(change).max() > 1e-3
        np.testing.assert_allclose(weight, base[name] + change, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.exhaustive
def test_stopped_and_resumed_is_bit_equal(files, undisturbed, tmp_path):
    run(files, tmp_path, "--config.trainer.total_training_steps=1")
    assert "resuming after step 1 of 2" in run(files, tmp_path)
    ours, theirs = (
        (folder / "adapter" / "adapter_model.safetensors").read_bytes()
        for folder in (tmp_path, undisturbed[0])
    )
    assert ours == theirs
    ours, theirs = (
        [row["critic/loss"] for row in read_steps(folder)] for folder in (tmp_path, undisturbed[0])
    )
    assert ours == theirs


@pytest.mark.exhaustive
def test_eight_devices_begin_where_the_first_run_ended(files, undisturbed, tmp_path):
    """A run can start from exported adapters and takes over their rank and targets."""
    run(
        files,
        tmp_path,
        f"--config.model.lora.path={undisturbed[0]}/adapter",
        *EXPORTED,
        "--config.mesh.fsdp=2",
        "--config.mesh.model=2",
        devices=8,
    )
    before, after = (read_evaluations(folder) for folder in (undisturbed[0], tmp_path))
    assert after[0]["reward_mean"] == pytest.approx(before[-1]["reward_mean"], abs=1e-4)
    assert abs(float(read_steps(tmp_path)[0]["kl/reference"])) > 1e-4  # relative to the bare base


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--config.critic.path={files}/llama", r"config\.critic\.path: .*/llama holds no adapters"),
        (
            "--config.model.lora.rank=0",
            r"config\.critic\.path=.*reward': holds adapters; expected all weights",
        ),
    ],
)
def test_mistakes_are_told_before_weights_load(files, tmp_path, override, message, no_weights):
    with pytest.raises(UserError, match=message):
        train(files, tmp_path, override.format(files=files))


def test_a_critic_of_another_vocabulary_is_refused(files, tmp_path, no_weights):
    train_tokenizer(["other words"], 60, tmp_path / "tokenizer")
    critic = shutil.copytree(files / "llama", tmp_path / "critic")
    shutil.copytree(tmp_path / "tokenizer", critic, dirs_exist_ok=True)
    options = ("model.lora.rank=0", "reward.model_path=", "critic.keep_head=False")
    options = [f"--config.{option}" for option in (*options, f"critic.path={critic}")]
    with pytest.raises(UserError, match=r"critic\.path='.*': its tokenizer has another vocabulary"):
        train(files, tmp_path / "run", *options)


@pytest.mark.parametrize(
    ("base", "refused", "warned"),
    [
        ("{files}", True, False),
        ("some/other-name", False, True),
        ("{files}/../{files.name}/llama", False, False),
    ],
)
def test_adapters_of_another_folder_are_refused(
    files, tmp_path, base, refused, warned, monkeypatch, caplog
):
    """A base folder with only a different name causes a warning: a model may have several."""

    def stop(*_, **__):
        raise KeyboardInterrupt("weights would be loaded now")

    monkeypatch.setattr("jax_ppo.training.state.StateBuilder.create", stop)
    path, base = files / "reward" / "adapter_config.json", base.format(files=files)
    text = path.read_text()
    try:
        path.write_text(text.replace(f"{files}/llama", base))
        with pytest.raises(
            UserError if refused else KeyboardInterrupt,
            match=f"belong to '{base}'" if refused else "weights",
        ):
            train(files, tmp_path)
    finally:
        path.write_text(text)
    assert (f"belong to '{base}'" in caplog.text) == warned


@pytest.mark.exhaustive
def test_with_a_shared_trunk_too(files, tmp_path):
    """The critic's head is trained and stored with the actor's adapters, but not exported."""
    shared = (
        "--config.critic.shared_trunk=True",
        "--config.critic.path=",
        "--config.critic.keep_head=unset",
    )
    run(files, tmp_path, *shared, "--config.trainer.total_training_steps=1")
    assert "resuming after step 1 of 2" in run(files, tmp_path, *shared)
    first, second = read_steps(tmp_path)
    assert float(first["critic/values_mean"]) == 0 != float(second["critic/values_mean"])
    assert not list(tmp_path.glob("checkpoints/*/critic"))
    for path in ("actor/model.safetensors", "adapter/adapter_model.safetensors"):
        assert not any("score" in name for name in load_file(tmp_path / path))


@pytest.mark.exhaustive
def test_adapters_teach_adapters_and_are_neither_saved_nor_exported(files, undisturbed, tmp_path):
    teacher = undisturbed[0] / "adapter"
    options = (f"--config.teacher.path={teacher}", "--config.teacher.loss_coef=0.5")
    output = run(files, tmp_path / "taught", *options)
    assert "loaded the teacher's adapters: 12 tensors" in output
    first, second = read_steps(tmp_path / "taught")
    for name in ("teacher/kl", "actor/teacher_kl"):
        assert all(float(row[name]) != 0 for row in (first, second)), name
    assert float(first["actor/teacher_kl"]) > 0
    assert not [path for path in (tmp_path / "taught").rglob("*") if path.name == "teacher"]


@pytest.mark.exhaustive
def test_the_kl_may_be_measured_to_the_adapters_that_a_run_starts_from(
    files, undisturbed, tmp_path
):
    adapters = undisturbed[0] / "adapter"
    options = (
        *EXPORTED,
        f"--config.model.lora.path={adapters}",
        f"--config.reference.path={adapters}",
        "--config.actor.use_kl_loss=True",
        "--config.actor.kl_loss_type=full",
    )
    output = run(files, tmp_path, *options, "--config.trainer.total_training_steps=1")
    assert "loaded the base: 20 tensors" in output
    assert "loaded the reference's adapters: 12 tensors" in output
    assert "the reference is the bare base" not in output
    assert "resuming after step 1 of 2" in run(files, tmp_path, *options)
    first, second = (float(row["kl/reference"]) for row in read_steps(tmp_path))
    assert abs(first) < 1e-6 < abs(second)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("reference")]
