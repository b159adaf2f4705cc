"""The KL coefficient of a new and of a resumed run."""

import dataclasses

import jax.numpy as jnp
import pytest

import tiny
from jax_ppo.training.control import first_control, resumed_control


@pytest.mark.parametrize(
    ("options", "coefficient"), [({"type": "adaptive"}, 0.75), ({"type": "fixed"}, 0.5)]
)
def test_only_an_adapted_coefficient_survives_a_resume(options, coefficient):
    names = {f"algorithm__kl_ctrl__{name}": value for name, value in options.items()}
    config = tiny.config(algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__kl_coef=0.5, **names)
    kl_options = config.algorithm.kl_ctrl
    first = first_control(kl_options, config.reward, config.critic)
    saved = dataclasses.replace(first, kl_coef=jnp.float32(0.75))
    resumed = resumed_control(kl_options, saved)
    assert float(resumed.kl_coef) == pytest.approx(coefficient)
    assert resumed.moments == saved.moments
