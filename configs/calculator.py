"""PPO over dialogues: the model writes expressions, and a calculator writes their values.

    python -m jax_ppo.train --config=configs/calculator.py

The model of `arithmetic`, taught too briefly to know sums. A turn ends with `=`.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("arithmetic")
    config.experiment_name = "calculator"
    # A model that writes the expressions of a solution, but seldom knows their values.
    config.model.create.steps = 200
    config.rollout.stop = "="
    config.rollout.multi_turn.environment = "jax_ppo.environments.calculator:Calculator"
    config.rollout.multi_turn.max_observation_length = 4
    config.trainer.total_training_steps = 30
    return config
