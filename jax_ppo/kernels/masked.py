"""Reductions over the places where mask is 1.

In every function here `mask` has the shape of `x`, any dtype, and mask = 1 means "this element counts". Elements under
mask = 0 may hold anything, NaN and inf included: they are replaced BEFORE any arithmetic, because a `jnp.where` after
it lets 0 * NaN into the gradient. Results are float32 (float64 of float64); an empty mask gives 0, never NaN. A NaN that
counts shows.
"""

import jax
import jax.numpy as jnp


def zero_outside(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x where mask = 1, 0 elsewhere, in float32 at least. Neither value nor gradient of a masked element gets through."""
    assert x.shape == mask.shape, f"x {x.shape} and mask {mask.shape} must have one shape"
    return jnp.where(mask.astype(bool), _at_least_float32(x), 0.0)


def masked_sum(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
    """sum_i m_i x_i over `axis` (all axes by default)."""
    return jnp.sum(zero_outside(x, mask), axis=axis)


def masked_mean(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
    """sum_i m_i x_i / sum_i m_i over `axis`; 0 where nothing counts."""
    return _mean(x, mask, axis, keepdims=False)


def masked_min(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The least element that counts, a scalar; 0 where none does."""
    return _extremum(x, mask, jnp.min, jnp.inf)


def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The greatest element that counts, a scalar; 0 where none does."""
    return _extremum(x, mask, jnp.max, -jnp.inf)


def masked_variance(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
    """Var[x] = E[(x - E[x])^2] over `axis`, divided by n and not by n - 1: biased low by the factor (n - 1) / n.

    Bessel's correction would divide by 0 for a single element; here that variance is 0. Two passes, because
    E[x^2] - E[x]^2 loses every digit in float32 once the mean is large against the spread.
    """
    deviation = zero_outside(x, mask) - _mean(x, mask, axis, keepdims=True)
    return masked_mean(jnp.square(deviation), mask, axis)


def whiten(
    x: jax.Array, mask: jax.Array, shift_mean: bool = True, epsilon: float = 1e-8
) -> jax.Array:
    """(x - E[x]) / sqrt(Var[x] + epsilon), and + E[x] if not shift_mean; E and Var over all that counts, all axes.

    Shape of x; 0 where mask = 0. The variance is the biased one, so a lone element gives 0 (with shift_mean), not NaN.
    Call it on the whole rollout batch: moments of a part of it would make the result depend on how the batch was cut.
    """
    mean = masked_mean(x, mask)
    whitened = (zero_outside(x, mask) - mean) * jax.lax.rsqrt(masked_variance(x, mask) + epsilon)
    return zero_outside(whitened if shift_mean else whitened + mean, mask)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 - Var[returns - values] / Var[returns], a scalar in (-inf, 1].

    1: the critic predicts every return, up to a constant. 0: no better than predicting the mean. Below 0: worse.
    Where all returns are equal, so that Var[returns] is 0 and there is nothing to explain, the result is defined as 0.
    """
    assert values.shape == returns.shape, (
        f"values {values.shape} and returns {returns.shape} must have one shape"
    )
    residual = zero_outside(returns, mask) - zero_outside(values, mask)
    # Rounding can leave equal returns a variance of 1e-17 instead of 0, which as a divisor would give -1e17.
    constant = masked_min(returns, mask) == masked_max(returns, mask)
    variance = jnp.where(constant, 1.0, masked_variance(returns, mask))
    return jnp.where(constant, 0.0, 1.0 - masked_variance(residual, mask) / variance)


def _mean(x, mask, axis, keepdims):
    total = jnp.sum(zero_outside(x, mask), axis=axis, keepdims=keepdims)
    count = jnp.sum(mask.astype(bool), axis=axis, keepdims=keepdims)
    return total / jnp.maximum(count, 1)


def _extremum(x, mask, reduce, identity):
    assert x.shape == mask.shape, f"x {x.shape} and mask {mask.shape} must have one shape"
    kept = mask.astype(bool)
    extremum = reduce(jnp.where(kept, _at_least_float32(x), identity), initial=identity)
    return jnp.where(jnp.any(kept), extremum, 0.0)


def _at_least_float32(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
