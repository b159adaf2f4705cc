"""The mesh, and how parameters and batches are laid out on it: the only file with a PartitionSpec.

Axes: `data` replicates the parameters; `fsdp` splits parameters and optimizer states, which are
gathered layer by layer; `model` splits each matrix product (tensor parallelism). The rows of a
batch are split over data x fsdp.

A further axis is a field of `config.schema.MeshShape`, which `AXES` follows; it is named in `ROWS`
if it splits the rows of a batch, and in the rules of the parameters that it splits.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError

AXES = tuple(field.name for field in dataclasses.fields(MeshShape))
ROWS = ("data", "fsdp")  # the axes that split the rows of a batch

Rules = tuple[tuple[str, P], ...]

# (path pattern, layout). The first pattern that matches the end of a parameter's path decides; a
# parameter without a match raises. Parameters below "layers/" have the stacked layers' axis in
# front, which is never split.
TRAIN_RULES: Rules = (
    (r"(embed|lm_head)/embedding", P("model", "fsdp")),
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/kernel", P(None, "fsdp", "model")),
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/bias", P(None, "model")),
    (r"layers/.*(o_proj|down_proj)/kernel", P(None, "model", "fsdp")),
    (r"layers/.*(o_proj|down_proj)/bias", P()),
    # Adapters are split like the sides of the kernel that they touch; their rank is never split.
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_a", P(None, "fsdp", None)),
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_b", P(None, None, "model")),
    (r"layers/.*(o_proj|down_proj)/lora_a", P(None, "model", None)),
    (r"layers/.*(o_proj|down_proj)/lora_b", P(None, None, "fsdp")),
    (r"layers/.*norm/scale", P()),
    (r"norm/scale", P()),
    (r"score/kernel", P("fsdp", None)),
    # An encoder. Its words are not split over `model`: DeBERTa-v3 has 128,100 of them.
    (r"(words|places|relative)/embedding", P(None, "fsdp")),
    (r"embed_proj/kernel", P("fsdp", None)),
    (r"conv/kernel", P(None, "fsdp", "model")),
    (r"pooler/kernel", P("fsdp", "model")),
    (r"(conv|pooler|score)/bias", P()),
    (r"(layers/)?\w+_norm/(scale|bias)", P()),
    (r"count", P()),  # of the optimizer
)
# Decoding reads every weight once per token: nothing is split along fsdp, so that nothing is
# gathered inside the loop.
DECODE_RULES: Rules = (
    (r"(embed|lm_head)/embedding", P("model", None)),
    (r"layer_\d+/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/kernel", P(None, "model")),
    (r"layer_\d+/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/bias", P("model")),
    (r"layer_\d+/.*(o_proj|down_proj)/kernel", P("model", None)),
    (r"layer_\d+/.*(o_proj|down_proj)/bias", P()),
    (r"layer_\d+/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_a", P()),
    (r"layer_\d+/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_b", P(None, "model")),
    (r"layer_\d+/.*(o_proj|down_proj)/lora_a", P("model", None)),
    (r"layer_\d+/.*(o_proj|down_proj)/lora_b", P()),
    (r"layer_\d+/.*norm/scale", P()),
    (r"norm/scale", P()),
)


def make_mesh(shape: MeshShape, devices: list[jax.Device] | None = None) -> Mesh:
    """Return the mesh over all devices.

    Args:
      shape: sizes of the axes; at most one is -1 and takes the devices that the others leave.
      devices: default: all of them.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(shape, axis) for axis in AXES}
    known = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    # The axis of -1 takes the devices that the others leave.
    if free and len(devices) % known == 0:
        sizes[free[0]] = len(devices) // known
    if math.prod(sizes.values()) != len(devices):
        wanted = " x ".join(f"config.mesh.{axis}={getattr(shape, axis)}" for axis in AXES)
        raise UserError(f"{wanted}: must multiply to the number of devices, {len(devices)}")
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of parts that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def validate_architecture(mesh: Mesh, architecture: Any, vocabulary: bool = True) -> None:
    """Raise `UserError` if the mesh cannot split the model's dimensions evenly.

    Args:
      mesh: the run's mesh.
      architecture: of a decoder or an encoder.
      vocabulary: whether the vocabulary is split, too.
    """
    sizes = {
        "model": {
            "attention heads": architecture.num_heads,
            "key-value heads": architecture.num_kv_heads,
            "the MLP's width": architecture.intermediate_size,
        },
        "fsdp": {"the hidden size": architecture.hidden_size},
    }
    if vocabulary:
        sizes["model"]["the vocabulary"] = architecture.vocab_size
    for axis, dimensions in sizes.items():
        for name, size in dimensions.items():
            if size % mesh.shape[axis]:
                raise UserError(
                    f"config.mesh.{axis}={mesh.shape[axis]}: must divide {name} of the model, "
                    f"{size}"
                )


def tree_shardings(mesh: Mesh | AbstractMesh, tree: Any, rules: Rules) -> Any:
    """Return the `NamedSharding` of each leaf of `tree` by its path.

    Args:
      mesh: the mesh of the shardings.
      tree: arrays or shapes.
      rules: `TRAIN_RULES` or `DECODE_RULES`.

    Raises:
      ValueError: a path matches no rule.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = "/".join(
            str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))
            for part in path
        )
        for pattern, spec in rules:
            if re.search(rf"(^|/){pattern}$", name):
                return NamedSharding(mesh, spec)
        raise ValueError(
            f"{name}: no partition rule for this parameter of shape {leaf.shape}; add one to "
            "sharding.py"
        )

    return jax.tree_util.tree_map_with_path(sharding, tree)


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Return the sharding that splits `axis`, which counts rows or samples."""
    return NamedSharding(mesh, P(*[None] * axis, ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds as a whole."""
    return NamedSharding(mesh, P())


def constrain_rows(x: jax.Array, axis: int = 0) -> jax.Array:
    """Keep the rows of `x` split, inside a compiled function.

    Without a mesh in the context, return `x`.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    # What is split over `model` stays split.
    trailing = [P.UNCONSTRAINED] * (x.ndim - axis - 1)
    return jax.lax.with_sharding_constraint(x, P(*[None] * axis, ROWS, *trailing))


def split_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make each shard of rows run `function` on its own rows.

    The loops inside may differ in length from shard to shard, unless another axis than those of
    rows is split: its devices must then meet in every matrix product, and any_shard(bool) tells
    whether the bool holds on any shard. Without a mesh in the context the result is `function`.

    Args:
      function: of (params, rows, rows, key, any_shard); what it returns has rows in front.
    """

    def run(params: Any, *rows_and_key: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return function(params, *rows_and_key)
        in_step = any(mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in ROWS)
        split = functools.partial(function, any_shard=_any_shard) if in_step else function
        return jax.shard_map(
            split,
            in_specs=(P(), P(ROWS), P(ROWS), P()),
            out_specs=P(ROWS),
            axis_names=set(ROWS),
            check_vma=False,
        )(params, *rows_and_key)

    return run


def _any_shard(condition: jax.Array) -> jax.Array:
    return jax.lax.pmax(condition.astype(np.int32), ROWS) > 0


def split_heads(attention: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make each device run `attention` on its own rows and heads.

    Inside `split_rows`, where rows are split already, on its own heads.

    Args:
      attention: of (q, k, v [R, L, heads, d], an array [R, ...] or `None`).
    """

    def run(q: jax.Array, k: jax.Array, v: jax.Array, per_row: jax.Array | None) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return attention(q, k, v, per_row)
        # Inside `split_rows` the rows are this device's own already.
        first = None if set(ROWS) <= set(mesh.manual_axes) else ROWS
        heads = P(first, None, "model", None)
        return jax.shard_map(
            attention,
            in_specs=(heads, heads, heads, P(first)),
            out_specs=heads,
            check_vma=False,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        )(q, k, v, per_row)

    return run


def split_by_device(x_RxL: jax.Array) -> jax.Array:
    """Reshape [R, L, ...] to [G, R * L / G, ...], inside a compiled function.

    G is the number of parts that the mesh splits rows into; 1 without a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    groups = 1 if mesh.empty else row_shards(mesh)
    return constrain_rows(x_RxL.reshape(groups, -1, *x_RxL.shape[2:]))


def constrain_tree(tree: Any, rules: Rules) -> Any:
    """Lay every leaf out by the rules, inside a compiled function.

    Without a mesh in the context, return `tree`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, tree_shardings(mesh, tree, rules))


def gather_embedding(params: Any) -> Any:
    """Gather the columns of the input embedding, inside a compiled function.

    Call it before rows are looked up. From a table whose columns are split over `fsdp` the compiler
    looks up split columns for all rows, and cannot go from there to split rows without a copy of
    the whole batch on each device.

    Without a mesh in the context, return `params`.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return params
    table = jax.lax.with_sharding_constraint(params["embed"]["embedding"], P("model", None))
    return params | {"embed": {"embedding": table}}


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Put host arrays, the same in every process, on the mesh.

    Each process transfers the part that its devices hold. Everything that a step sends to the mesh
    passes through here, so that `jax.transfer_guard` catches accidental transfers.
    """

    def put(x: Any) -> jax.Array:
        return jax.make_array_from_callback(
            np.shape(x), sharding, lambda index: np.asarray(x)[index]
        )

    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(put, tree)


def to_host(array: jax.Array) -> np.ndarray:
    """Return the whole array, in every process."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def from_local_rows(mesh: Mesh, indices: np.ndarray, values: Any, total: int) -> jax.Array:
    """Return the array [total, ...] split by rows, from the rows of each process.

    Args:
      mesh: the run's mesh.
      indices: int [r], as returned by `local_rows` in this process.
      values: [r, ...], the rows at these indices.
      total: number of rows of all processes.
    """
    return place(_scatter_rows(indices, values, total), rows(mesh))


def all_rows(mesh: Mesh, indices: np.ndarray, values: Any, total: int) -> np.ndarray:
    """Return the rows of all processes, [total, ...], on the host of each.

    The arguments are those of `from_local_rows`.
    """
    # Through the mesh, since each process has only rows of its own.
    if jax.process_count() > 1:
        return to_host(from_local_rows(mesh, indices, values, total))
    return _scatter_rows(indices, values, total)


def _scatter_rows(indices: np.ndarray, values: Any, total: int) -> np.ndarray:
    """Return zeros [total, ...] with `values` at `indices`."""
    array = np.zeros((total, *np.shape(values)[1:]), np.asarray(values).dtype)
    array[indices] = values
    return array


def local_rows(array: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that this process's devices hold, each once and in order.

    Returns:
      (indices, int [r]; values, [r, ...]).
    """
    shards: dict[int, Any] = {}
    for shard in array.addressable_shards:
        start = 0
        if shard.index:
            start = shard.index[0].start or 0
        # Devices that replicate each other hold the same rows: one copy is enough.
        shards.setdefault(start, shard)
    values = [np.asarray(shards[start].data) for start in sorted(shards)]
    indices = [
        start + np.arange(len(value)) for start, value in zip(sorted(shards), values, strict=True)
    ]
    return np.concatenate(indices), np.concatenate(values)
