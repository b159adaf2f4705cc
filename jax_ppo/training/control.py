"""KL controllers, and the other values that carry over from one PPO step to the next."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_ppo.config.schema import Critic, Reward
from jax_ppo.config.training_options import KLControl
from jax_ppo.errors import UserError
from jax_ppo.kernels import kl
from jax_ppo.kernels.masked_statistics import Moments, empty_moments
from jax_ppo.models.hf.fields import ConfigReader, read_json_object
from jax_ppo.models.hf.save import VALUE_UNIT
from jax_ppo.registries import KL_CONTROLLERS
from jax_ppo.types import Control


def first_control(
    kl_options: KLControl, reward: Reward, critic: Critic, returns: Moments | None = None
) -> Control:
    """Return the `Control` of step 0; `returns` has the moments of a critic that continues."""
    tracked_moments = {}  # only configured moments exist, so that other runs carry and save none
    if reward.normalize != "none":
        tracked_moments["rewards"] = empty_moments()
    if critic.normalize_values:
        tracked_moments["returns"] = returns or empty_moments()
    return Control(kl_coef=jnp.float32(kl_options.kl_coef), moments=tracked_moments)


def read_value_unit(critic: Critic, folder: Path) -> Moments | None:
    """Return the moments of a folder's critic, if any; raise `UserError` if its unit differs."""
    path = folder / VALUE_UNIT
    setting = f"config.critic.normalize_values={critic.normalize_values}: the critic in "
    if not path.exists():
        if critic.normalize_values:
            raise UserError(
                f"{setting}{folder} predicts rewards, or was exported without {VALUE_UNIT}; set it "
                "to False, or config.critic.keep_head=False to start with a head of zeros"
            )
        return None
    if not critic.normalize_values:
        raise UserError(f"{setting}{folder} predicts normalized returns; set it to True")
    reader = ConfigReader(read_json_object(path), where=f"{path}: ")
    numbers = (reader.number(name, above=-math.inf) for name in Moments._fields)
    return Moments(*map(jnp.float32, numbers))


def resumed_control(kl_options: KLControl, saved: Control) -> Control:
    """Return the `Control` of a resumed run's first step; `kl_options` may have changed."""
    # An adapted coefficient continues; a fixed one follows the options.
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
