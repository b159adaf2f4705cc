"""A reward model from the preferences of HH-RLHF.

The second of three commands: after hh_rlhf_sft.py and before hh_rlhf.py.

    python -m jax_ppo.reward_model --config=configs/hh_rlhf_reward.py

Data comes from the Hugging Face hub, and the model from hh_rlhf_sft.py. With local copies, and
small enough for 2 cores:

    python -m jax_ppo.reward_model --config=configs/hh_rlhf_reward.py \
        --config.model.dtype=float32 \
        '--config.data.train_files=harmless-base-test.jsonl.gz[:2000]' \
        '--config.data.val_files=harmless-base-test.jsonl.gz[2000:]' \
        --config.data.max_prompt_length=256 --config.data.max_response_length=256 \
        --config.supervised.optim.lr=3e-4 --config.trainer.total_epochs=3

With that small model it took nine minutes: after 45 steps, 59 % of 150 held-out pairs were ranked
as people prefer them (50 % before). It writes output/hh_rlhf_reward/reward_model, the reward model
of hh_rlhf.py. The data contains offensive text.
"""

from ml_collections import ConfigDict

from jax_ppo.config import default_config


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = default_config()
    config.experiment_name = "hh_rlhf_reward"
    config.model.path = "output/hh_rlhf_sft/actor"
    config.data.train_files = "hf:Anthropic/hh-rlhf/harmless-base/train.jsonl.gz"
    config.data.val_files = "hf:Anthropic/hh-rlhf/harmless-base/test.jsonl.gz"
    config.data.train_batch_size = 64
    config.data.val_batch_size = 64
    config.data.max_prompt_length = 512
    config.data.max_response_length = 256
    config.supervised.optim.lr = 1e-5
    config.supervised.optim.lr_warmup_steps = 10
    config.supervised.optim.lr_schedule = "cosine"
    config.supervised.center_coef = 0.01
    config.trainer.test_freq = 50
    config.trainer.save_freq = 200
    return config
