r"""Counting a letter in a word with SmolLM2-135M-Instruct, from the model of char_count_sft.py.

    python -m jax_ppo.sft --config=char_count_sft
    python -m jax_ppo.train --config=char_count

Task and sizes are those of verl's recipe char_count (train_grpo.sh, for verl 0.6.1): 128 prompts
with 8 responses each, mini-batches of 16 prompts, a learning rate of 1e-6, no KL, two epochs of 70
steps; the reward is 1 for the right number in \boxed{}. The recipe uses GRPO; this file adds a
critic. For GRPO:

    python -m jax_ppo.train --config=char_count --config.algorithm.adv_estimator=grpo \
        --workdir=output/char_count-grpo

A response ends with its box, at most 107 tokens here; the recipe goes on to 128. A learning rate of
1e-5 is too high for the actor: with 64 prompts and one response each, the model lost most of its
accuracy in the first step.
"""

from ml_collections import ConfigDict

from jax_ppo.config import default_config


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = default_config()
    config.experiment_name = "char_count"
    config.model.path = "output/char_count_sft/actor"
    config.model.gradient_checkpointing = False
    config.data.train_files = "char_count:9000"
    config.data.val_files = "char_count:1000:heldout"
    config.data.train_batch_size = 128
    config.data.val_batch_size = 128
    config.data.max_prompt_length = 77
    config.data.max_response_length = 108
    config.rollout.n = 8
    config.rollout.stop = "}"
    config.actor.ppo_mini_batch_size = 16
    config.actor.optim.lr = 1e-6
    config.critic.optim.lr = 1e-5
    config.algorithm.use_reference = False
    config.trainer.total_epochs = 2
    return config
