"""The cache of cache.py where devices hold alternating columns of the same sequences.

The device with number p of C along the mesh's axis of columns holds columns p, p + C, p + 2 C, ...,
one after the other: sequences of any length are split evenly. Each device reads its own columns,
and one largest score, one sum of weights and one weighted sum of values per head are combined.

The functions have the names of cache.py's; they run inside `split_rows`. The prefill buffer is not
split: each device has all its columns, and copies those that it holds itself.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_ppo.models import cache as whole
from jax_ppo.models.cache import Columns
from jax_ppo.runtime.meshes import COLUMNS
from jax_ppo.runtime.parallelism.context import num_cache_parts, on_cache_parts, split_cache

# The axes of heads and of columns in queries, new tokens and outputs: [B, 1, heads, d].
_TOKEN = (2, None)


def _layer_axes(program: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the axes of heads and of columns in keys and in values."""
    heads = 1 if program in whole.TRANSPOSED else 2
    keys_axis, values_axis = whole.column_axes(program)
    return (heads, keys_axis), (heads, values_axis)


def empty_cache(
    program: str, rows: int, length: int, kv_heads: int, head_dim: int, dtype: DTypeLike
) -> Columns:
    """Return the cache of a layer; `length` is rounded up to equally many columns per device."""
    length += -length % num_cache_parts()
    layer = whole.empty_cache(program, rows, length, kv_heads, head_dim, dtype)
    keys_axes, values_axes = _layer_axes(program)
    return split_cache(layer[0], *keys_axes), split_cache(layer[1], *values_axes)


def write_rows(
    program: str, layer: Columns, rows_g: Int[Array, " g"], new_rows: Columns
) -> Columns:
    """Write rows into the first columns of the cache; see cache.py."""
    parts = num_cache_parts()
    keys_axes, values_axes = _layer_axes(program)

    def local_columns(new: jax.Array, axis: int, part: jax.Array) -> jax.Array:
        # Columns part, part + C, ... The padding is behind every sequence.
        widths = [(0, 0)] * new.ndim
        widths[axis] = (0, -new.shape[axis] % parts)
        new = jnp.pad(new, widths)
        new = new.reshape(*new.shape[:axis], -1, parts, *new.shape[axis + 1 :])
        return jax.lax.dynamic_index_in_dim(new, part, axis + 1, keepdims=False)

    def write(part: jax.Array, layer: Columns, rows_g: jax.Array, new: Columns) -> Columns:
        keys = local_columns(new[0], keys_axes[1], part)
        values = local_columns(new[1], values_axes[1], part)
        return whole.write_rows(program, layer, rows_g, (keys, values))

    # The new rows have all columns on each device.
    new_axes = ((keys_axes[0], None), (values_axes[0], None))
    layer_axes = (keys_axes, values_axes)
    written: Columns = on_cache_parts(write, (layer_axes, None, new_axes), layer_axes)(
        layer, rows_g, new_rows
    )
    return written


def write_tokens(
    program: str,
    layer: Columns,
    k_bx1xKxd: Float[Array, "b 1 K d"],
    v_bx1xKxd: Float[Array, "b 1 K d"],
    columns_b: Int[Array, " b"],
) -> Columns:
    """Write one token per row into that row's column; see cache.py."""
    parts = num_cache_parts()

    def write(
        part: jax.Array, layer: Columns, k: jax.Array, v: jax.Array, columns: jax.Array
    ) -> Columns:
        # Other devices' tokens go to a column that does not exist, and are dropped.
        size = whole.num_columns(program, layer)
        columns = jnp.where(columns % parts == part, columns // parts, size)
        return whole.write_tokens(program, layer, k, v, columns, mode="drop")

    layer_axes = _layer_axes(program)
    written: Columns = on_cache_parts(write, (layer_axes, _TOKEN, _TOKEN, None), layer_axes)(
        layer, k_bx1xKxd, v_bx1xKxd, columns_b
    )
    return written


def attend_to_cache(
    program: str,
    q_bx1xHxd: Float[Array, "b 1 H d"],
    layer: Columns,
    columns_b: Int[Array, " b"],
    *,
    sliding_window: int | None = None,
    **options: float | None,
) -> Float[Array, "b 1 H d"]:
    """Return the attention of one new token per row to the first b rows; see cache.py."""
    parts = num_cache_parts()
    rows = len(q_bx1xHxd)

    def attend(part: jax.Array, q: jax.Array, layer: Columns, columns: jax.Array) -> jax.Array:
        keys, values = layer
        held_S = jnp.arange(whole.num_columns(program, layer)) * parts + part
        readable_BxS = whole.readable_columns(columns, held_S, sliding_window)
        scores = whole.cache_scores(program, q, keys, readable_BxS, **options)
        # Some device holds the new token's own column: the largest score is not a masked one.
        top = jax.lax.pmax(scores.max(-1, keepdims=True), COLUMNS)
        weights = jnp.exp(scores - top)
        total = jax.lax.psum(weights.sum(-1), COLUMNS)
        out = whole.weighted_values(program, weights.astype(values.dtype), values)
        out = jax.lax.psum(out.astype(jnp.float32), COLUMNS) / total[..., None]
        return out.reshape(q.shape).astype(q.dtype)

    idle_rows = len(layer[0]) - rows
    q_Bx1xHxd = whole.pad_rows(q_bx1xHxd, idle_rows)
    columns_B = whole.pad_rows(columns_b, idle_rows)
    out: jax.Array = on_cache_parts(attend, (_TOKEN, _layer_axes(program), None), _TOKEN)(
        q_Bx1xHxd, layer, columns_B
    )
    return out[:rows]
