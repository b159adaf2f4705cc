"""Mean and variance of a stream of numbers, a batch at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.kernels.masked import masked_mean, masked_variance


class Moments(NamedTuple):
    """What is known of the numbers seen so far: float32 scalars, a pytree to keep in a state and a checkpoint."""

    count: jax.Array  # how many; float32 holds it to 7 digits
    mean: jax.Array
    m2: jax.Array  # the sum of squared deviations from the mean


def empty_moments() -> Moments:
    """Of nothing yet."""
    return Moments(*(jnp.zeros((), jnp.float32) for _ in range(3)))


def update_moments(moments: Moments, x: jax.Array, mask: jax.Array) -> Moments:
    """Those of everything so far and x where mask = 1, by the pairwise update of Chan, Golub and LeVeque 1979.

        delta = mean_x - mean        n = count + count_x
        mean' = mean + delta count_x / n
        m2'   = m2 + m2_x + delta^2 count count_x / n

    Up to rounding the result does not depend on how the numbers were cut into batches, and no sum of squares is formed that
    would lose its digits where the mean is large against the spread.

    Numbers that do not come out finite are left out as a whole: one broken batch must not break all that follow.

    Args:
      x: numbers of any shape; anything, NaN included, where mask = 0.
      mask: 1 on those that count, same shape.
    """
    count = jnp.sum(mask.astype(bool)).astype(jnp.float32)
    total = moments.count + count
    share = count / jnp.maximum(total, 1.0)
    delta = masked_mean(x, mask) - moments.mean
    moved = Moments(
        total,
        moments.mean + delta * share,
        moments.m2 + masked_variance(x, mask) * count + jnp.square(delta) * moments.count * share,
    )
    finite = jnp.isfinite(moved.mean) & jnp.isfinite(moved.m2)
    return Moments(*(jnp.where(finite, new, old) for new, old in zip(moved, moments, strict=True)))


def moments_std(moments: Moments, epsilon: float = 1e-8) -> jax.Array:
    """sqrt(m2 / count + epsilon), a float32 scalar to divide by; 1 where there is no spread.

    There is none in fewer than two numbers, nor in numbers that are equal up to rounding: divided by sqrt(epsilon) a batch of
    equal rewards would become rewards of 10,000. The variance is the biased one of `masked.masked_variance`: low by the
    factor (count - 1) / count.
    """
    variance = moments.m2 / jnp.maximum(moments.count, 1.0)
    spread = variance > 1e-12 * jnp.square(moments.mean)
    return jnp.where(spread, jnp.sqrt(variance + epsilon), 1.0)
