"""Supervised fine-tuning of SmolLM2-135M-Instruct on 64 calls of a calculator.

The first of two commands: smollm2_calculator.py is next.

    python -m jax_ppo.sft --config=smollm2_calculator_sft --config.model.path=FOLDER

Without a folder the model comes from the Hugging Face hub. It writes
output/smollm2_calculator_sft/actor.
"""

from ml_collections import ConfigDict

from jax_ppo.config import default_config


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = default_config()
    config.experiment_name = "smollm2_calculator_sft"
    config.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.model.gradient_checkpointing = False
    config.data.train_files = "calculations:4096"
    config.data.val_files = "calculations:64:heldout"
    config.data.train_batch_size = 16
    config.data.val_batch_size = 64
    config.data.max_prompt_length = 46
    config.data.max_response_length = 32
    config.supervised.optim.lr = 1e-5
    config.supervised.micro_batch_size_per_device = 4
    config.trainer.total_training_steps = 4
    config.trainer.test_freq = 4
    config.trainer.save_freq = 0
    return config
