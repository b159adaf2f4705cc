"""Data parallelism whose bits do not depend on the number of devices (`mesh.virtual_replicas`).

A batch is divided among V virtual replicas. A device computes those that it has one after the
other, each in arrays of the same shapes as on V devices: matrix products of other shapes round
differently. What replicas sum is added up in one binary tree, whose lower levels are on a device
and whose upper ones are exchanges. Everything else is computed by each device as a whole.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.meshes import REPLICA
from jax_ppo.runtime.parallelism.devices import Function

Combine = Callable[[Any, Any], Any]


def add_trees(a: Any, b: Any) -> Any:
    """Return the sum of two trees."""
    return jax.tree.map(jnp.add, a, b)


def computed_by_replicas(num_static: int) -> Callable[[Function], Function]:
    """Make each device run a function as a whole, on arrays that all of them hold.

    `sum_over_replicas` inside it divides work. Without virtual replicas the function is unchanged.
    The first `num_static` arguments are no arrays.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            computed = functools.partial(function, *arguments[:num_static])
            return _on_replicas(computed, in_specs=P(), out_specs=P())(*arguments[num_static:])

        return cast(Function, run)

    return decorate


def sum_over_replicas(
    function: Callable[[Any], Any], parts: Any, combine: Combine = add_trees
) -> Any:
    """Return what `function` makes of all parts, combined in a binary tree.

    Call it inside `computed_by_replicas`.

    Args:
      function: makes a tree of arrays of a part.
      parts: a tree of arrays [V, ...], V a power of two and a multiple of the devices.
      combine: (a tree, another) -> a tree; commutative.
    """
    devices = _devices()
    first: jax.Array | int = 0
    own = len(jax.tree.leaves(parts)[0]) // devices
    if devices > 1:
        first = jax.lax.axis_index(REPLICA) * own
    own_parts = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, own), parts)
    total = _sum_own(function, own_parts, combine)
    for level in range(_log2(devices)):
        # Both devices of a pair add the same two numbers.
        pairs = [(device, device ^ (1 << level)) for device in range(devices)]
        exchange = functools.partial(jax.lax.ppermute, axis_name=REPLICA, perm=pairs)
        total = combine(total, jax.tree.map(exchange, total))
    return total


def map_replicas(function: Callable[..., Any], replicas: int) -> Callable[..., Any]:
    """Make each virtual replica run `function` on its own rows.

    Args:
      function: called as `function(params, rows, other_rows, key)`. The first axis of every array
        that it returns counts rows.
      replicas: V, which divides the number of rows.
    """

    def run_device(params: Any, rows: Any, other_rows: Any, key: jax.Array) -> Any:
        own = replicas // _devices()
        parts = jax.tree.map(lambda x: x.reshape(own, -1, *x.shape[1:]), (rows, other_rows))
        results = jax.lax.map(lambda part: function(params, *part, key), parts)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    def run(*arguments: Any) -> Any:
        in_specs = (P(), P(REPLICA), P(REPLICA), P())
        results = _on_replicas(run_device, in_specs=in_specs, out_specs=P(REPLICA))(*arguments)
        # Later steps, such as means over all samples, are computed as a whole by each device.
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return results
        return jax.lax.with_sharding_constraint(results, P())

    return run


def _sum_own(function: Callable[[Any], Any], parts: Any, combine: Combine) -> Any:
    """Combine what a device makes of its parts, a power of two of them, in a binary tree."""
    count = len(jax.tree.leaves(parts)[0])
    levels = _log2(count)
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add_part(i: jax.Array, carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        # As in counting: a bit of i that is set holds a sum, which the carry of the lower ones
        # meets. `is_carried` says whether the carry reaches this bit.
        _, sums = carry
        total = function(jax.tree.map(lambda x: x[i], parts))
        is_carried = jnp.bool_(True)
        new_sums = []
        for level, held in enumerate(sums):
            is_set = (i >> level) & 1 == 1
            new_sums.append(_where(is_carried & ~is_set, total, held))
            total = _where(is_carried & is_set, combine(held, total), total)
            is_carried &= is_set
        return total, new_sums

    # Not a constant: a loop of one turn would be merged with what surrounds it.
    turns = jax.lax.optimization_barrier(jnp.int32(count))
    return jax.lax.fori_loop(0, turns, add_part, (zeros, [zeros] * levels))[0]


def _where(condition: jax.Array, a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def _log2(count: int) -> int:
    assert count == 1 << (count.bit_length() - 1), "a power of two"
    return int(math.log2(count))


def _devices() -> int:
    """Return the number of devices that share the virtual replicas."""
    return int(jax.sharding.get_abstract_mesh().shape.get(REPLICA, 1))


def _on_replicas(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Make each device run `function` on the parts of its replicas; without a mesh, on all."""
    if REPLICA not in jax.sharding.get_abstract_mesh().axis_names:
        return function
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names={REPLICA}, check_vma=False
    )
