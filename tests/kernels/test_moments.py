import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import moments as kernel

update_moments = jax.jit(kernel.update_moments)


def test_by_hand():
    # (1, 3): mean 2, m2 2. Then 8: delta 6, mean 2 + 6/3 = 4,
    # m2 2 + 36 x 2/3 = 26 = 9 + 1 + 16. Variance 26/3.
    first = update_moments(kernel.empty_moments(), jnp.array([1.0, 3.0]), jnp.ones(2))
    np.testing.assert_allclose(first, (2, 2, 2), rtol=1e-6)
    second = update_moments(first, jnp.array([[8.0]]), jnp.ones((1, 1)))
    np.testing.assert_allclose(second, (3, 4, 26), rtol=1e-6)
    np.testing.assert_allclose(kernel.moments_std(second, 0.0), np.sqrt(26 / 3), rtol=1e-6)
    np.testing.assert_allclose(kernel.moments_std(second, 1 / 3), 3, rtol=1e-6)
    assert all(
        x.dtype == jnp.float32 and x.shape == () for x in (*second, kernel.moments_std(second))
    )


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_batches_of_any_cut_give_the_moments_of_the_whole(mean, rng, poison):
    """With mean 1000 and spread 1, E[x^2] - E[x]^2 in float32 is off by more than 0.1."""
    x, mask = rng.normal(mean, 1, 600).astype(np.float32), rng.integers(0, 2, 600)
    mask[100:200] = 0  # a whole batch of which nothing counts
    dirty, kept = poison(x, mask), x[mask == 1].astype(np.float64)
    for cuts in ([], [100, 200, 201, 450]):
        moments = kernel.empty_moments()
        for part, counts in zip(np.split(dirty, cuts), np.split(mask, cuts), strict=True):
            moments = update_moments(moments, part, counts)
        assert moments.count == len(kept)
        np.testing.assert_allclose(moments.mean, kept.mean(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(kernel.moments_std(moments), kept.std(), rtol=1e-4)


def test_no_spread_divides_by_1():
    """Equal rewards divided by sqrt(epsilon) would become rewards of about 10,000."""
    assert kernel.moments_std(kernel.empty_moments()) == 1
    assert (
        kernel.moments_std(
            update_moments(kernel.empty_moments(), jnp.array([5.0, 7.0]), jnp.array([1, 0]))
        )
        == 1
    )
    equal = kernel.empty_moments()
    for n in (3, 7, 11):
        equal = update_moments(equal, jnp.full(n, 0.1), jnp.ones(n))
    assert kernel.moments_std(equal) == 1
    np.testing.assert_allclose(
        kernel.moments_std(update_moments(equal, jnp.array([0.2]), jnp.ones(1))),
        np.std([0.1] * 21 + [0.2]),
        rtol=1e-4,
    )


def test_numbers_that_differ_by_rounding_are_normalized_to_zero():
    moments = kernel.empty_moments()
    for n in (3, 1000, 7):
        moments = update_moments(moments, jnp.full(n, 0.1), jnp.ones(n))
    assert moments.mean == jnp.float32(0.1) and moments.m2 == 0
    normalize = jax.jit(kernel.normalize_by_moments)
    x = jnp.array([0.1, np.nextafter(np.float32(0.1), 1), 0.6])
    np.testing.assert_allclose(normalize(x, moments), [0, 0, 0.5], rtol=1e-6)
    assert not np.any(normalize(x, moments)[:2])


def test_returns_of_zero_have_the_rounding_of_the_values_they_are_computed_from(rng):
    values = rng.normal(0, 2, 50).astype(np.float32)
    moments = kernel.empty_moments()
    for reward in np.array([1.1, 1.3], np.float32):
        returns = ((reward - values) + values) - reward
        assert np.ptp(returns) > 0
        moments = update_moments(moments, returns, jnp.ones(50), np.abs(values).max())
        normalized = kernel.normalize_by_moments(returns, moments, np.abs(values).max())
        np.testing.assert_array_equal(normalized, 0)
    assert (moments.count, moments.mean, moments.m2) == (100, 0, 0)


@pytest.mark.parametrize("broken", [[1.0, np.inf], [1.0, np.nan], [1e30, -1e30], [3e38, 3e38]])
def test_a_batch_whose_moments_overflow_is_ignored(broken):
    """The mean of 1e30 and -1e30 is 0, but their squares overflow."""
    before = update_moments(kernel.empty_moments(), jnp.array([1.0, 3.0]), jnp.ones(2))
    after = update_moments(before, jnp.array(broken), jnp.ones(2))
    np.testing.assert_array_equal(after, before)
