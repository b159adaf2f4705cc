"""MATH by DAPO: clip-higher, token-level loss, dynamic sampling, overlong shaping, no KL.

    pip install 'jax_ppo[math]'
    python -m jax_ppo.train --config=dapo

The options of the paper (Yu et al. 2025, arXiv 2503.14476) on the data of math.py: clip ratios 0.2
and 0.28, groups with equal rewards replaced, a penalty that grows over the last quarter of the
response length. The paper trains Qwen2.5-32B with 16 responses of 20k tokens to each of 512
prompts on 128 H800; this file has 8 responses of 2k for a 0.5B on eight devices. Not run here at
this size; its `:smoke` form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("math")
    config.experiment_name = "dapo"
    config.algorithm.adv_estimator = "grpo"
    config.algorithm.use_reference = False
    config.algorithm.filter_groups.enable = True
    config.algorithm.filter_groups.metric = "accuracy"
    config.actor.clip_ratio_low = 0.2
    config.actor.clip_ratio_high = 0.28
    config.actor.loss_agg_mode = "token-mean"
    config.rollout.n = 8
    config.data.max_response_length = 2048
    config.reward.overlong_buffer_len = 512
    config.reward.overlong_penalty_factor = 1.0
    return config
