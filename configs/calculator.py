"""PPO over dialogues: the model writes expressions, and a calculator writes their values.

    python -m jax_ppo.train --config=configs/calculator.py

The small model of `arithmetic` gives answers at once that are usually wrong. PPO discovers that
steps pay, whose sums the calculator does: a turn ends with `=`, and the calculator continues. In a
run of 30 steps held-out accuracy, sampled at temperature 1, rose from 0.38 to 0.99.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("arithmetic")
    config.experiment_name = "calculator"
    config.rollout.stop = "="
    config.rollout.multi_turn.environment = "jax_ppo.environments.calculator:Calculator"
    config.rollout.multi_turn.max_observation_length = 4
    config.trainer.total_training_steps = 30
    return config
