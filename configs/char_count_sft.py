r"""Supervised fine-tuning of SmolLM2-135M-Instruct to count a letter in a word, one by one.

The first of two commands: char_count.py is next.

    python -m jax_ppo.sft --config=char_count_sft --config.model.path=FOLDER

Without a folder the model comes from the Hugging Face hub. Task, sizes and optimizer are those of
verl's recipe char_count (train_sft.sh with FSDP, for verl 0.6.1): one epoch of 9,000 words of 5 to
20 letters is 140 steps of 64. It writes output/char_count_sft/actor. Rows of 384 tokens hold two to
five examples; the longest has 227 tokens.
"""

from ml_collections import ConfigDict

from jax_ppo.config import default_config


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = default_config()
    config.experiment_name = "char_count_sft"
    config.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.model.gradient_checkpointing = False
    config.data.train_files = "char_count:9000"
    config.data.val_files = "char_count:1000:heldout"
    config.data.val_max_samples = 128
    config.data.train_batch_size = 64
    config.data.val_batch_size = 64
    config.data.max_prompt_length = 77
    config.data.max_response_length = 150
    config.packing.row_length = 384
    config.supervised.optim.lr = 2e-5
    config.supervised.optim.lr_schedule = "cosine"
    config.supervised.optim.lr_warmup_steps = 1
    config.supervised.optim.min_lr_ratio = 0.1
    config.supervised.optim.beta2 = 0.95
    config.supervised.optim.weight_decay = 0.1
    config.trainer.total_epochs = 1
    config.trainer.test_freq = 70
    config.trainer.save_freq = 70
    return config
