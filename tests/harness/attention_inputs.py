"""Packed rows for attention, and its options."""

import jax.numpy as jnp
import numpy as np

OPTIONS = [
    {"sliding_window": 1},
    {"sliding_window": 7},
    {"softcap": 1.5, "scale": 0.6},
    {"sliding_window": 70, "softcap": 2.0, "scale": 0.3},
]


def make_inputs(rows=2, length=128, heads=4, kv_heads=2, head_dim=16, dtype=jnp.float32):
    """Return inputs with three segments per row; the last one, -1, is empty."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(rows, length, n, head_dim)), dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    segments = np.repeat([7, 2, -1], (length // 2, length // 4, length // 4))[None].repeat(rows, 0)
    return q, k, v, jnp.asarray(segments, jnp.int32)
