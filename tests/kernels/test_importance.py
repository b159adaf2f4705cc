"""Importance weights by hand and as expectations over all responses of a small policy.

The mismatch metrics are checked by hand and against NumPy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import importance
from kernels_by_name import LEVELS


def test_by_hand():
    logprobs, sampled = np.log([[0.5, 0.2, 0.9]]), np.log([[0.25, 0.4, 0.1]])
    for level, upper, bounds, expected in (
        ("token", 2.0, {}, [2, 0.5, 2]),  # the last is 9, cut off
        ("sequence", 10.0, {}, [9, 9, 9]),  # 2 x 0.5 x 9
        ("geometric", 10.0, {}, [9 ** (1 / 3)] * 3),
        ("token", 4.0, {"lower": 0.6, "masks": False}, [2, 0.6, 4]),
        ("token", 4.0, {"lower": 0.6, "masks": True}, [2, 0, 0]),
        ("token", 4.0, {"lower": 0.0, "masks": True}, [2, 0.5, 0]),
        ("token", 4.0, {"lower": 0.4, "masks": True}, [2, 0.5, 0]),
    ):
        weights = importance.importance_weights(
            jnp.float32(logprobs), jnp.float32(sampled), jnp.ones((1, 3), bool), LEVELS[level],
            upper, **bounds,
        )  # fmt: skip
        np.testing.assert_allclose(weights, [expected], rtol=1e-5)


def test_turns_by_hand():
    """Two turns of ratios 2, 3 and 5, with a tool's output before, between and after them."""
    mask = jnp.array([[0, 1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 1, 1]])
    ratios = jnp.array([[np.nan, 2, 3, 7, np.inf, 5, 9], [2, 9, 3, 9, 5, 7, 1]])
    weights = importance.importance_weights(
        jnp.log(ratios), jnp.zeros(mask.shape), mask, LEVELS["turn"], 99.0
    )
    expected = [[0, 6, 6, 0, 0, 5, 0], [2, 0, 3, 0, 35, 35, 35]]
    np.testing.assert_allclose(weights, expected, rtol=1e-5)

    # An observation without tokens: the mask does not tell the last two turns apart.
    starts = jnp.array([[0, 1, 0, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0, 1]])
    weights = importance.importance_weights(
        jnp.log(ratios),
        jnp.zeros(mask.shape),
        mask,
        functools.partial(LEVELS["turn"], starts=starts),
        99.0,
    )
    expected = [[0, 6, 6, 0, 0, 5, 0], [2, 0, 3, 0, 35, 35, 1]]
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_effective_sample_size_by_hand():
    """Weights 1, 1, 1, 3 and a masked NaN: (6 / 4)^2 / (12 / 4) = 3 / 4."""
    size = importance.effective_sample_size
    assert float(size(jnp.array([1, 1, 1, 3, np.nan]), jnp.array([1, 1, 1, 1, 0]))) == 0.75
    assert float(size(jnp.full(5, 2.0), jnp.ones(5))) == 1
    assert float(size(jnp.array([4.0, 0, 0, 0]), jnp.ones(4))) == 0.25
    assert float(size(jnp.zeros(3), jnp.ones(3))) == 0


def test_no_gradient_and_no_overflow():
    def weigh(x):
        return importance.importance_weights(
            x, -1e4 * jnp.ones(2), jnp.ones(2), LEVELS["token"], 2.0
        )

    np.testing.assert_array_equal(jax.grad(lambda x: weigh(x).sum())(jnp.zeros(2)), 0.0)
    np.testing.assert_array_equal(weigh(jnp.zeros(2)), 2.0)


mismatch = jax.jit(importance.mismatch)


def test_mismatch_by_hand():
    # p = (1/2, 1/4, 1), q = (1/4, 1/2, 1): |p - q| = 1/4, 1/4, 0; exp |d| = 2, 2, 1;
    # max |d| = ln 2.
    # Means 7/12: p - mean = (-1, -4, 5) / 12, q - mean = (-4, -1, 5) / 12:
    # correlation (4 + 4 + 25) / (1 + 16 + 25) = 33 / 42.
    got = mismatch(
        jnp.log(jnp.array([0.5, 0.25, 1])), jnp.log(jnp.array([0.25, 0.5, 1])), jnp.ones(3)
    )
    expected = {
        "logprob_difference": 2 / 3 * np.log(2),
        "prob_difference_mean": 1 / 6,
        "prob_difference_max": 1 / 4,
        "exp_abs_log_ratio_mean": 5 / 3,
        "log_ratio_max": np.log(2),
        "prob_correlation": 33 / 42,
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)
        assert got[name].dtype == jnp.float32 and got[name].shape == ()


@pytest.mark.parametrize(
    ("logprobs", "sampled", "mask", "correlation"),
    [
        ([-0.3, -0.3, -0.3], [-0.3, -0.3, -0.3], [1, 1, 1], 1),  # constant and equal
        # Constant and not; by rounding seven of these have a variance of 1e-15.
        ([-0.3] * 7, [-0.7] * 7, [1] * 7, 0),
        ([-0.3, -0.3, -0.3], [-0.3, -0.4, -0.3], [1, 1, 1], 0),  # one of them constant
        # Variances that float32 has no numbers for.
        ([-60.0, -80.0, -70.0], [-80.0, -60.0, -70.0], [1, 1, 1], 0),
        ([-0.1, -5.0, -2.0], [-0.1, -5.0, -2.0], [1, 1, 1], 1),
        ([-0.1, -5.0, -2.0], [-0.1, -5.0, -2.0], [0, 1, 0], 1),
        ([-0.1, -5.0, -2.0], [-9.0, -5.0, -2.0], [0, 0, 0], 1),
        ([-1e4, 0.0], [0.0, -1e4], [1, 1], -1),
    ],
)
def test_mismatch_is_finite_where_a_correlation_is_not_defined(
    logprobs, sampled, mask, correlation
):
    got = mismatch(jnp.array(logprobs), jnp.array(sampled), jnp.array(mask))
    assert all(np.isfinite(x) for x in got.values())
    assert -1 <= got["prob_correlation"] <= 1
    np.testing.assert_allclose(got["prob_correlation"], correlation, atol=1e-6)
