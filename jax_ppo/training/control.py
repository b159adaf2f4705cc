"""KL controllers, and the other values that carry over from one PPO step to the next."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_ppo.config.schema import Critic, KLControl, Reward
from jax_ppo.kernels import kl, moments
from jax_ppo.registries import KL_CONTROLLERS
from jax_ppo.types import Control


def first_control(kl_options: KLControl, reward: Reward, critic: Critic) -> Control:
    """Return the `Control` of step 0: the first KL coefficient, and empty running moments.

    Args:
      kl_options: `config.algorithm.kl_ctrl`.
      reward: running moments of the scores are kept if `reward.normalize` asks for them.
      critic: running moments of the returns are kept if `critic.normalize_values` is set.
    """
    # Only configured moments exist, so that other runs carry and save none.
    tracked_moments = {}
    if reward.normalize != "none":
        tracked_moments["rewards"] = moments.empty_moments()
    if critic.normalize_values:
        tracked_moments["returns"] = moments.empty_moments()
    return Control(kl_coef=jnp.float32(kl_options.kl_coef), moments=tracked_moments)


def resumed_control(kl_options: KLControl, saved: Control) -> Control:
    """Return the `Control` of a resumed run's first step.

    Args:
      kl_options: `config.algorithm.kl_ctrl`, which may differ from the saved run's.
      saved: the control in the checkpoint, on the mesh.
    """
    # The controller adapts its own coefficient; a fixed one follows the options.
    if KL_CONTROLLERS[kl_options.type].adapts:
        return saved
    coefficient = jax.device_put(jnp.float32(kl_options.kl_coef), saved.kl_coef.sharding)
    return dataclasses.replace(saved, kl_coef=coefficient)


def keep_coefficient(
    options: KLControl, coefficient: jax.Array, current_kl: jax.Array, samples: int
) -> jax.Array:
    """Return the configured coefficient."""
    return jnp.float32(options.kl_coef)


def adapt_coefficient(
    options: KLControl, coefficient: jax.Array, current_kl: jax.Array, samples: int
) -> jax.Array:
    """Return the coefficient after a step of the proportional controller of `kernels/kl.py`."""
    adapted = kl.adaptive_kl_coef(
        coefficient, current_kl, options.target_kl, options.horizon, samples
    )
    # One rollout with non-finite numbers must not spoil all steps that follow.
    return jnp.where(jnp.isfinite(adapted), adapted, coefficient)
