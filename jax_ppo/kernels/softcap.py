"""The soft cap of Gemma 2 (Gemma Team 2024, section 2): values that no factor can drive beyond a bound."""

import jax
import jax.numpy as jnp


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """y = cap tanh(x / cap), in (-cap, cap); x itself without a cap (None). Elementwise."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def softcap_slope(y: jax.Array, cap: float | None) -> jax.Array | float:
    """dy / dx at the x where y = softcap(x, cap): 1 - (y / cap)^2, in [0, 1]."""
    return 1.0 if cap is None else 1 - (y / cap) ** 2
