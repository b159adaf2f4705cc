"""verl's published PPO on GSM8K: Qwen2.5-0.5B-Instruct, 0.567 after 435 steps on one GPU.

    python -m jax_ppo.train --config=verl_gsm8k

Settings and curve are those of a log of December 2024, gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-
resp512-0.567.log in github.com/eric-haibin-lin/verl-data (branch experiments). Checked against
verl at its commit, 50ac7252: examples/ppo_trainer/run_gemma.sh and
verl/trainer/config/ppo_trainer.yaml (sizes, learning rates, clips, KL, entropy, epochs),
trainer/ppo/workers/fsdp_workers.py (AdamW), trainer/ppo/core_algos.py and ray_trainer.py (losses,
k1, whitening), trainer/ppo/actor/dp_actor.py and critic/dp_critic.py (averages),
utils/reward_score/gsm8k.py (scorer) and examples/data_preprocess/gsm8k.py (instruction).

What differs: verl averages over each pair of responses and then over the pairs of a mini-batch,
here over each response and then over those; its critic's head starts at random, ours at 0; it
compares answers as text, here as numbers; it tests 1,312 of the 1,319 questions. Not run here at
this size; its `:smoke` form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("gsm8k")
    config.experiment_name = "verl_gsm8k"
    config.data.max_prompt_length = 1024
    config.reward.terms = "gsm8k[first]:1"
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_ctrl.kl_coef = 0.001
    config.actor.entropy_coeff = 0.001
    config.actor.loss_agg_mode = "seq-mean-token-mean"
    config.actor.clip_ratio_c = 0.0  # verl clips twice since 2025 only
    return config
