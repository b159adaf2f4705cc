"""GSM8K with Qwen2.5-0.5B-Instruct: the exact answer after #### is the reward.

    python -m jax_ppo.train --config=configs/gsm8k.py

Model and data come from the Hugging Face hub. With local copies:

    python -m jax_ppo.train --config=configs/gsm8k.py --config.model.path=FOLDER \
        --config.data.train_files=gsm8k/train.jsonl --config.data.val_files=gsm8k/test.jsonl

The sizes follow verl's published example: 256 prompts per step, mini-batches of 64, prompts
and responses of up to 512 tokens each.
"""

from ml_collections import ConfigDict

from jax_ppo.config import default_config


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = default_config()
    config.experiment_name = "gsm8k"
    config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    config.data.train_files = "hf:openai/gsm8k/main/train-00000-of-00001.parquet"
    config.data.val_files = "hf:openai/gsm8k/main/test-00000-of-00001.parquet"
    config.data.instruction = 'Let\'s think step by step and output the final answer after "####".'
    config.data.train_batch_size = 256
    config.data.val_batch_size = 256
    config.data.max_prompt_length = 512
    config.data.max_response_length = 512
    config.actor.ppo_mini_batch_size = 64
    config.actor.optim.lr = 1e-6
    config.critic.optim.lr = 1e-5
    config.trainer.total_epochs = 15
    config.trainer.test_freq = 10
    config.trainer.save_freq = 50
    return config
