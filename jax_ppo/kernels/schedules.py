"""Coefficients of penalties and bonuses that change with the training step."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

Points = tuple[tuple[int, float], ...]


def piecewise(
    points: Points, step: int | Shaped[Array, " *shape"], linear: bool
) -> Float[Array, " *shape"]:
    """Return the value at `step` of a curve through `points`.

    Before the first point and after the last, the value of that point applies.

    Args:
      points: (step, value) pairs, at least one, with increasing steps.
      step: integers below 2^24, which float32 represents exactly; may be traced.
      linear: join the points by straight lines. Otherwise each value applies from its own step
        until the step of the next point.

    Returns:
      float32 in the shape of `step`.
    """
    assert points and all(a[0] < b[0] for a, b in zip(points, points[1:], strict=False)), points
    steps, values = (jnp.array(column, jnp.float32) for column in zip(*points, strict=True))
    step = jnp.asarray(step, jnp.float32)
    if linear:
        return jnp.interp(step, steps, values)
    # "right": a point applies from its own step on, the first one also before it.
    return values[jnp.maximum(jnp.searchsorted(steps, step, side="right") - 1, 0)]
