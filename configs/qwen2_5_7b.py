"""GSM8K with Qwen2.5-7B-Instruct, all parameters, on a TPU v5e-16 or eight GPUs of 40 GB.

    python -m jax_ppo.train --config=qwen2_5_7b

Parameters, moments and gradient sums are stored in bfloat16 with stochastic rounding; decoding
splits each matrix over the devices of a host (11.29 of 15.75 GiB on v5e-16, compiled;
docs/development/memory-estimate.md). Not run here at this size; its `:smoke` form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("gsm8k")
    config.experiment_name = "qwen2_5_7b"
    config.model.path = "Qwen/Qwen2.5-7B-Instruct"
    for role in (config.actor, config.critic):
        role.optim.param_dtype = role.optim.moments_dtype = "bfloat16"
        role.optim.gradient_dtype = "bfloat16"
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.rollout.mesh.model = 4
    return config
