"""Attention where the devices of `mesh.context` hold parts of the same packed rows.

Each device computes the attention of its own queries to the keys of the whole row, which it
gathers: with grouped queries they are small beside the activations, 64 MiB per layer for 32,768
tokens with 4 key heads of 128 in bfloat16. Its queries are two blocks that are mirror images in the
row (`packing.split_columns`), so that the devices have as many earlier keys each.

The programs are attention.py's. Only splash skips what its own device's queries do not read: xla
and cuDNN skip the second half of the row for the first block of queries (cuDNN if it is even).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_ppo.models.attention import (
    Keys,
    Queries,
    Segments,
    attend_block_of_queries,
    cudnn_products,
    forget_mask,
    make_splash_kernel,
    run_splash_kernel,
    visible_keys,
)
from jax_ppo.runtime.parallelism.context import attend_over_parts, num_row_parts


def run_attention_over_parts(
    program: str, q: Queries, k: Keys, v: Keys, segments: Segments, **options: Any
) -> Queries:
    """Run a program for the parts of packed rows; arguments as for `attention.run_attention`."""
    assert segments is not None, "packed rows have segments"
    if program == "splash":
        length = q.shape[1] * num_row_parts()
        kernel = make_splash_kernel(q.shape[2], length, num_row_parts(), **options)
        run_part = functools.partial(_splash_part, scale=options.get("scale"))
        attend = attend_over_parts(run_part, kernel)
    else:
        programs: dict[str, Callable[..., jax.Array]]
        programs = {"xla": _xla_products, "cudnn": cudnn_products}
        attend = attend_over_parts(functools.partial(_masked_part, programs[program], **options))
    out: jax.Array = attend(q, k, v, segments)
    return out


def _masked_part(
    products: Callable[..., jax.Array],
    q_BxQxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Int[Array, "B T"],
    own_segments_BxQ: Int[Array, "B Q"],
    columns_Q: Int[Array, " Q"],
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> Queries:
    """Compute the attention of a device's queries with a program that takes a mask.

    The queries of the first block are in the first half of the row, and read none of the second
    half. Which earlier blocks a device could skip differs from device to device, but the program
    does not.
    """
    T = k_BxTxKxd.shape[1]
    block = q_BxQxHxd.shape[1] // 2

    def attend_block(queries: slice, keys: slice) -> jax.Array:
        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, own_segments: jax.Array, segments: jax.Array
        ) -> jax.Array:
            visible = visible_keys(columns_Q[queries], keys, own_segments, segments, sliding_window)
            return products(q, k, v, visible, **options)

        if products is cudnn_products:
            attend = forget_mask(attend)
        return attend(
            q_BxQxHxd[:, queries],
            k_BxTxKxd[:, keys],
            v_BxTxKxd[:, keys],
            own_segments_BxQ[:, queries],
            segments_BxT[:, keys],
        )

    if products is cudnn_products and block % 2:
        return attend_block(slice(None), slice(T))  # cuDNN takes even numbers of queries
    blocks = [
        attend_block(slice(block), slice(T // 2)),
        attend_block(slice(block, None), slice(T)),
    ]
    return jnp.concatenate(blocks, axis=1)


def _xla_products(
    q_BxQxHxd: Queries,
    k_BxSxKxd: Keys,
    v_BxSxKxd: Keys,
    visible: Bool[Array, "B_or_1 Q S"],
    **options: Any,
) -> Queries:
    """Compute attention with matrix products alone to the keys that are visible."""
    k_BxKxSxd, v_BxKxSxd = k_BxSxKxd.swapaxes(1, 2), v_BxSxKxd.swapaxes(1, 2)
    return attend_block_of_queries(q_BxQxHxd, k_BxKxSxd, v_BxKxSxd, visible, **options)


def _splash_part(
    q_BxQxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Int[Array, "B T"],
    own_segments_BxQ: Int[Array, "B Q"],
    columns_Q: Int[Array, " Q"],
    attend_heads: Any,
    *,
    scale: float | None,
) -> Queries:
    """Compute the attention of a device's queries with its part of JAX's kernel for TPUs.

    The kernel knows the columns of the queries and skips the blocks of keys that none reads.
    """
    return run_splash_kernel(
        attend_heads, q_BxQxHxd, k_BxTxKxd, v_BxTxKxd, own_segments_BxQ, segments_BxT, scale
    )
