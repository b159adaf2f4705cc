import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import masked_statistics as kernel

masked_sum = jax.jit(kernel.masked_sum, static_argnames="axis")
masked_mean = jax.jit(kernel.masked_mean, static_argnames="axis")
masked_variance = jax.jit(kernel.masked_variance)
masked_min, masked_max = jax.jit(kernel.masked_min), jax.jit(kernel.masked_max)
whiten = jax.jit(kernel.whiten, static_argnames="shift_mean")
explained_variance = jax.jit(kernel.explained_variance)
update_moments = jax.jit(kernel.update_moments)

X = jnp.array([[1.0, 2.0, 3.0], [6.0, 50.0, 60.0]])
MASK = jnp.array([[1, 1, 1], [1, 0, 0]])


def test_by_hand():
    # 1, 2, 3, 6 count: sum 12, mean 3, deviations -2 -1 0 3, squares 4 1 0 9,
    # biased variance 14 / 4 = 3.5.
    assert masked_sum(X, MASK) == 12
    assert masked_mean(X, MASK) == 3
    assert masked_min(X, MASK) == 1
    assert masked_max(X, MASK) == 6
    assert masked_variance(X, MASK) == 3.5
    # Rows: 1 2 3 has mean 2, the lone 6 has mean 6.
    np.testing.assert_array_equal(masked_sum(X, MASK, axis=1), [6, 6])
    np.testing.assert_array_equal(masked_mean(X, MASK, axis=1), [2, 6])
    # Columns: (1, 6) then 2 alone and 3 alone.
    np.testing.assert_array_equal(masked_mean(X, MASK, axis=0), [3.5, 2, 3])


def test_whiten_by_hand():
    # Mean 3 and variance 3.5 as above.
    expected = np.array([[-2, -1, 0], [3, 0, 0]]) / np.sqrt(3.5)
    np.testing.assert_allclose(whiten(X, MASK), expected, atol=1e-6)
    shifted = np.where(MASK, expected + 3, 0)
    np.testing.assert_allclose(whiten(X, MASK, shift_mean=False), shifted, atol=1e-6)


def test_explained_variance_by_hand():
    # Returns 0 2 4: variance 8/3. Residuals 0 1 -1 have variance 2/3, so 1 - 1/4.
    returns, mask = jnp.array([0.0, 2.0, 4.0]), jnp.ones(3)
    values = returns - jnp.array([0.0, 1, -1])
    np.testing.assert_allclose(explained_variance(values, returns, mask), 0.75, rtol=1e-6)
    assert explained_variance(returns - 7, returns, mask) == 1  # a constant offset is not variance
    assert explained_variance(jnp.full(3, 2.0), returns, mask) == 0
    # The residual of the opposite is twice the returns, of four times their variance: 1 - 4.
    np.testing.assert_allclose(explained_variance(-returns, returns, mask), -3, rtol=1e-6)


def test_returns_that_differ_by_rounding_alone_have_no_variance_to_explain():
    values = jnp.array([0.3, -0.7, 0.1, 5.0])
    returns = (jnp.float32(1.1) - values) + values
    assert float(returns.max() - returns.min()) > 0
    assert explained_variance(values, returns, jnp.ones(4)) == 0


def test_spread_that_rounding_explains_is_not_whitened():
    """The mean of 1,000 times 0.1 in float32 is not 0.1, and (1.1 - V) + V - 1.1 is not 0."""
    equal, mask = jnp.full(1000, 0.1), jnp.ones(1000)
    assert masked_mean(equal, mask) != equal[0]
    np.testing.assert_array_equal(whiten(equal, mask), 0)
    whitened = whiten(equal, mask, shift_mean=False)
    np.testing.assert_allclose(whitened, 0.1, rtol=1e-6)
    assert np.ptp(whitened) == 0
    values = jnp.array([0.3, -0.7, 0.1, 5.0])
    errors = (jnp.float32(1.1) - values) + values - 1.1
    assert np.abs(whiten(errors, jnp.ones(4))).max() > 1e-4
    np.testing.assert_array_equal(whiten(errors, jnp.ones(4), size=5.0), 0)


def test_a_spread_of_ten_times_the_rounding_is_whitened():
    x = 1 + jnp.array([0.0, 1e-5])
    np.testing.assert_allclose(whiten(x, jnp.ones(2)), [-0.05, 0.05], rtol=0.02)  # 5e-6 / 1e-4
    assert not np.isfinite(whiten(jnp.array([1.0, jnp.inf]), jnp.ones(2))).any()


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.float32, jnp.bfloat16])
def test_any_mask_dtype_and_float32_results(dtype):
    x = X.astype(jnp.bfloat16)
    for reduce in (masked_sum, masked_mean, masked_min, masked_max, masked_variance):
        result = reduce(x, MASK.astype(dtype))
        assert result.dtype == jnp.float32
        assert result == reduce(X, MASK)


def test_bfloat16_is_summed_in_float32():
    """Bfloat16 rounds this sum to 1000."""
    assert masked_sum(jnp.ones(1001, jnp.bfloat16), jnp.ones(1001)) == 1001


def indices(x):
    return jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape)


SCALARS = {
    "sum": masked_sum,
    "mean": masked_mean,
    "min": masked_min,
    "max": masked_max,
    "variance": masked_variance,
    "whiten": lambda x, mask: jnp.sum(whiten(x, mask) ** 3),
    "explained_variance of values": lambda x, mask: explained_variance(x, indices(x), mask),
    "explained_variance of returns": lambda x, mask: explained_variance(indices(x), x, mask),
}

WITH_GRADIENT = {name: jax.jit(jax.value_and_grad(scalar)) for name, scalar in SCALARS.items()}


@pytest.mark.parametrize("name", SCALARS)
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(name, rng, poison):
    mask = np.array([[1, 1, 1, 0], [1, 0, 1, 0]])
    x = rng.normal(0, 1, (2, 4)).astype(np.float32)
    value, gradient = WITH_GRADIENT[name](jnp.asarray(poison(x, mask)), mask)
    clean_value, clean_gradient = WITH_GRADIENT[name](jnp.asarray(x), mask)
    assert value == clean_value and value != 0
    np.testing.assert_array_equal(gradient, clean_gradient)
    assert np.isfinite(gradient).all() and np.any(gradient != 0) and not np.any(gradient[mask == 0])


@pytest.mark.parametrize("name", SCALARS)
def test_empty_mask_gives_zero_and_no_gradient(name):
    value, gradient = WITH_GRADIENT[name](jnp.full((2, 4), jnp.nan), np.zeros((2, 4), int))
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros((2, 4)))


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
def test_an_empty_row_gives_zero_beside_a_full_one(reduce):
    result = reduce(
        jnp.array([[1.0, 3.0], [jnp.nan, jnp.inf]]), jnp.array([[1, 1], [0, 0]]), axis=1
    )
    assert result[0] != 0 and result[1] == 0


@pytest.mark.parametrize("name", SCALARS)
def test_a_nan_that_counts_is_not_hidden(name):
    value, _ = WITH_GRADIENT[name](jnp.ones((2, 4)).at[1, 2].set(jnp.nan), np.ones((2, 4), int))
    assert np.isnan(value)


def test_whitening_one_token_gives_zero():
    """Bessel's correction divides by 0 here."""
    x, mask = jnp.array([[5.3, jnp.nan]]), jnp.array([[1, 0]])
    np.testing.assert_array_equal(whiten(x, mask), [[0, 0]])
    np.testing.assert_allclose(whiten(x, mask, shift_mean=False), [[5.3, 0]], rtol=1e-6)
    gradient = jax.grad(lambda x: whiten(x, mask).sum())(x)
    np.testing.assert_array_equal(gradient, [[0, 0]])


def test_variance_survives_a_large_mean():
    """E[x^2] - E[x]^2 is 0 or less here in float32."""
    np.testing.assert_allclose(
        masked_variance(jnp.array([9999.0, 10000, 10001]), jnp.ones(3)), 2 / 3, rtol=1e-5
    )


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(AssertionError, match=r"\(2, 3\).*\(3,\)"):
        masked_mean(X, jnp.ones(3))


def test_moments_by_hand():
    # (1, 3): mean 2, m2 2. Then 8: delta 6, mean 2 + 6/3 = 4,
    # m2 2 + 36 x 2/3 = 26 = 9 + 1 + 16. Variance 26/3.
    first = update_moments(kernel.empty_moments(), jnp.array([1.0, 3.0]), jnp.ones(2))
    np.testing.assert_allclose(first, (2, 2, 2), rtol=1e-6)
    second = update_moments(first, jnp.array([[8.0]]), jnp.ones((1, 1)))
    np.testing.assert_allclose(second, (3, 4, 26), rtol=1e-6)
    np.testing.assert_allclose(kernel.moments_std(second), np.sqrt(26 / 3), rtol=1e-6)
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
    empty = equal = kernel.empty_moments()
    one = update_moments(empty, jnp.array([5.0, 7.0]), jnp.array([1, 0]))
    for n in (3, 7, 11):
        equal = update_moments(equal, jnp.full(n, 0.1), jnp.ones(n))
    for moments in (empty, one, equal):
        assert kernel.moments_std(moments) == 1
    spread = kernel.moments_std(update_moments(equal, jnp.array([0.2]), jnp.ones(1)))
    np.testing.assert_allclose(spread, np.std([0.1] * 21 + [0.2]), rtol=1e-4)


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
