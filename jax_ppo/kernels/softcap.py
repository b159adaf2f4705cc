"""The soft cap of Gemma 2 (Gemma Team 2024, section 2), which bounds logits smoothly."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def softcap(x: Float[Array, " *shape"], cap: float | None) -> Float[Array, " *shape"]:
    """Return cap tanh(x / cap), in (-cap, cap), elementwise; x itself if `cap` is None."""
    if cap is None:
        return x
    return cap * jnp.tanh(x / cap)


def softcap_slope(y: Float[Array, " *shape"], cap: float | None) -> Float[Array, " *shape"] | float:
    """Return dy / dx at the x for which y = softcap(x, cap): 1 - (y / cap)^2, in [0, 1]."""
    if cap is None:
        return 1.0
    return 1 - (y / cap) ** 2
