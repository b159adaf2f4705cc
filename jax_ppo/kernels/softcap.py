"""The soft cap of Gemma 2 (Gemma Team 2024, section 2), which bounds logits smoothly."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def softcap(x: Float[Array, " *shape"], cap: float | None) -> Float[Array, " *shape"]:
    """Return cap tanh(x / cap), in (-cap, cap), elementwise; x itself if `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def softcap_slope(y: Float[Array, " *shape"], cap: float | None) -> Float[Array, " *shape"] | float:
    """Return dy / dx at the x for which y = softcap(x, cap): 1 - (y / cap)^2, in [0, 1]."""
    return 1.0 if cap is None else 1 - (y / cap) ** 2
