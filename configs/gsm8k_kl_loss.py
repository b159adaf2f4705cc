"""GSM8K by PPO with the KL to the reference in the loss; gsm8k.py has no KL penalty.

    python -m jax_ppo.train --config=gsm8k_kl_loss

Otherwise as gsm8k.py: one device of 80 GB or a TPU v5e-8. The estimator is k3 (low_var_kl in
verl). Not run here at this size; its `:smoke` form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("gsm8k")
    config.experiment_name = "gsm8k_kl_loss"
    config.actor.use_kl_loss = True
    config.actor.kl_loss_coef = 0.001
    config.actor.kl_loss_type = "k3"
    return config
