"""PPO without a download, on a laptop.

    python -m jax_ppo.train --config=configs/arithmetic.py

Starts from the small model in the package (jax_ppo/demonstration/model/, made by
benchmarks/demonstration_model.py). It can solve word problems in GSM8K's form step by step, but has
the habit of giving the answer at once, which is usually wrong. PPO discovers which of the two pays;
its only signal is a reward of 1 for a correct answer. Expect held-out accuracy, sampled at
temperature 1, to rise from 0.37-0.38 to 0.98-0.99.
"""

from ml_collections import ConfigDict

from jax_ppo.config import default_config


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = default_config()
    config.experiment_name = "arithmetic"
    config.data.train_files = "arithmetic:8192"
    config.data.val_files = "arithmetic:512:heldout"
    config.data.train_batch_size = 128
    config.data.val_batch_size = 128  # that of training: one program samples for both
    config.data.max_prompt_length = 48
    config.data.max_response_length = 24
    config.packing.row_length = 144  # three samples
    config.model.dtype = "float32"
    config.model.gradient_checkpointing = False
    config.actor.ppo_mini_batch_size = 32
    config.actor.optim.lr = 5e-4
    config.actor.optim.lr_schedule = "linear"
    config.actor.optim.lr_warmup_steps = 5
    config.actor.optim.weight_decay = 0.0
    config.critic.optim.lr = 1e-3
    config.critic.optim.weight_decay = 0.0
    config.trainer.critic_warmup = 3
    config.algorithm.lam = 0.95
    config.rollout.val_kwargs.temperature = 1.0
    config.trainer.total_training_steps = 30
    config.trainer.test_freq = 10
    config.trainer.save_freq = 15
    return config
