"""Kernels by the names that options have for them."""

from jax_ppo.registries import IMPORTANCE_WEIGHTS, KL_ESTIMATORS

# The estimators that are functions of the sampled token's log-ratio.
KL = {name: x.function for name, x in KL_ESTIMATORS.items() if not x.needs_vocabulary}
LEVELS = {name: x.function for name, x in IMPORTANCE_WEIGHTS.items()}
