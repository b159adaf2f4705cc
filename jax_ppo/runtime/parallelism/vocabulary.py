"""The vocabulary over devices: the look-up of embeddings, their gradient, and the logits."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_ppo.runtime import meshes
from jax_ppo.runtime.meshes import ROWS, WEIGHTS, gathers_weights, row_shards
from jax_ppo.runtime.parallelism.rows import on_each_device, remaining_row_axes
from jax_ppo.runtime.sharding import constrain_rows

TPU_LANES = 128  # the length of a TPU's vectors, along which the last axis of an array lies


@dataclasses.dataclass(frozen=True)
class VocabularyShards:
    """The devices that split the vocabulary, seen from one of them, inside `jax.shard_map`."""

    axis: str | None = None  # mesh axis that splits the vocabulary into equal parts, if one does

    def start(self, width: int) -> jax.Array | int:
        """Return the id of the first of this device's `width` tokens."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * width

    def total(self, width: int) -> int:
        """Return V, the number of tokens of all devices, each of which has `width`."""
        return width if self.axis is None else width * jax.lax.axis_size(self.axis)

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum over devices."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        """Return the maximum over devices."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def min(self, x: jax.Array) -> jax.Array:
        """Return the minimum over devices."""
        return x if self.axis is None else jax.lax.pmin(x, self.axis)

    def gather(self, x_BxN: jax.Array) -> jax.Array:
        """Return the columns of all devices."""
        if self.axis is None:
            return x_BxN
        return jax.lax.all_gather(x_BxN, self.axis, axis=1, tiled=True)


WHOLE = VocabularyShards()


def split_vocabulary(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make each device run `function` on its own columns of the logits.

    `function(logits_BxV, per_row, *others_BxV, shards=shards)` takes an array [B, ...] `per_row`
    and the `VocabularyShards`, which are `WHOLE` if no mesh splits the vocabulary. The first axis
    of what it returns is B, and all devices that split a row's logits return the same.
    """

    def run(logits_BxV: jax.Array, per_row: jax.Array, *others_BxV: jax.Array) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        is_whole = mesh.empty or meshes.vocabulary_axis(mesh, logits_BxV.shape[-1]) is None
        if is_whole or mesh.shape["model"] == 1:
            return function(logits_BxV, per_row, *others_BxV, shards=WHOLE)
        row_axes = remaining_row_axes(mesh)
        columns = P(row_axes, "model")
        run_part = on_each_device(
            functools.partial(function, shards=VocabularyShards("model")),
            in_specs=(columns, P(row_axes), *[columns] * len(others_BxV)),
            out_specs=P(row_axes),
        )
        return run_part(logits_BxV, per_row, *others_BxV)

    return run


def look_up_embedding(
    embedding_VxD: jax.Array, tokens_RxL: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Return the embeddings of tokens, [R, L, D] in `dtype`, inside a compiled function.

    No device gathers the table, as a compiler would: each looks up its own columns for the tokens
    of all devices that split them, and sends them to the devices of the rows. The gradient takes
    the same way back. Without a mesh in the context, inside `split_rows`, or for rows that the mesh
    cannot split, the compiler splits the look-up.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or len(tokens_RxL) % row_shards(mesh):
        return embedding_VxD[tokens_RxL].astype(dtype)
    # XLA would not remove exchanges of a device with itself.
    split = {axis for axis in mesh.axis_names if mesh.shape[axis] > 1}
    if meshes.vocabulary_axis(mesh, len(embedding_VxD)) is None:
        split -= {"model"}
    weight_axes = tuple(axis for axis in WEIGHTS if axis in split)
    if not weight_axes and "model" not in split:
        return embedding_VxD[tokens_RxL].astype(dtype)

    def look_up(own_VxD: jax.Array, tokens_rxL: jax.Array) -> jax.Array:
        if weight_axes:
            tokens_rxL = jax.lax.all_gather(tokens_rxL, weight_axes, tiled=True)
        if "model" not in split:
            x_rxLxD = own_VxD[tokens_rxL].astype(dtype)
        else:
            # The tokens of other devices are zeros here, until the sum below.
            V = len(own_VxD)
            index_rxL = tokens_rxL - jax.lax.axis_index("model") * V
            is_own_rxL = (index_rxL >= 0) & (index_rxL < V)
            x_rxLxD = own_VxD[jnp.clip(index_rxL, 0, V - 1)].astype(dtype)
            x_rxLxD = jnp.where(is_own_rxL[..., None], x_rxLxD, 0)
        if weight_axes:
            x_rxLxD = jax.lax.all_to_all(
                x_rxLxD, weight_axes, split_axis=0, concat_axis=2, tiled=True
            )
        if "model" in split:
            x_rxLxD = jax.lax.psum(x_rxLxD, "model")
        return x_rxLxD

    # The gradient is summed over the axes that the table's layout does not name.
    columns = tuple(axis for axis in ROWS if axis in WEIGHTS or axis not in split)
    table = P("model" if "model" in split else None, columns)
    return jax.shard_map(look_up, in_specs=(table, P(ROWS)), out_specs=P(ROWS))(
        embedding_VxD, tokens_RxL
    )


def split_by_device(x_RxL: jax.Array) -> jax.Array:
    """Reshape [R, L, ...] to [G, R * L / G, ...]; the mesh splits rows into G parts."""
    mesh = jax.sharding.get_abstract_mesh()
    groups = 1 if mesh.empty else row_shards(mesh)
    return constrain_rows(x_RxL.reshape(groups, -1, *x_RxL.shape[2:]))


def gather_columns(embedding_VxD: jax.Array) -> jax.Array:
    """Gather the columns of an embedding, inside a compiled function; tokens stay split."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return embedding_VxD
    rows = P(meshes.vocabulary_axis(mesh, len(embedding_VxD)), None)
    return jax.lax.with_sharding_constraint(embedding_VxD, rows)


def scatter_group_sum(gradient_GxVxD: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the sum over groups, [V, D] in `dtype`, laid out like an embedding in training.

    `split_by_device` makes the groups. Each device receives only its columns of the sum (a
    reduce-scatter over `WEIGHTS`), and only these are summed over the other axes of rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return gradient_GxVxD.sum(0).astype(dtype)

    def exchange(local_GxVxD: jax.Array) -> jax.Array:
        columns = local_GxVxD.sum(0)
        if gathers_weights(mesh):
            columns = jax.lax.platform_dependent(
                columns,
                tpu=functools.partial(scatter_columns_for_tpu, dtype=dtype),
                default=_scatter_columns,
            )
        # XLA would not remove a sum over a single device.
        others = tuple(axis for axis in ROWS if axis not in WEIGHTS and mesh.shape[axis] > 1)
        if others:
            columns = jax.lax.psum(columns, others)
        return columns.astype(dtype)

    axis = meshes.vocabulary_axis(mesh, gradient_GxVxD.shape[1])
    return jax.shard_map(
        exchange, in_specs=P(ROWS, axis, None), out_specs=P(axis, WEIGHTS), check_vma=False
    )(gradient_GxVxD)


def _scatter_columns(local_VxD: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(local_VxD, WEIGHTS, scatter_dimension=1, tiled=True)


def scatter_columns_for_tpu(local_VxD: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the own columns of the sum over `WEIGHTS`, inside `jax.shard_map`.

    The compiler for TPUs makes a reduce-scatter of columns that do not fill its lanes an
    all-reduce. Of these, each device sends the others' to them in `dtype`, and adds up its own.
    """
    shards = jax.lax.axis_size(WEIGHTS)
    if local_VxD.shape[1] % (shards * TPU_LANES) == 0:
        return _scatter_columns(local_VxD)
    # The compiler would send float32 if it saw that these are rounded here, and summed in float32.
    columns = jax.lax.optimization_barrier(local_VxD.astype(dtype))
    parts = jax.lax.all_to_all(columns, WEIGHTS, split_axis=1, concat_axis=0, tiled=True)
    parts = jax.lax.optimization_barrier(parts)
    return parts.reshape(shards, -1, parts.shape[1]).sum(0, dtype=local_VxD.dtype)


def embedding_layouts(mesh: Mesh, params: Any) -> Any:
    """Return the layouts in which embeddings are moved to a mesh to decode on, else `None`.

    The compiler cannot change columns that are split over all devices to rows that are split over
    `model` without a copy of the table on each device, but through these layouts it can. `params`
    are arrays or shapes on another mesh of the same devices.
    """
    others = tuple(axis for axis in mesh.axis_names if axis != "model")

    def layout(path: tuple[Any, ...], x: Any) -> NamedSharding | None:
        is_table = jax.tree_util.keystr(path, simple=True, separator="/") in (
            "embed/embedding",
            "embed_per_layer/embedding",
            "lm_head/embedding",
        )
        if is_table and x.shape[1] % math.prod(mesh.shape[axis] for axis in others) == 0:
            return NamedSharding(mesh, P(meshes.vocabulary_axis(mesh, x.shape[0]), others))
        return None

    return jax.tree_util.tree_map_with_path(layout, params)
