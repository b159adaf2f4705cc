"""Context parallelism of decoding: devices hold parts of a cache's columns."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.meshes import COLUMNS, cache_parts
from jax_ppo.runtime.parallelism.devices import on_each_device


def num_cache_parts() -> int:
    """Return the number of devices that split a cache's columns, in a compiled function."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else cache_parts(mesh)


def split_cache(x: jax.Array, heads_axis: int, columns_axis: int) -> jax.Array:
    """Split an array of a cache, inside a compiled function."""
    return jax.lax.with_sharding_constraint(x, _cache_spec((heads_axis, columns_axis)))


def on_cache_parts(function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Any:
    """Make each device run `function` on its own heads and columns, inside `split_rows`.

    Args:
      function: called as `function(part, *arguments)`, where `part` is the device's index along the
        axis of columns.
      in_axes: for each argument a tree of pairs: the axis of heads and that of columns, or
        `None` for an axis that the array does not have; `None` for arrays that are not split.
      out_axes: the same for the result.
    """

    def is_axes(x: Any) -> bool:
        return x is None or isinstance(x, tuple) and not isinstance(x[0], tuple)

    in_specs = jax.tree.map(_cache_spec, in_axes, is_leaf=is_axes)
    out_specs = jax.tree.map(_cache_spec, out_axes, is_leaf=is_axes)
    return on_each_device(lambda *x: function(jax.lax.axis_index(COLUMNS), *x), in_specs, out_specs)


def _cache_spec(axes: tuple[int | None, int | None] | None) -> P:
    """Return the layout of an array with these axes of heads and of columns."""
    if axes is None:
        return P()
    names = {axes[0]: "model", axes[1]: COLUMNS}
    last = max(axis for axis in axes if axis is not None)
    return P(*(names.get(axis) for axis in range(last + 1)))
