"""PPO over dialogues with a real pretrained model: SmolLM2-135M-Instruct calls a calculator.

    python -m jax_ppo.sft --config=smollm2_calculator_sft --config.model.path=FOLDER
    python -m jax_ppo.train --config=smollm2_calculator

The first command shows the model 64 solutions. It then mostly writes the expression and `=`, but
adds digits to the calculator's value or does not repeat it as its answer. PPO trains adapters of
actor and critic, at a temperature of 0.5: at 1 hardly any response is right at first. Expect the
reward of samples to rise from 0.28 to 0.88 and greedy accuracy on 64 held-out calculations from
0.52 to 0.98; the two commands take nine minutes of processor time and 4.8 GiB. docs/results.md
has the run.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("smollm2_sums")
    config.experiment_name = "smollm2_calculator"
    config.model.path = "output/smollm2_calculator_sft/actor"
    config.model.lora.rank = 16
    config.data.train_files = "calculations:4096"
    config.data.val_files = "calculations:64:heldout"
    config.data.train_batch_size = 32
    config.data.max_response_length = 32
    config.actor.ppo_mini_batch_size = 8
    config.actor.optim.lr = 2e-4
    config.critic.optim.lr = 1e-3
    config.rollout.temperature = 0.5
    config.rollout.stop = "="
    config.rollout.multi_turn.environment = "jax_ppo.environments.calculator:Calculator"
    config.rollout.multi_turn.max_observation_length = 8
    config.trainer.total_training_steps = 4
    return config
