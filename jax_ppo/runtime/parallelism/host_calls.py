"""Calls of the host from inside compiled functions: one for each shard of rows."""

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
      function: of host arrays; it may have side effects.
      result_shapes: of what it returns, a pytree of `jax.ShapeDtypeStruct`.
      *arguments: passed to it.
    """
    call = functools.partial(io_callback, function, result_shapes)
    mesh = jax.sharding.get_abstract_mesh()
    left = set() if mesh.empty else remaining_axes(mesh)
    if not left:
        return call(*arguments)
    # XLA keeps a sum over a single device.
    split = tuple(axis for axis in mesh.axis_names if axis in left and mesh.shape[axis] > 1)

    def skip(*_: jax.Array) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result_shapes)

    def share(result: jax.Array) -> jax.Array:
        # All but one are 0. Booleans have no sum.
        summed = result.astype(jnp.int32) if result.dtype == bool else result
        return jax.lax.psum(summed, split).astype(result.dtype)

    def call_on_first(*arguments: jax.Array) -> Any:
        is_first = jax.lax.axis_index(split) == 0
        return jax.tree.map(share, jax.lax.cond(is_first, call, skip, *arguments))

    on_each = on_each_device(call_on_first if split else call, in_specs=P(), out_specs=P())
    return on_each(*arguments)
