"""Attention where the devices of `mesh.context` hold parts of the same packed rows.

Each device computes the attention of its own queries to the keys of the whole row, which it
gathers: with grouped queries they are small beside the activations, 64 MiB per layer for 32,768
tokens with 4 key heads of 128 in bfloat16. Its queries are two blocks that are mirror images in the
row (`packing.split_columns`), so that the devices have as many earlier keys each.

The programs are those of attention.py. Only splash skips what its own device's queries do not read:
xla skips the second half of the row for the queries of the first, and cuDNN nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_ppo.models.attention import (
    Keys,
    Queries,
    Segments,
    attend_block_of_queries,
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
        attend = attend_over_parts(functools.partial(_splash_part, **options), kernel)
    else:
        programs = {"xla": _xla_part, "cudnn": _cudnn_part}
        attend = attend_over_parts(functools.partial(programs[program], **options))
    out: jax.Array = attend(q, k, v, segments)
    return out


def _xla_part(
    q_BxQxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Int[Array, "B T"],
    own_segments_BxQ: Int[Array, "B Q"],
    columns_Q: Int[Array, " Q"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Queries:
    """Compute the attention of a device's queries with matrix products alone.

    The queries of the first block are in the first half of the row, and are not multiplied with the
    second half. Which earlier blocks a device could skip differs from device to device, but the
    program does not.
    """
    T, block = k_BxTxKxd.shape[1], q_BxQxHxd.shape[1] // 2
    k_BxKxTxd = k_BxTxKxd.swapaxes(1, 2)
    v_BxKxTxd = v_BxTxKxd.swapaxes(1, 2)

    def attend_block(start: int, stop: int, end: int) -> jax.Array:
        """Return the attention of some queries to the keys up to `end`."""
        keys, own = slice(end), slice(start, stop)
        visible = visible_keys(
            columns_Q[own],
            keys,
            own_segments_BxQ[:, own],
            segments_BxT[:, keys],
            sliding_window,
        )
        return attend_block_of_queries(
            q_BxQxHxd[:, own],
            k_BxKxTxd[:, :, keys],
            v_BxKxTxd[:, :, keys],
            visible,
            scale=scale,
            softcap=softcap,
        )

    blocks = [attend_block(0, block, T // 2), attend_block(block, 2 * block, T)]
    return jnp.concatenate(blocks, axis=1)


def _cudnn_part(
    q_BxQxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Int[Array, "B T"],
    own_segments_BxQ: Int[Array, "B Q"],
    columns_Q: Int[Array, " Q"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Queries:
    """Compute the attention of a device's queries with cuDNN, which reads all keys of the row."""
    assert softcap is None, "select_attention_program refuses it"
    row = slice(k_BxTxKxd.shape[1])
    mask = visible_keys(columns_Q, row, own_segments_BxQ, segments_BxT, sliding_window)
    return jax.nn.dot_product_attention(
        q_BxQxHxd,
        k_BxTxKxd,
        v_BxTxKxd,
        mask=mask[:, None],
        scale=scale,
        implementation="cudnn",
    )


def _splash_part(
    q_BxQxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Int[Array, "B T"],
    own_segments_BxQ: Int[Array, "B Q"],
    columns_Q: Int[Array, " Q"],
    attend_heads: Any,
    *,
    scale: float | None = None,
    **of_kernel: Any,
) -> Queries:
    """Compute the attention of a device's queries with its part of JAX's kernel for TPUs.

    The kernel knows the columns of the queries and skips the blocks of keys that none reads.
    """
    return run_splash_kernel(
        attend_heads, q_BxQxHxd, k_BxTxKxd, v_BxTxKxd, own_segments_BxQ, segments_BxT, scale
    )
