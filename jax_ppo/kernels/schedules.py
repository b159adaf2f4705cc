"""Numbers that change with the step: coefficients of penalties and bonuses."""

import jax
import jax.numpy as jnp

Points = tuple[tuple[int, float], ...]


def piecewise(points: Points, step: int | jax.Array, linear: bool) -> jax.Array:
    """The value at `step` of a curve through `points`, float32 in the shape of `step`.

    linear: straight lines join the points. Otherwise each value holds from its step until the next point's. Before the first
    point and after the last their values hold.

    Args:
      points: (step, value) pairs, at least one, steps increasing.
      step: integers below 2^24, which float32 holds exactly; may be traced.
    """
    assert points and all(a[0] < b[0] for a, b in zip(points, points[1:], strict=False)), points
    steps, values = (jnp.array(column, jnp.float32) for column in zip(*points, strict=True))
    step = jnp.asarray(step, jnp.float32)
    if linear:
        return jnp.interp(step, steps, values)
    return values[jnp.maximum(jnp.searchsorted(steps, step, side="right") - 1, 0)]
