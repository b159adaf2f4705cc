"""`python -m jax_ppo.config` prints the table of options."""

from jax_ppo.config.loading import main

main()
