"""PPO on a real pretrained model: a 260-thousand-parameter Llama that tells children's stories.

    python -m jax_ppo.train --config=configs/tinystories.py --config.model.path=FOLDER

FOLDER is Karpathy's stories260K as a Hugging Face folder.

The reward is a rule: a fifth of a point for each different joyful word in a story (happy, friend,
laughed, ...), and 1 at most. A KL penalty in the reward keeps the stories stories. Expect the
held-out reward to rise from 0.24 to above 0.85 while the KL to the reference stays below 0.3 nats
per token, in a minute and a half on 2 cores.
"""

from ml_collections import ConfigDict

from jax_ppo.config import default_config


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = default_config()
    config.experiment_name = "tinystories"
    config.model.path = "stories260K"  # a folder here, unless the command names another
    config.model.dtype = "float32"
    config.model.gradient_checkpointing = False
    config.data.train_files = "stories:2048"
    config.data.val_files = "stories:128:heldout"
    config.data.train_batch_size = 64
    config.data.val_batch_size = 128
    config.data.max_prompt_length = 32
    config.data.max_response_length = 64
    config.actor.ppo_mini_batch_size = 32
    config.actor.optim.lr = 3e-4
    config.actor.optim.weight_decay = 0.0
    config.critic.optim.lr = 1e-3
    config.critic.optim.weight_decay = 0.0
    config.trainer.critic_warmup = 5
    config.algorithm.lam = 0.95
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_ctrl.kl_coef = 0.02
    config.rollout.val_kwargs.temperature = 1.0
    config.trainer.best_metric = "reward_mean"
    config.trainer.total_training_steps = 60
    config.trainer.test_freq = 10
    return config
