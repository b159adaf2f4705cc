"""The shipped configurations, and the smoke form of each."""

import pytest

from jax_ppo.config import config_files
from jax_ppo.config.loading import load_config
from jax_ppo.errors import UserError
from jax_ppo.run import ppo_training

SFT = ("char_count_sft", "hh_rlhf_sft", "smollm2_calculator_sft")
COMMANDS = {"hh_rlhf_reward": "reward_model", **dict.fromkeys(SFT, "sft")}
NAMES = config_files.shipped_names()
RECIPES = [name for name in NAMES if name not in COMMANDS]


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_is_valid_and_named_after_its_file(name):
    config = load_config(name, command=COMMANDS.get(name, "train"))
    assert config.experiment_name == name


@pytest.mark.parametrize("name", RECIPES)
def test_the_smoke_form_keeps_the_algorithm(name):
    config, smoke = load_config(name), load_config(f"{name}:smoke")
    assert smoke.algorithm == config.algorithm
    assert smoke.actor.policy_loss == config.actor.policy_loss
    assert smoke.actor.use_kl_loss == config.actor.use_kl_loss
    assert (smoke.actor.clip_ratio_high, smoke.actor.loss_agg_mode) == (
        config.actor.clip_ratio_high,
        config.actor.loss_agg_mode,
    )
    assert smoke.model.path == smoke.reward.model_path == ""
    assert smoke.data.train_files == "arithmetic:64"
    batches = config.data.train_batch_size // config.actor.ppo_mini_batch_size
    assert smoke.data.train_batch_size // smoke.actor.ppo_mini_batch_size == batches


@pytest.mark.parametrize("command", ["sft", "reward_model"])
@pytest.mark.parametrize("name", ["hh_rlhf_sft", "arithmetic"])
def test_supervised_training_has_no_smoke_form(name, command):
    """Regression: only options of `supervised` told it, and others lacked a model.path."""
    with pytest.raises(UserError, match=f"--config={name}:smoke: .* no smoke form"):
        load_config(f"{name}:smoke", command=command)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["hh_rlhf", "dapo", "gsm8k_lora", "qwen2_5_7b"])
def test_the_smoke_form_trains(name, tmp_path):
    options = {
        "trainer.total_training_steps": 2,
        "trainer.logger": "",
        "mesh.data": 1,
        "mesh.fsdp": -1,
    }
    summary = ppo_training.train_ppo(load_config(f"{name}:smoke", options), tmp_path)
    assert summary["steps"] == 2 and not summary["warnings"]
