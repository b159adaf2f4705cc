import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.kernels import kl
from jax_ppo.kernels.kl import adaptive_kl_coef
from kernels_by_name import KL


@functools.partial(jax.jit, static_argnames="kind")
def kl_estimate(logprobs, ref_logprobs, mask, kind):
    return kl.kl_estimate(logprobs, ref_logprobs, mask, KL[kind])


def estimate_at(log_ratio, kind):
    return kl_estimate(jnp.array([log_ratio]), jnp.zeros(1), jnp.ones(1), kind)[0]


def test_by_hand():
    # d = ln 2: k1 = |d| = 0.6931, k2 = 0.6931^2 / 2 = 0.2402, k3 = 1/2 - 1 + 0.6931 = 0.1931,
    # and the clamped estimate is d itself.
    # d = -ln 2: k1 = -0.6931, k2 the same, k3 = 2 - 1 - 0.6931 = 0.3069, and the clamped one 0.
    cases = {
        math.log(2): (0.6931, 0.6931, 0.2402, 0.1931, 0.1931, 0.6931),
        -math.log(2): (-0.6931, 0.6931, 0.2402, 0.3069, 0.3069, 0),
    }
    for d, expected in cases.items():
        for kind, value in zip(("k1", "abs", "k2", "k3", "k3+", "clamped"), expected, strict=True):
            np.testing.assert_allclose(estimate_at(d, kind), value, atol=5e-5)


def test_k3_keeps_its_digits_near_equality():
    """exp(-d) - 1 + d in float32 is 0 or 6e-8 for d = 2e-4; the exact value is 2e-8."""
    for d in (1e-2, 1e-3, 2e-4, -2e-4, -1e-3):
        np.testing.assert_allclose(estimate_at(d, "k3"), d * d / 2 - d**3 / 6, rtol=5e-3)


def test_a_difference_of_rounding_is_zero_and_restrains_nothing():
    """float32: 1,000 times 2^-23, which is 1.19e-4. k1 has the gradient 1 everywhere."""
    assert estimate_at(1.19e-4, "k1") == 0 != estimate_at(1.2e-4, "k1")
    for kind in ("abs", "k2", "k3", "k3+", "clamped"):
        value_and_gradient = jax.value_and_grad(functools.partial(estimate_at, kind=kind))
        assert value_and_gradient(1.19e-4) == (0, 0)
        assert value_and_gradient(1.2e-4)[1] != 0


def test_k3_of_a_huge_log_ratio_is_clamped_and_flat():
    values = {-1000.0: 10, -20.5: 10, 1000.0: 10, 5.0: 5 - 1 + math.exp(-5)}
    for d, expected in values.items():
        np.testing.assert_allclose(estimate_at(d, "k3"), expected, rtol=1e-5)
    slope = jax.jit(jax.grad(estimate_at), static_argnames="kind")
    for d, expected in ((-1000.0, 0.0), (1000.0, 0.0), (5.0, 1 - math.exp(-5))):
        np.testing.assert_allclose(slope(d, kind="k3"), expected, rtol=1e-5)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    slope = jax.jit(jax.grad(estimate_at), static_argnames="kind")
    for d in (-1000.0, -2.0, 0.0, 2e-4, 0.5, 30.0):
        assert estimate_at(d, "k3+") == estimate_at(d, "k3")
        assert slope(d, kind="k3+") == slope(d, kind="k2") == np.float32(d)  # also where k3 is flat


def test_clamped_holds_back_only_tokens_made_more_likely():
    slope = jax.jit(jax.grad(estimate_at), static_argnames="kind")
    for d, value, expected in ((2.0, 2.0, 1.0), (-2.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
        assert estimate_at(d, "clamped") == value and slope(d, kind="clamped") == expected


def test_adaptive_coefficient_by_hand():
    # KL 6.6 for a target of 6: error 0.1; 256 of 10,000 samples:
    # 0.2 * (1 + 0.1 * 0.0256) = 0.200512.
    np.testing.assert_allclose(adaptive_kl_coef(0.2, 6.6, 6.0, 10_000, 256), 0.200512, rtol=1e-6)
    # 3 for 6 is an error of -0.5, clipped to -0.2: 0.2 * (1 - 0.00512) = 0.198976.
    # Ten times the target: +0.2.
    np.testing.assert_allclose(adaptive_kl_coef(0.2, 3.0, 6.0, 10_000, 256), 0.198976, rtol=1e-6)
    np.testing.assert_allclose(adaptive_kl_coef(0.2, 60.0, 6.0, 10_000, 256), 0.201024, rtol=1e-6)
    for unmoved in (6.0, math.nan):
        assert adaptive_kl_coef(jnp.float32(0.25), unmoved, 6.0, 10_000, 256) == 0.25
