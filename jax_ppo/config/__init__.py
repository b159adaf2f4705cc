"""Options: schema, loading, parsing, validation, and the command line."""

from jax_ppo.config.loading import default_config as default_config
from jax_ppo.config.loading import read_config_file as read_config_file
from jax_ppo.config.reference import main as main
