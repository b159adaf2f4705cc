"""Sums of two-digit numbers by PPO with a real pretrained model, SmolLM2-135M-Instruct, on a CPU.

    python -m jax_ppo.train --config=smollm2_sums --config.model.path=FOLDER

Without a folder the model comes from the Hugging Face hub. The question is asked through the
model's chat template; the last number of the response is the answer. All weights of actor and
critic are trained; for adapters on both add

    --config.model.lora.rank=16 --config.actor.optim.lr=2e-4 --config.critic.optim.lr=1e-3

Expect greedy accuracy on held-out sums to rise from 0.06 to between 0.55 and 0.77, within 15
minutes on 2 cores; with adapters to between 0.47 and 0.66, in 4 to 7. docs/results.md has the
runs, and docs/development/memory-estimate.md the memory.
"""

from ml_collections import ConfigDict

from jax_ppo.config import default_config


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = default_config()
    config.experiment_name = "smollm2_sums"
    config.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.data.train_files = "sums:4096"
    config.data.val_files = "sums:128:heldout"
    config.data.train_batch_size = 64
    config.data.val_batch_size = 64
    config.data.max_prompt_length = 46
    config.data.max_response_length = 16
    config.rollout.n = 1
    config.model.gradient_checkpointing = False
    config.actor.ppo_mini_batch_size = 16
    config.actor.optim.lr = 1e-5
    config.critic.optim.lr = 5e-5
    config.trainer.total_training_steps = 8
    config.trainer.test_freq = 4
    config.trainer.save_freq = 0
    return config
