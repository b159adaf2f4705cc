"""Pipeline stages: each runs its layers on one micro-batch after another.

With S stages and M micro-batches the loop has M + S - 1 ticks. In tick t stage s runs its layers on
micro-batch t - s and passes the hidden states on to stage s + 1. While the pipeline fills and
drains, what a stage without a micro-batch computes is dropped: the bubble, (S - 1) / (M + S - 1) of
the ticks (GPipe; Huang et al. 2019, arXiv:1811.06965). The gradient is the pipeline in reverse.

A micro-batch has one row per device of the other axes of rows. Outside of the layers stages split
the rows, too: none repeats another's embeddings and logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime.meshes import ROWS, row_shards

# The layout of arrays [S, M, r, ...]: a copy of the micro-batches per stage, whose rows are split
# over the other axes.
_MICRO_BATCHES = P("stage", None, tuple(axis for axis in ROWS if axis != "stage"))


def num_stages() -> int:
    """Return the number of stages of the mesh in the context; 1 without one or inside a stage."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or "stage" in mesh.manual_axes else mesh.shape["stage"]


def run_stages(
    run_stage: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
    layers: Any,
    x_RxLxD: jax.Array,
    rows: Any,
) -> tuple[jax.Array, Any]:
    """Run all layers on all rows, inside a compiled function with a mesh of several stages.

    Args:
      run_stage: called as `run_stage(layers, hidden, rows)` with a stage's layers and hidden states
        [r, L, D]; returns hidden states and any further outputs, arrays [a stage's layers, r, ...].
      layers: arrays with the stacked layers' axis in front, which the stages split.
      x_RxLxD: hidden states, the input of the first layer.
      rows: arrays [R, ...] that each layer needs.

    Return the last layer's output, [R, L, D], and all further ones, [layers, R, ...]. Raise
    `ValueError` if R is not a multiple of the number of parts that the mesh splits rows into.
    """
    mesh = jax.sharding.get_abstract_mesh()
    stages = mesh.shape["stage"]
    if len(x_RxLxD) % row_shards(mesh):
        raise ValueError(f"{len(x_RxLxD)} rows cannot be split into {row_shards(mesh)} equal parts")

    def run(stage_layers: Any, micro_batches: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        stage = jax.lax.axis_index("stage")
        x_MxrxLxD, rows = jax.tree.map(lambda x: x[0], micro_batches)
        M = len(x_MxrxLxD)

        def tick(
            received: jax.Array, inputs: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            t, first = inputs
            # A stage without a micro-batch repeats its first or last, and the result is dropped.
            m = jnp.clip(t - stage, 0, M - 1)
            x = jnp.where(stage == 0, first, received)
            x, others = run_stage(stage_layers, x, jax.tree.map(lambda array: array[m], rows))
            passed_on = jax.lax.ppermute(x, "stage", [(s, s + 1) for s in range(stages - 1)])
            return passed_on, (x, others)

        ticks = jnp.arange(M + stages - 1)
        inputs = x_MxrxLxD[jnp.minimum(ticks, M - 1)]
        # A stage that waits for its first micro-batch computes with any finite numbers.
        _, (outputs, others) = jax.lax.scan(tick, x_MxrxLxD[0], (ticks, inputs))
        # A stage begins with its first micro-batch in the tick of its number.
        others = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, stage, M), others)
        return outputs[None, stages - 1 :], jax.tree.map(lambda x: x.swapaxes(0, 1), others)

    micro_batches = jax.tree.map(_gather_micro_batches, (x_RxLxD, rows))
    hidden, others = _split_stages(run, layers, micro_batches)

    def to_rows(x_NxMxr: jax.Array) -> jax.Array:
        N, M, r, *rest = x_NxMxr.shape
        # Rows are split over stages first, and each device has consecutive ones.
        x_NxSxMxr = x_NxMxr.reshape(N, stages, M // stages, r, *rest)
        return x_NxSxMxr.swapaxes(2, 3).reshape(N, M * r, *rest)

    return _scatter_micro_batches(hidden), jax.tree.map(to_rows, others)


def _split_stages(
    function: Callable[..., tuple[Any, Any]], layers: Any, micro_batches: Any
) -> tuple[Any, Any]:
    """Make each stage run `function` on its layers, and each device of `data` on its rows.

    The compiler splits what the other axes split. Gradients of layers are summed over `data` once,
    after the function: a compiler would do so after each micro-batch. Micro-batches, and the first
    result, are [1, M, r, ...] to `function`; its other results are [layers, M, r, ...].
    """
    axes = {"stage"}
    micro_batch_parts = P("stage", None, None)
    if jax.sharding.get_abstract_mesh().shape["data"] > 1:
        axes.add("data")
        micro_batch_parts = P("stage", None, "data")
    return jax.shard_map(
        function,
        in_specs=(P("stage"), micro_batch_parts),
        out_specs=(micro_batch_parts, micro_batch_parts),
        axis_names=axes,
        check_vma=False,
    )(layers, micro_batches)


def _gather_micro_batches(x_Rx: jax.Array) -> jax.Array:
    """Give each of S stages a copy of all rows, [S, M, r, ...]: M micro-batches."""

    def gather(local_rows: jax.Array) -> jax.Array:
        return jax.lax.all_gather(local_rows, "stage", tiled=True)[None, :, None]

    return jax.shard_map(gather, in_specs=P(ROWS), out_specs=_MICRO_BATCHES)(x_Rx)


def _scatter_micro_batches(x_SxMxr: jax.Array) -> jax.Array:
    """Return the last stage's copy as rows [R, ...], ordered as before the gather."""

    def scatter(local_copy: jax.Array) -> jax.Array:
        # Every stage sends; only the last one's part is used. Unlike a sum, this rounds nothing.
        stages = jax.lax.axis_size("stage")
        parts = local_copy.reshape(stages, -1, *local_copy.shape[3:])
        return jax.lax.all_to_all(parts, "stage", split_axis=0, concat_axis=0)[-1]

    return jax.shard_map(scatter, in_specs=_MICRO_BATCHES, out_specs=P(ROWS))(x_SxMxr)
