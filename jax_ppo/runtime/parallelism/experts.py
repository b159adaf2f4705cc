"""Expert parallelism: devices along `expert` hold different experts, and gather tokens."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.parallelism.rows import on_each_device, remaining_axes, remaining_row_axes


def run_on_own_rows(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return `function(x)`, run by each device on its own rows of x, [R, ...]; no gradients.

    Without a mesh in the context, or for rows that it cannot split, the compiler splits it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not remaining_axes(mesh) or len(x) % _count_row_parts(mesh):
        return function(x)
    rows = P(remaining_row_axes(mesh))
    return on_each_device(function, in_specs=rows, out_specs=rows)(x)


def _count_row_parts(mesh: AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in remaining_row_axes(mesh) or ())


def split_experts(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make each device run `function` on its own experts and its part of each one's width.

    Along `expert`, devices hold different experts: each gathers the tokens of all these devices'
    rows, and a reduce-scatter returns the sums to the devices of the rows. Along the other axes of
    rows no token leaves its device. The results of the devices of `model` are summed. Without a
    mesh in the context, or for rows that the mesh cannot split, the compiler splits `function`.

    Args:
      function: called as `function(x, weights, experts, projections, first)`: x is [R, L, D],
        weights and experts of each token are [R, L, k], each projection has a `kernel`
        [E, in, out] and perhaps a `kernel_scale` and a `bias` [E, out], and `first` is the index of
        the first of these E experts, `None` if they are all. The result, [R, L, D], is a sum over
        experts and their width.
    """

    def run(x: jax.Array, weights: jax.Array, experts: jax.Array, projections: Any) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or len(x) % _count_row_parts(mesh):
            return function(x, weights, experts, projections, None)
        row_axes = remaining_row_axes(mesh)

        def run_part(*rows_and_projections: Any) -> jax.Array:
            *rows, local_projections = rows_and_projections
            first = None
            if mesh.shape["expert"] > 1:
                rows = [jax.lax.all_gather(x, "expert", tiled=True) for x in rows]
                first = jax.lax.axis_index("expert") * len(local_projections["down_proj"]["kernel"])
            if mesh.shape["model"] > 1 and "bias" in local_projections["down_proj"]:
                # One of the devices whose results are summed adds it.
                down = local_projections["down_proj"]
                is_first = jax.lax.axis_index("model") == 0
                down = down | {"bias": jnp.where(is_first, down["bias"], 0)}
                local_projections = local_projections | {"down_proj": down}
            out = function(*rows, local_projections, first)
            # XLA would not remove a sum over a single device.
            if mesh.shape["model"] > 1:
                out = jax.lax.psum(out, "model")
            if mesh.shape["expert"] > 1:
                out = jax.lax.psum_scatter(out, "expert", tiled=True)
            return out

        if not remaining_axes(mesh):
            return run_part(x, weights, experts, projections)
        rows = P(row_axes)
        # Inside `split_rows` experts are split already, as rows are.
        expert = "expert" if row_axes and "expert" in row_axes else None
        inwards = {"kernel": P(expert, None, "model"), "kernel_scale": P(expert, "model")}
        outwards = {"kernel": P(expert, "model", None), "kernel_scale": P(expert)}
        for kinds in (inwards, outwards):
            kinds["bias"] = kinds["kernel_scale"]
        specs = {"gate_proj": inwards, "up_proj": inwards, "down_proj": outwards}
        parts = {
            name: {kind: specs[name][kind] for kind in arrays}
            for name, arrays in projections.items()
        }
        split = on_each_device(run_part, in_specs=(rows, rows, rows, parts), out_specs=rows)
        return split(x, weights, experts, projections)

    return run
