"""GSM8K with Gemma 3 1B, for the TPU v5e-8 of a Kaggle notebook.

    python -m jax_ppo.train --config=gemma3_1b

The model is gated on the hub: accept its licence and set HF_TOKEN. The parameters are split over
the eight chips: 6.87 of 15.75 GiB each by a compiled plan. Not run here at this size; its
`:smoke` form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("gsm8k")
    config.experiment_name = "gemma3_1b"
    config.model.path = "google/gemma-3-1b-it"
    config.mesh.data = 1
    config.mesh.fsdp = -1
    return config
