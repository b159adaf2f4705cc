"""Functions that each device runs on its own parts of arrays, inside compiled functions.

Loops and calls to the host are parallel over data: each shard of rows handles its own rows.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.meshes import ROWS
from jax_ppo.runtime.sharding import DECODE_RULES, tree_shardings

Function = TypeVar("Function", bound=Callable[..., Any])


def remaining_axes(mesh: AbstractMesh) -> set[str]:
    """Return the axes that are left to split: fewer inside `split_rows` or a pipeline stage."""
    return set(mesh.axis_names) - set(mesh.manual_axes)


def remaining_row_axes(mesh: AbstractMesh) -> tuple[str, ...] | None:
    """Return the axes that still split rows: none inside `split_rows`, some in a stage."""
    return tuple(axis for axis in ROWS if axis not in mesh.manual_axes) or None


def on_each_device(function: Function, in_specs: Any, out_specs: Any) -> Function:
    """Make each device run `function` on its parts, which the remaining axes split."""
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
        axis_names=remaining_axes(jax.sharding.get_abstract_mesh()),
    )


def split_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make each shard of rows run `function(params, rows, other_rows, key)` on its own rows.

    The loops inside may differ in length from shard to shard, unless experts or an axis other than
    the axes of rows are split: all devices must then take part in every matrix product, and
    `function` gets `any_shard`, which maps a bool to whether it holds on any shard. The first axis
    of every array that it returns counts rows. Without a mesh in the context, it runs unchanged.
    """

    def run(params: Any, *rows_and_key: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return function(params, *rows_and_key)
        has_shared_experts = mesh.shape["expert"] > 1
        in_step = has_shared_experts or any(
            mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in ROWS
        )
        run_shard = function
        if in_step:
            run_shard = functools.partial(
                function, any_shard=lambda holds: jax.lax.pmax(holds.astype(np.int32), ROWS) > 0
            )
        parts: Any = P()
        if has_shared_experts:
            # Of parameters, the axes of rows split experts alone in decoding.
            parts = jax.tree.map(
                lambda layout: P(*[axis if axis in ROWS else None for axis in layout.spec]),
                tree_shardings(mesh, params, DECODE_RULES),
            )
        return jax.shard_map(
            run_shard,
            in_specs=(parts, P(ROWS), P(ROWS), P()),
            out_specs=P(ROWS),
            axis_names=set(ROWS),
            check_vma=False,
        )(params, *rows_and_key)

    return run


def call_host(function: Callable[..., Any], result_shapes: Any, *arguments: jax.Array) -> Any:
    """Call a host function once for all devices that have the same arguments.

    JAX calls the host only where no axis is left to the compiler. Along the axes that are left,
    which do not split the arguments, the first device calls, and the others get its results.
    `function` takes and returns host arrays, of `result_shapes`, and may have side effects.
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
