"""Reductions over the elements that a mask selects, and moments of a stream of such elements.

In every function `mask` has the shape of `x`, any dtype, and mask = 1 means "this element counts".
The selected elements may form any pattern: a mask is never read as a length. Elements under
mask = 0 may hold anything, NaN and inf included: they are replaced BEFORE any arithmetic, because
a `jnp.where` after it lets 0 * NaN into the gradient. Results are float32 (float64 for float64
inputs). An empty mask gives 0, never NaN. A NaN that counts propagates.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

Axis = int | tuple[int, ...] | None

# Equal float32 numbers differ by at most this part of the largest number they were computed from.
ROUNDING = 8 * float(jnp.finfo(jnp.float32).eps)
EPSILON = 1e-8  # added to variances that become divisors


def assert_one_shape(**arrays: Shaped[Array, "..."]) -> None:
    """Assert that arrays, the arguments of a function by name, have the same shape."""
    shapes = {name: x.shape for name, x in arrays.items()}
    assert len(set(shapes.values())) == 1, f"expected arrays of one shape, got {shapes}"


def zero_outside(
    x: Shaped[Array, " *shape"], mask: Shaped[Array, " *shape"]
) -> Float[Array, " *shape"]:
    """Return x where mask = 1, else 0, in float32 at least; masked elements get no gradient."""
    assert_one_shape(x=x, mask=mask)
    return jnp.where(mask.astype(bool), _at_least_float32(x), 0.0)


def difference_beyond_rounding(
    x: Float[Array, " *shape"], y: Float[Array, " *shape"]
) -> Float[Array, " *shape"]:
    """Return x - y of log-probs, and exactly 0 where rounding explains the difference.

    Two programs that compute the same log-prob in float32 differ by up to 1e-4 nats. Adam's steps
    do not depend on the size of gradients: a loss of rounding alone would move every parameter.
    """
    difference = x - y
    is_rounding = jnp.abs(difference) <= 1000 * jnp.finfo(x.dtype).eps
    return difference - jax.lax.stop_gradient(jnp.where(is_rounding, difference, 0.0))


def starts_of_turns(mask_T: Shaped[Array, " *shape"]) -> Bool[Array, " *shape"]:
    """Return where, along the last axis, a run of chosen tokens begins: the start of each turn.

    Two turns with nothing between them are one run.
    """
    mask_T = mask_T.astype(bool)
    before_T = jnp.pad(mask_T, [*[(0, 0)] * (mask_T.ndim - 1), (1, 0)])[..., :-1]
    return mask_T & ~before_T


def masked_sum(
    x: Shaped[Array, " *shape"], mask: Shaped[Array, " *shape"], axis: Axis = None
) -> Float[Array, " *reduced"]:
    """Return sum_i m_i x_i over `axis` (all axes by default)."""
    return jnp.sum(zero_outside(x, mask), axis=axis)


def masked_mean(
    x: Shaped[Array, " *shape"], mask: Shaped[Array, " *shape"], axis: Axis = None
) -> Float[Array, " *reduced"]:
    """Return sum_i m_i x_i / sum_i m_i over `axis`; 0 where nothing counts."""
    count = jnp.sum(mask.astype(bool), axis=axis)
    return masked_sum(x, mask, axis) / jnp.maximum(count, 1)


def masked_min(x: Shaped[Array, " *shape"], mask: Shaped[Array, " *shape"]) -> Float[Array, ""]:
    """Return the smallest element that counts; 0 if none does."""
    return 0.0 - masked_max(-_at_least_float32(x), mask)  # a minus sign would make 0 to -0


def masked_max(x: Shaped[Array, " *shape"], mask: Shaped[Array, " *shape"]) -> Float[Array, ""]:
    """Return the largest element that counts; 0 if none does."""
    assert_one_shape(x=x, mask=mask)
    selected = mask.astype(bool)
    # `initial` also serves arrays without any element.
    largest = jnp.max(jnp.where(selected, _at_least_float32(x), -jnp.inf), initial=-jnp.inf)
    return jnp.where(jnp.any(selected), largest, 0.0)


def masked_variance(
    x: Shaped[Array, " *shape"], mask: Shaped[Array, " *shape"]
) -> Float[Array, ""]:
    """Return E[(x - E[x])^2], the biased variance: 0 for a single element.

    Two passes, because E[x^2] - E[x]^2 loses every digit in float32 once the mean is large
    relative to the spread.
    """
    # Deviations where mask is 0 are not 0, but the second mean does not read them.
    deviation = zero_outside(x, mask) - masked_mean(x, mask)
    return masked_mean(jnp.square(deviation), mask)


def is_constant(
    x: Shaped[Array, " *shape"],
    mask: Shaped[Array, " *shape"],
    size: float | Float[Array, ""] = 0.0,
) -> Bool[Array, ""]:
    """Return whether rounding explains every difference between the elements that count.

    `size` is the largest magnitude that x was computed from, if x is smaller. Extremes are
    compared, because the mean of equal numbers is itself rounded.
    """
    size = jnp.maximum(masked_max(jnp.abs(x), mask), size)
    spread = masked_max(x, mask) - masked_min(x, mask)
    return jnp.isfinite(size) & (spread <= ROUNDING * size)


def whiten(
    x: Shaped[Array, " *shape"],
    mask: Shaped[Array, " *shape"],
    shift_mean: bool = True,
    size: float | Float[Array, ""] = 0.0,
) -> Float[Array, " *shape"]:
    """Return (x - E[x]) / sqrt(Var[x] + EPSILON), plus E[x] if not `shift_mean`; 0 where mask = 0.

    Where x `is_constant`, x - E[x] is 0: divided by sqrt(EPSILON), rounding would grow by 10,000.
    Mean and biased variance are over all elements that count: call it on the whole rollout, since
    moments of a part would make the result depend on how the batch was divided.
    """
    mean = masked_mean(x, mask)
    whitened = (zero_outside(x, mask) - mean) * jax.lax.rsqrt(masked_variance(x, mask) + EPSILON)
    whitened = jnp.where(is_constant(x, mask, size), 0.0, whitened)
    if not shift_mean:
        whitened += mean
    return zero_outside(whitened, mask)


def explained_variance(
    values: Shaped[Array, " *shape"],
    returns: Shaped[Array, " *shape"],
    mask: Shaped[Array, " *shape"],
) -> Float[Array, ""]:
    """Return 1 - Var[returns - values] / Var[returns], a scalar in (-inf, 1].

    1: the critic predicts every return up to a constant; 0: it is no better than the mean of the
    returns; below 0: it is worse. Where all returns are equal, the result is defined as 0.
    """
    assert_one_shape(values=values, returns=returns)
    # What the critic leaves unexplained; a constant error does not count.
    residual = zero_outside(returns, mask) - zero_outside(values, mask)
    # Returns that differ only by rounding have a variance of 1e-17, which as a divisor would give
    # -1e17. They are sums of advantages and values.
    constant = is_constant(returns, mask, masked_max(jnp.abs(values), mask))
    variance = jnp.where(constant, 1.0, masked_variance(returns, mask))
    return jnp.where(constant, 0.0, 1.0 - masked_variance(residual, mask) / variance)


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

    The pairwise update of Chan, Golub and LeVeque 1979: up to rounding, the result does not depend
    on how the numbers were divided into batches. A batch whose result is not finite is ignored as a
    whole, so that it cannot spoil all later moments. An x that `is_constant` adds no variance.
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
    finite = jnp.isfinite(updated.mean) & jnp.isfinite(updated.m2)
    pairs = zip(updated, moments, strict=True)
    return Moments(*(jnp.where(finite, new, old) for new, old in pairs))


def moments_std(moments: Moments) -> Float[Array, ""]:
    """Return sqrt(m2 / count + EPSILON), a float32 scalar to divide by, or 1 without spread.

    It is 1 for fewer than two numbers and for numbers that are equal up to rounding: divided by
    sqrt(EPSILON), equal rewards would grow by a factor of 10,000. The variance is the biased one.
    """
    variance = moments.m2 / jnp.maximum(moments.count, 1.0)
    spread = ~_is_rounding(jnp.sqrt(variance), moments, 0.0)
    return jnp.where(spread, jnp.sqrt(variance + EPSILON), 1.0)


def normalize_by_moments(
    x: Shaped[Array, " *shape"], moments: Moments, size: float | Float[Array, ""] = 0.0
) -> Float[Array, " *shape"]:
    """Return (x - mean) / std; exactly 0 for the only number seen. See `is_constant` for `size`."""
    deviations, std = x - moments.mean, moments_std(moments)
    return jnp.where((std == 1.0) & _is_rounding(deviations, moments, size), 0.0, deviations / std)


def _is_rounding(deviation: jax.Array, moments: Moments, size: float | jax.Array) -> jax.Array:
    return jnp.abs(deviation) <= ROUNDING * jnp.maximum(jnp.abs(moments.mean), size)


def _at_least_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
