"""GSM8K by PPO with low-rank adapters: actor, critic and reference share one frozen base.

    python -m jax_ppo.train --config=gsm8k_lora

Fits one TPU v5e chip (9.1 of 15.75 GiB, estimated by jax_ppo.plan) or a GPU of 16 GB. The
learning rate is ten times that of all parameters, as is usual for adapters. Not run here at this
size; its `:smoke` form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("gsm8k")
    config.experiment_name = "gsm8k_lora"
    config.model.lora.rank = 32
    config.model.lora.alpha = 32.0
    config.actor.optim.lr = 1e-5
    config.critic.optim.lr = 1e-4
    return config
