"""Tensor parallelism of attention: each device of `model` computes whole heads.

Query heads that cannot be split evenly are padded; key and value heads are copied.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.parallelism.rows import on_each_device, remaining_axes, remaining_row_axes

# The layout of arrays [B, T, heads, d].
_SPLIT_HEADS = P(P.UNCONSTRAINED, P.UNCONSTRAINED, "model", P.UNCONSTRAINED)


def split_heads(attention: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make each device run `attention` on its own rows and heads.

    `attention(q, k, v, per_row)` takes q, k and v [R, L, heads, d] and a tree of arrays [R, ...] or
    `None`. Inside `split_rows`, only the heads are divided.
    """

    def run(q: jax.Array, k: jax.Array, v: jax.Array, per_row: Any) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or not remaining_axes(mesh):
            return attention(q, k, v, per_row)
        row_axes = remaining_row_axes(mesh)
        heads = P(row_axes, None, "model", None)
        run_part = on_each_device(
            attention, in_specs=(heads, heads, heads, P(row_axes)), out_specs=heads
        )
        return run_part(q, k, v, per_row)

    return run


def num_split_kv_heads(heads: int) -> int:
    """Return the number of key-value heads after `copy_kv_heads`."""
    mesh = jax.sharding.get_abstract_mesh()
    return heads if mesh.empty else math.lcm(heads, mesh.shape["model"])


def copy_kv_heads(x_BxTxKxd: jax.Array) -> jax.Array:
    """Copy key-value heads until the mesh can split them, inside a compiled function.

    Query head h of H still reads key head h // (H / K), and each device has the heads that its own
    query heads read.
    """
    K = x_BxTxKxd.shape[2]
    copies = num_split_kv_heads(K) // K
    if copies == 1:
        return x_BxTxKxd
    return jax.lax.with_sharding_constraint(jnp.repeat(x_BxTxKxd, copies, axis=2), _SPLIT_HEADS)


def num_padded_query_heads(heads: int, kv_heads: int) -> int:
    """Return the number of query heads after `pad_query_heads`."""
    copies = num_split_kv_heads(kv_heads) // kv_heads
    group = heads // kv_heads
    return kv_heads * copies * -(-group // copies)


def pad_query_heads(q_BxTxHxd: jax.Array, kv_heads: int) -> jax.Array:
    """Add query heads of zeros until the mesh can split them, inside a compiled function.

    Each group of queries that read the same key head is padded at its end, so that after
    `copy_kv_heads` query head h still reads key head h // (H / K), and each device has whole heads
    with the key heads that they read. K = `kv_heads` counts the key heads before.
    """
    B, T, H, d = q_BxTxHxd.shape
    padded = num_padded_query_heads(H, kv_heads)
    if padded == H:
        return q_BxTxHxd
    missing = (padded - H) // kv_heads
    q = q_BxTxHxd.reshape(B, T, kv_heads, -1, d)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))
    return jax.lax.with_sharding_constraint(q.reshape(B, T, padded, d), _SPLIT_HEADS)


def drop_padded_heads(out_BxTxHxd: jax.Array, heads: int, kv_heads: int) -> jax.Array:
    """Drop the heads that `pad_query_heads` added to `heads` from the output of attention."""
    B, T, padded, d = out_BxTxHxd.shape
    if padded == heads:
        return out_BxTxHxd
    groups = out_BxTxHxd.reshape(B, T, kv_heads, -1, d)
    return groups[:, :, :, : heads // kv_heads].reshape(B, T, heads, d)
