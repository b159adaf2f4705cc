"""Numbers worked by hand."""

import math

import jax
import jax.numpy as jnp
import pytest

from jax_ppo.kernels import preferences


def test_bradley_terry():
    losses = preferences.bradley_terry(jnp.array([1.0, 0.5, -1.0]), jnp.array([0.0, 0.5, 1.0]))
    assert losses.tolist() == pytest.approx(
        [math.log(1 + math.exp(-1)), math.log(2), math.log(1 + math.exp(2))]
    )


def test_its_gradient_is_the_probability_of_the_other_preference():
    by_chosen, by_rejected = jax.grad(preferences.bradley_terry, (0, 1))(2.0, 1.0)
    assert float(by_chosen) == pytest.approx(-1 / (1 + math.e)) and float(by_rejected) == -float(
        by_chosen
    )


def test_large_differences_stay_finite():
    value, slope = jax.value_and_grad(preferences.bradley_terry)(
        jnp.float32(-1e4), jnp.float32(1e4)
    )
    assert float(value) == 2e4 and float(slope) == -1


def test_centering_penalty():
    assert preferences.centering_penalty(
        jnp.array([2.0, 1.5]), jnp.array([1.0, -1.5])
    ).tolist() == [9.0, 0.0]
