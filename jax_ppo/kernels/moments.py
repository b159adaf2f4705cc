"""Mean and variance of a stream of numbers, updated batch by batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jax_ppo.kernels.masked_statistics import (
    ROUNDING,
    is_constant,
    masked_max,
    masked_mean,
    masked_variance,
)


class Moments(NamedTuple):
    """Moments of the numbers seen so far: float32 scalars, a pytree for states and checkpoints."""

    # How many numbers; float32 represents it to 7 digits.
    count: Float[Array, ""]  # type: ignore[assignment]  # shadows tuple.count
    mean: Float[Array, ""]
    m2: Float[Array, ""]  # the sum of squared deviations from the mean


def empty_moments() -> Moments:
    """Return the moments of no numbers."""
    return Moments(*(jnp.zeros((), jnp.float32) for _ in range(3)))


def update_moments(
    moments: Moments,
    x: Shaped[Array, " *shape"],
    mask: Shaped[Array, " *shape"],
    size: float | Float[Array, ""] = 0.0,
) -> Moments:
    """Return `moments` with the elements of x where mask = 1 included.

        delta = mean_x - mean        n = count + count_x
        mean' = mean + delta count_x / n
        m2'   = m2 + m2_x + delta^2 count count_x / n

    This is the pairwise update of Chan, Golub and LeVeque 1979. Up to rounding, the result does
    not depend on how the numbers were divided into batches. No sum of squares is formed, which
    would lose its digits where the mean is large relative to the spread.

    A batch whose result is not finite is ignored as a whole, so that it cannot spoil all later
    moments.

    Where mask = 0, x may hold anything, NaN included. An x that `is_constant` adds no variance.
    """
    count = jnp.sum(mask.astype(bool)).astype(jnp.float32)
    total = moments.count + count
    share = count / jnp.maximum(total, 1.0)
    constant = is_constant(x, mask, size)
    delta = jnp.where(constant, masked_max(x, mask), masked_mean(x, mask)) - moments.mean
    delta = jnp.where(constant & _is_rounding(delta, moments, size), 0.0, delta)
    # What the distance between the two means adds to the squared deviations.
    between = jnp.square(delta) * moments.count * share
    updated = Moments(
        count=total,
        mean=moments.mean + delta * share,
        m2=moments.m2 + jnp.where(constant, 0.0, masked_variance(x, mask)) * count + between,
    )
    # All three numbers are updated or none is.
    finite = jnp.isfinite(updated.mean) & jnp.isfinite(updated.m2)
    pairs = zip(updated, moments, strict=True)
    return Moments(*(jnp.where(finite, new, old) for new, old in pairs))


def moments_std(moments: Moments, epsilon: float = 1e-8) -> Float[Array, ""]:
    """Return sqrt(m2 / count + epsilon), a float32 scalar to divide by, or 1 without spread.

    The result is 1 for fewer than two numbers and for numbers that are equal up to rounding:
    divided by sqrt(epsilon), equal rewards would grow by a factor of 10,000. The variance is the
    biased one of `masked.masked_variance`: low by the factor (count - 1) / count.
    """
    variance = moments.m2 / jnp.maximum(moments.count, 1.0)
    spread = ~_is_rounding(jnp.sqrt(variance), moments, 0.0)
    return jnp.where(spread, jnp.sqrt(variance + epsilon), 1.0)


def normalize_by_moments(
    x: Shaped[Array, " *shape"], moments: Moments, size: float | Float[Array, ""] = 0.0
) -> Float[Array, " *shape"]:
    """Return (x - mean) / std; exactly 0 for the only number seen. See `is_constant` for `size`."""
    deviations, std = x - moments.mean, moments_std(moments)
    return jnp.where((std == 1.0) & _is_rounding(deviations, moments, size), 0.0, deviations / std)


def _is_rounding(deviation: jax.Array, moments: Moments, size: float | jax.Array) -> jax.Array:
    return jnp.abs(deviation) <= ROUNDING * jnp.maximum(jnp.abs(moments.mean), size)
