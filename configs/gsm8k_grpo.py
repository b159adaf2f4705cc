"""GSM8K by GRPO: no critic; responses are compared with others to the same prompt.

    python -m jax_ppo.train --config=gsm8k_grpo

Four responses to each of 256 prompts, the KL to the reference in the loss, one device of 80 GB or
a TPU v5e-8. Sizes follow verl's GRPO example for GSM8K (examples/grpo_trainer), with fewer
responses. Not run here at this size; its `:smoke` form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("gsm8k")
    config.experiment_name = "gsm8k_grpo"
    config.algorithm.adv_estimator = "grpo"
    config.rollout.n = 4
    config.actor.use_kl_loss = True
    config.actor.kl_loss_coef = 0.001
    config.actor.kl_loss_type = "k3"
    config.actor.ppo_mini_batch_size = 64
    return config
