"""How devices share attention: whole heads on `model`, parts of the same rows on `context`.

Query heads that cannot be split evenly are padded; key and value heads are copied. With `context`,
devices hold parts of the same packed rows.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.meshes import row_parts
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


def pad_query_heads(q_BxTxHxd: jax.Array, kv_heads: int) -> jax.Array:
    """Add query heads of zeros until the mesh can split them, inside a compiled function.

    Each group of queries that read the same key head is padded at its end, so that after
    `copy_kv_heads` query head h still reads key head h // (H / K), and each device has whole heads
    with the key heads that they read. K = `kv_heads` counts the key heads before.
    """
    B, T, H, d = q_BxTxHxd.shape
    copies = num_split_kv_heads(kv_heads) // kv_heads
    group = H // kv_heads
    padded = kv_heads * copies * -(-group // copies)
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


class RowPart(NamedTuple):
    """The queries of a device in packed rows of length L, of which C devices hold parts."""

    segments: jax.Array  # of the queries, [R, L / C]
    row_segments: jax.Array  # of the whole rows, [R, L], in the order of the row
    columns: jax.Array  # of the queries in the row, [L / C]


def num_row_parts() -> int:
    """Return the devices that split each packed row, in a compiled function; 1 in `split_rows`."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or "context" in mesh.manual_axes else row_parts(mesh)


def attend_over_parts(attention: Callable[..., jax.Array], shared: Any = None) -> Any:
    """Make each device run `attention` on its own queries and heads, and the keys of whole rows.

    The devices of `context` hold the parts of packed rows that `packing.split_columns` made: part i
    of C has the i-th and the i-th last of 2 C blocks of columns. Keys, values and segments are
    gathered over `context`; the gradients of keys and values are reduce-scattered.

    Args:
      attention: called as `attention(q, k, v, part)` with a `RowPart`, followed by `shared` if that
        is not `None`: queries [R, L / C, H, d], keys and values [R, L, K, d], in the row's order.
      shared: an object with `manual_sharding_spec`, such as JAX's splash kernel, of which each
        device gets the part for its queries.
    """

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        parts = row_parts(mesh)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *shared: Any
        ) -> jax.Array:
            block = q.shape[1] // 2
            part = jax.lax.axis_index("context")
            # The columns of the first block and of its mirror image.
            starts = jnp.array([part, 2 * parts - 1 - part]) * block
            columns = (starts[:, None] + jnp.arange(block)).reshape(-1)
            keys = _gather_row(k)
            values = _gather_row(v)
            row_segments = _gather_row(segments)
            return attention(q, keys, values, RowPart(segments, row_segments, columns), *shared)

        row_axes = remaining_row_axes(mesh)
        heads = P(row_axes, None, "model", None)
        arguments: list[Any] = [q, k, v, segments]
        in_specs: list[Any] = [heads, heads, heads, P(row_axes)]
        if shared is not None:
            arguments.append(shared)
            in_specs.append(shared.manual_sharding_spec(NamedSharding(mesh, P(None, "context"))))
        return on_each_device(attend, tuple(in_specs), heads)(*arguments)

    return run


def _gather_row(part_RxT: jax.Array) -> jax.Array:
    """Return [R, C T, ...] in the order of the columns from the parts [R, T, ...] of C devices."""
    parts_CxRxT = jax.lax.all_gather(part_RxT, "context")
    first, mirrored = jnp.split(parts_CxRxT, 2, axis=2)
    blocks = jnp.moveaxis(jnp.concatenate([first, mirrored[::-1]]), 0, 1)
    return blocks.reshape(len(part_RxT), -1, *part_RxT.shape[2:])
