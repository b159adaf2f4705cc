import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import kl
from jax_ppo.kernels.kl import KL_KINDS, adaptive_kl_coef

kl_estimate = jax.jit(kl.kl_estimate, static_argnames="kind")

FORMULAS = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(math.exp(-max(-20.0, min(20.0, d))) - 1 + max(-20.0, min(20.0, d)), 10.0),
    "clamped": lambda d: max(d, 0.0),
}
FORMULAS["k3+"] = FORMULAS["k3"]


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


@pytest.mark.parametrize("kind", KL_KINDS)
def test_against_loops(kind, rng, poison):
    mask = rng.integers(0, 2, (4, 6))
    logprobs, ref = -rng.exponential(2.0, (2, 4, 6)).astype(np.float32)
    result = kl_estimate(poison(logprobs, mask), poison(ref, mask), mask, kind)
    assert result.dtype == jnp.float32
    for i in range(4):
        for j in range(6):
            expected = FORMULAS[kind](float(logprobs[i, j]) - float(ref[i, j])) if mask[i, j] else 0
            np.testing.assert_allclose(result[i, j], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_exactly_zero_where_actor_equals_reference(kind, rng):
    logprobs = -rng.exponential(3.0, 1000).astype(np.float32)
    np.testing.assert_array_equal(
        kl_estimate(logprobs, logprobs.copy(), np.ones(1000), kind), np.zeros(1000)
    )


def test_k3_keeps_its_digits_near_equality():
    """exp(-d) - 1 + d in float32 is 0 or 6e-8 for d = 1e-4; the exact value is 5e-9."""
    for d in (1e-2, 1e-3, 1e-4, -1e-4, -1e-3):
        np.testing.assert_allclose(estimate_at(d, "k3"), d * d / 2 - d**3 / 6, rtol=5e-3)


def test_k3_of_a_huge_log_ratio_is_clamped_and_flat():
    for d, expected in (
        (-1000.0, 10.0),
        (-20.5, 10.0),
        (1000.0, 10.0),
        (5.0, 5 - 1 + math.exp(-5)),
    ):
        np.testing.assert_allclose(estimate_at(d, "k3"), expected, rtol=1e-5)
    slope = jax.jit(jax.grad(estimate_at), static_argnames="kind")
    for d, expected in ((-1000.0, 0.0), (1000.0, 0.0), (5.0, 1 - math.exp(-5))):
        np.testing.assert_allclose(slope(d, kind="k3"), expected, rtol=1e-5)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    slope = jax.jit(jax.grad(estimate_at), static_argnames="kind")
    for d in (-1000.0, -2.0, 0.0, 1e-4, 0.5, 30.0):
        assert estimate_at(d, "k3+") == estimate_at(d, "k3")
        assert slope(d, kind="k3+") == slope(d, kind="k2") == np.float32(d)  # also where k3 is flat


def test_clamped_holds_back_only_tokens_made_more_likely():
    slope = jax.jit(jax.grad(estimate_at), static_argnames="kind")
    for d, value, expected in ((2.0, 2.0, 1.0), (-2.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
        assert estimate_at(d, "clamped") == value and slope(d, kind="clamped") == expected


@pytest.mark.parametrize("kind", KL_KINDS)
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(kind, rng, poison):
    mask = np.array([[1, 1, 0, 0], [1, 0, 0, 0]])
    logprobs, ref = -rng.exponential(1.0, (2, 2, 4)).astype(np.float32)
    total = lambda a, b: jnp.sum(kl_estimate(a, b, mask, kind))  # noqa: E731
    gradients = jax.jit(jax.grad(total, (0, 1)))(
        jnp.asarray(poison(logprobs, mask)), jnp.asarray(poison(ref, mask))
    )
    for gradient in gradients:
        assert np.all(gradient[(mask == 1) & ((kind != "clamped") | (logprobs > ref))] != 0)
        assert np.any(gradient != 0)
        np.testing.assert_array_equal(gradient[mask == 0], 0)


# The bias of each estimator, by enumeration of all five tokens of a vocabulary.
THETA = jnp.array([0.3, -0.7, 1.1, 0.0, -0.2])
LOG_REF = jax.nn.log_softmax(jnp.array([-0.4, 0.2, 0.5, 0.9, -1.0]))


@functools.partial(jax.jit, static_argnames="kind")
def expected_estimate(theta, kind):
    log_p = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(log_p) * kl_estimate(log_p, LOG_REF, jnp.ones(5), kind))


def expected_gradient_as_loss(kind):
    p = jax.nn.softmax(THETA)  # the tokens are drawn, so the weights carry no gradient
    return jax.jit(
        jax.grad(
            lambda t: jnp.sum(p * kl_estimate(jax.nn.log_softmax(t), LOG_REF, jnp.ones(5), kind))
        )
    )(THETA)


def kl_to_ref(theta):
    log_p = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(log_p) * (log_p - LOG_REF))


def kl_from_ref(theta):
    return jnp.sum(jnp.exp(LOG_REF) * (LOG_REF - jax.nn.log_softmax(theta)))


def l1_distance(theta):
    return jnp.sum(jnp.abs(jax.nn.softmax(theta) - jnp.exp(LOG_REF)))


def test_bias_as_an_estimate_by_enumeration():
    truth = kl_to_ref(THETA)
    np.testing.assert_allclose(expected_estimate(THETA, "k1"), truth, rtol=1e-5)
    np.testing.assert_allclose(expected_estimate(THETA, "k3"), truth, rtol=1e-5)
    np.testing.assert_allclose(expected_estimate(THETA, "k3+"), truth, rtol=1e-5)
    assert expected_estimate(THETA, "abs") > 1.2 * truth
    assert expected_estimate(THETA, "clamped") > 1.2 * truth
    assert abs(expected_estimate(THETA, "k2") / truth - 1) > 0.02


def test_k2_is_right_to_second_order():
    near = jnp.asarray(LOG_REF) + 0.01 * THETA
    np.testing.assert_allclose(expected_estimate(near, "k2"), kl_to_ref(near), rtol=2e-2)


def test_bias_as_a_loss_by_enumeration():
    np.testing.assert_allclose(expected_gradient_as_loss("k1"), np.zeros(5), atol=1e-6)
    np.testing.assert_allclose(
        expected_gradient_as_loss("abs"), jax.grad(l1_distance)(THETA), atol=1e-6
    )
    np.testing.assert_allclose(
        expected_gradient_as_loss("k2"), jax.grad(kl_to_ref)(THETA), atol=1e-6
    )
    np.testing.assert_allclose(
        expected_gradient_as_loss("k3"), jax.grad(kl_from_ref)(THETA), atol=1e-6
    )
    np.testing.assert_allclose(
        expected_gradient_as_loss("k3+"), jax.grad(kl_to_ref)(THETA), atol=1e-6
    )
    np.testing.assert_allclose(
        expected_gradient_as_loss("clamped"), jax.grad(l1_distance)(THETA) / 2, atol=1e-6
    )
    assert np.abs(jax.grad(kl_from_ref)(THETA) - jax.grad(kl_to_ref)(THETA)).max() > 0.02


def test_k1_in_the_reward_pushes_as_k2_in_the_loss():
    log_p = jax.nn.log_softmax(THETA)
    cost = kl_estimate(
        log_p, LOG_REF, jnp.ones(5), "k1"
    )  # a constant in the score-function gradient
    policy_gradient = jax.grad(lambda t: jnp.sum(jnp.exp(log_p) * cost * jax.nn.log_softmax(t)))(
        THETA
    )
    np.testing.assert_allclose(policy_gradient, expected_gradient_as_loss("k2"), atol=1e-6)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'k4'.*k3"):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), jnp.ones(1), "k4")


def test_adaptive_coefficient_by_hand():
    # KL 6.6 for a target of 6: error 0.1; 256 of 10,000 samples:
    # 0.2 * (1 + 0.1 * 0.0256) = 0.200512.
    np.testing.assert_allclose(adaptive_kl_coef(0.2, 6.6, 6.0, 10_000, 256), 0.200512, rtol=1e-6)
    # 3 for 6 is an error of -0.5, clipped to -0.2: 0.2 * (1 - 0.00512) = 0.198976.
    # Ten times the target: +0.2.
    np.testing.assert_allclose(adaptive_kl_coef(0.2, 3.0, 6.0, 10_000, 256), 0.198976, rtol=1e-6)
    np.testing.assert_allclose(adaptive_kl_coef(0.2, 60.0, 6.0, 10_000, 256), 0.201024, rtol=1e-6)
    assert adaptive_kl_coef(jnp.float32(0.25), 6.0, 6.0, 10_000, 256) == 0.25
    # A clip of 0.5 leaves the error of 3 for 6 unclipped, and limits that of ten times the target
    # to 0.5: 0.2 * (1 -+ 0.0128).
    np.testing.assert_allclose(
        adaptive_kl_coef(0.2, 3.0, 6.0, 10_000, 256, clip=0.5), 0.19744, rtol=1e-6
    )
    np.testing.assert_allclose(
        adaptive_kl_coef(0.2, 60.0, 6.0, 10_000, 256, clip=0.5), 0.20256, rtol=1e-6
    )
