"""PPO over dialogues without the host: a guessing game whose rules are traced into the decode loop.

    python -m jax_ppo.train --config=configs/higher_lower.py

The model of `arithmetic` guesses the answers to its problems, up to five times each; a right guess
earns 1, a wrong one -0.25. In a run of 30 steps the mean held-out reward rose from -0.63 to -0.51.
A penalty keeps the policy near its reference, a model of worked solutions (at most 0.3 nats per
token away); without it the reward reached -0.42 in a run that its warnings called a runaway.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("arithmetic")
    config.experiment_name = "higher_lower"
    # Five guesses of one token, and an answer to each.
    config.data.max_response_length = 10
    config.rollout.multi_turn.environment = "jax_ppo.environments.higher_lower:HigherLower"
    config.rollout.multi_turn.max_turn_length = 1
    config.rollout.multi_turn.reward = "environment"
    config.actor.optim.lr = 2e-4
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_ctrl.kl_coef = 0.1
    config.trainer.best_metric = "reward_mean"
    return config
