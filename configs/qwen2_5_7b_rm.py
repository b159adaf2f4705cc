"""Qwen2.5-7B-Instruct against a reward model, with a KL penalty in the reward.

    python -m jax_ppo.train --config=qwen2_5_7b_rm \\
        --config.reward.model_path=OWNER/NAME --config.data.train_files=PROMPTS.jsonl

Prompts alone are enough (docs/data-and-rewards.md); here they are GSM8K's questions. The reward
model is a sequence classifier with one label, by default one of 0.6B parameters with another
tokenizer. A TPU v5e-16, eight GPUs of 40 GB, or more. Not run here at this size; its `:smoke`
form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("qwen2_5_7b")
    config.experiment_name = "qwen2_5_7b_rm"
    config.reward.model_path = "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
    config.data.instruction = ""
    config.algorithm.lam = 0.95
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_ctrl.kl_coef = 0.01
    config.reward.normalize = "running"
    config.trainer.best_metric = "reward_mean"
    return config
