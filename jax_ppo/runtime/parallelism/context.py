"""Context parallelism: devices hold parts of the same packed rows or, in decoding, of a cache."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.meshes import row_parts
from jax_ppo.runtime.parallelism.rows import on_each_device, remaining_row_axes


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
      attention: called as `attention(q, k, v, row_segments, segments, columns)`, followed by
        `shared` if that is not `None`: queries [R, L / C, H, d] with their segments and columns
        [L / C]; keys and values [R, L, K, d] and their segments [R, L], in the order of the row.
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
        extra: tuple[Any, ...] = ()
        extra_specs: tuple[Any, ...] = ()
        if shared is not None:
            extra = (shared,)
            extra_specs = (shared.manual_sharding_spec(NamedSharding(mesh, P(None, "context"))),)
        in_specs = (heads, heads, heads, P(row_axes), *extra_specs)
        return on_each_device(attend, in_specs, heads)(q, k, v, segments, *extra)

    return run


def _gather_row(part_RxT: jax.Array) -> jax.Array:
    """Return [R, C T, ...] in the order of the columns from the parts [R, T, ...] of C devices."""
    parts_CxRxT = jax.lax.all_gather(part_RxT, "context")
    first, mirrored = jnp.split(parts_CxRxT, 2, axis=2)
    blocks = jnp.moveaxis(jnp.concatenate([first, mirrored[::-1]]), 0, 1)
    return blocks.reshape(len(part_RxT), -1, *part_RxT.shape[2:])
