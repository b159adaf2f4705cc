"""Data parallelism of loops: each shard of rows runs a function of its own rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.meshes import ROWS
from jax_ppo.runtime.sharding import DECODE_RULES, tree_shardings


def split_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make each shard of rows run `function` on its own rows.

    The loops inside may differ in length from shard to shard, unless experts or an axis other than
    those of rows are split: all devices must then take part in every matrix product, and `function`
    gets `any_shard`, which maps a bool to whether it holds on any shard. Without a mesh in the
    context, `function` runs unchanged.

    Args:
      function: called as `function(params, rows, other_rows, key)`, with `any_shard` by keyword if
        shards run in step. The first axis of every array that it returns counts rows.
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
            run_shard = functools.partial(function, any_shard=_any_shard)
        params_parts = _row_parts(params) if has_shared_experts else P()
        return jax.shard_map(
            run_shard,
            in_specs=(params_parts, P(ROWS), P(ROWS), P()),
            out_specs=P(ROWS),
            axis_names=set(ROWS),
            check_vma=False,
        )(params, *rows_and_key)

    return run


def _row_parts(params: Any) -> Any:
    """Return how the axes of rows split parameters in decoding: they split experts alone."""

    def only_rows(layout: NamedSharding) -> P:
        return P(*[axis if axis in ROWS else None for axis in layout.spec])

    mesh = jax.sharding.get_abstract_mesh()
    return jax.tree.map(only_rows, tree_shardings(mesh, params, DECODE_RULES))


def _any_shard(condition: jax.Array) -> jax.Array:
    return jax.lax.pmax(condition.astype(np.int32), ROWS) > 0
