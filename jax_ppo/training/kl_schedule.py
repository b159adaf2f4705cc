"""The KL coefficient's schedule and the values that carry over from one PPO step to the next."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_ppo.config import parsing
from jax_ppo.config.schema import Critic, KLControl, Reward
from jax_ppo.kernels import moments, schedules
from jax_ppo.types import Control


def kl_coefficient(options: KLControl, step: int | jax.Array) -> jax.Array:
    """Return the KL coefficient at the start of a step, before any adaptive control.

    Args:
      options: `config.algorithm.kl_ctrl`.
      step: int scalar, counted from 0.

    Returns:
      float32 scalar: the schedule's value for type `linear` or `step`, otherwise `kl_coef`.
    """
    if options.type in ("linear", "step"):
        points = parsing.parse_schedule(options.schedule)
        return schedules.piecewise(points, step, linear=options.type == "linear")
    return jnp.float32(options.kl_coef)


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
    return Control(kl_coef=kl_coefficient(kl_options, 0), moments=tracked_moments)


def resumed_control(kl_options: KLControl, saved: Control, step: int) -> Control:
    """Return the `Control` of a resumed run's first step.

    Args:
      kl_options: `config.algorithm.kl_ctrl`, which may differ from the saved run's.
      saved: the control in the checkpoint, on the mesh.
      step: the number of completed steps.
    """
    # The controller adapts its own coefficient; any other follows the options.
    if kl_options.type == "adaptive":
        return saved
    coefficient = jax.device_put(kl_coefficient(kl_options, step), saved.kl_coef.sharding)
    return dataclasses.replace(saved, kl_coef=coefficient)
