"""PPO for language models in JAX. Importing the package loads nothing; `python -m jax_ppo.train` is the command."""
