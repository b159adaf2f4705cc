"""Calls of host functions from inside compiled functions: one for each shard of rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.parallelism.devices import on_each_device, remaining_axes


def call_host(function: Callable[..., Any], result_shapes: Any, *arguments: jax.Array) -> Any:
    """Call a host function once for all devices that have the same arguments.

    JAX calls the host only where no axis is left to the compiler. Along the axes that are left,
    which do not split the arguments, the first device calls, and the others get its results.

    Args:
      function: takes and returns host arrays; it may have side effects.
      result_shapes: the shapes of its results, a pytree of `jax.ShapeDtypeStruct`.
      *arguments: passed to it.
    """
    call = functools.partial(io_callback, function, result_shapes)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not remaining_axes(mesh):
        return call(*arguments)
    # XLA would not remove a sum over a single device.
    axes = remaining_axes(mesh)
    split = tuple(axis for axis in mesh.axis_names if axis in axes and mesh.shape[axis] > 1)
    if not split:
        return on_each_device(call, in_specs=P(), out_specs=P())(*arguments)

    def skip(*_: jax.Array) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result_shapes)

    def share(result: jax.Array) -> jax.Array:
        # The results of all devices but one are 0. Booleans have no sum.
        terms = result.astype(jnp.int32) if result.dtype == bool else result
        return jax.lax.psum(terms, split).astype(result.dtype)

    def call_on_first(*arguments: jax.Array) -> Any:
        is_first = jax.lax.axis_index(split) == 0
        return jax.tree.map(share, jax.lax.cond(is_first, call, skip, *arguments))

    return on_each_device(call_on_first, in_specs=P(), out_specs=P())(*arguments)
