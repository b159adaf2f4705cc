"""The machine: the mesh, where every parameter lies on it, and where batches do. No PartitionSpec stands anywhere else.

Axes: `data` repeats the parameters, `fsdp` splits parameters and optimizer states and is gathered layer by layer, `model`
splits each matrix product (tensor parallelism). Rows of a batch are split over data x fsdp.
"""

import functools
import re

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError

AXES = ("data", "fsdp", "model")
ROWS = ("data", "fsdp")

# (path pattern, layout). The first pattern found at the end of a parameter's path decides; a parameter that none fits raises.
# "layers/" parameters have the stacked layers' axis in front, which is never split.
TRAIN_RULES = (
    (r"(embed|lm_head)/embedding", P("model", "fsdp")),
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/kernel", P(None, "fsdp", "model")),
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/bias", P(None, "model")),
    (r"layers/.*(o_proj|down_proj)/kernel", P(None, "model", "fsdp")),
    (r"layers/.*(o_proj|down_proj)/bias", P()),
    # Adapters lie as the sides of the kernel that they touch; their rank is never split.
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_a", P(None, "fsdp", None)),
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_b", P(None, None, "model")),
    (r"layers/.*(o_proj|down_proj)/lora_a", P(None, "model", None)),
    (r"layers/.*(o_proj|down_proj)/lora_b", P(None, None, "fsdp")),
    (r"layers/.*norm/scale", P()),
    (r"norm/scale", P()),
    (r"score/kernel", P("fsdp", None)),
    # An encoder's. Its words are not split over `model`: DeBERTa-v3 has 128,100 of them.
    (r"(words|places|relative)/embedding", P(None, "fsdp")),
    (r"embed_proj/kernel", P("fsdp", None)),
    (r"conv/kernel", P(None, "fsdp", "model")),
    (r"pooler/kernel", P("fsdp", "model")),
    (r"(conv|pooler|score)/bias", P()),
    (r"(layers/)?\w+_norm/(scale|bias)", P()),
    (r"count", P()),  # the optimizer's
)
# Decoding reads every weight once a token: nothing is split along fsdp, so that nothing is gathered inside the loop.
DECODE_RULES = (
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


def make_mesh(shape: MeshShape, devices=None) -> Mesh:
    """The mesh over all devices. Raises UserError where the sizes do not multiply to their number."""
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(shape, axis) for axis in AXES}
    known = int(np.prod([size for size in sizes.values() if size != -1]))
    free = [axis for axis, size in sizes.items() if size == -1]
    if free and len(devices) % known == 0:
        sizes[free[0]] = len(devices) // known
    if int(np.prod(list(sizes.values()))) != len(devices):
        wanted = " x ".join(f"config.mesh.{axis}={getattr(shape, axis)}" for axis in AXES)
        raise UserError(f"{wanted}: must multiply to the number of devices, {len(devices)}")
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def row_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def check_architecture(mesh: Mesh, architecture, vocabulary: bool = True) -> None:
    """Raises UserError where the mesh cannot split the model's dimensions evenly. `vocabulary`: whether it is split too."""
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
                    f"config.mesh.{axis}={mesh.shape[axis]}: must divide {name} of the model, {size}"
                )


def tree_shardings(mesh: Mesh, tree, rules):
    """A NamedSharding for each leaf of `tree` (arrays or shapes), by its path. Raises ValueError for a path without a rule."""

    def sharding(path, leaf):
        name = "/".join(
            str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))
            for part in path
        )
        for pattern, spec in rules:
            if re.search(rf"(^|/){pattern}$", name):
                return NamedSharding(mesh, spec)
        raise ValueError(
            f"{name}: no partition rule for this parameter of shape {leaf.shape}; add one to sharding.py"
        )

    return jax.tree_util.tree_map_with_path(sharding, tree)


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Splits the axis that counts rows or samples."""
    return NamedSharding(mesh, P(*[None] * axis, ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def constrain_rows(x, axis: int = 0):
    """Inside a compiled function: keeps the rows of `x` split. Without a mesh in the context it does nothing."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    rest = [P.UNCONSTRAINED] * (x.ndim - axis - 1)  # what is split over `model` stays so
    return jax.lax.with_sharding_constraint(x, P(*[None] * axis, ROWS, *rest))


def split_rows(function):
    """`function` of (params, rows, rows, key, any_shard), run by each shard of rows for itself.

    What it returns has rows in front. Its loops may differ in length from shard to shard, unless matrices are split over
    `model`: the devices must then meet in every product, and any_shard(bool) tells of the others. Without a mesh in the
    context it is `function`.
    """

    def run(params, *rows_and_key):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return function(params, *rows_and_key)
        in_step = mesh.shape["model"] > 1
        split = functools.partial(function, any_shard=_any_shard) if in_step else function
        specs = (P(), P(ROWS), P(ROWS), P())
        return jax.shard_map(
            split, in_specs=specs, out_specs=P(ROWS), axis_names=set(ROWS), check_vma=False
        )(params, *rows_and_key)

    return run


def _any_shard(condition):
    return jax.lax.pmax(condition.astype(np.int32), ROWS) > 0


def split_heads(attention):
    """`attention` of (q, k, v [R, L, heads, d], an array [R, ...] or None), run by each device for its rows and heads.

    Inside `split_rows`, where rows are split already, for its heads.
    """

    def run(q, k, v, of_rows):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return attention(q, k, v, of_rows)
        first = None if set(ROWS) <= set(mesh.manual_axes) else ROWS
        heads = P(first, None, "model", None)
        return jax.shard_map(
            attention,
            in_specs=(heads, heads, heads, P(first)),
            out_specs=heads,
            check_vma=False,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        )(q, k, v, of_rows)

    return run


def split_by_device(x_RxL):
    """Inside a compiled function: [R, L, ...] -> [G, R * L / G, ...], G the parts that the mesh splits rows into."""
    mesh = jax.sharding.get_abstract_mesh()
    groups = 1 if mesh.empty else row_shards(mesh)
    return constrain_rows(x_RxL.reshape(groups, -1, *x_RxL.shape[2:]))


def constrain_tree(tree, rules):
    """Inside a compiled function: every leaf where the table says. Without a mesh in the context it does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    return (
        tree
        if mesh.empty
        else jax.lax.with_sharding_constraint(tree, tree_shardings(mesh, tree, rules))
    )


def place(tree, sharding: NamedSharding):
    """Puts host arrays, the same in every process, on the mesh; each process hands over the part its devices hold.

    All that a step sends to the mesh goes through here, so that `jax.transfer_guard` finds what is sent unawares.
    """

    def put(x):
        return jax.make_array_from_callback(
            np.shape(x), sharding, lambda index: np.asarray(x)[index]
        )

    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(put, tree)


def to_host(array: jax.Array) -> np.ndarray:
    """The whole array, in every process."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def from_local_rows(mesh: Mesh, indices, values, total: int) -> jax.Array:
    """The array [total, ...] split by rows, each process giving the rows that `local_rows` gave it."""
    whole = np.zeros((total, *np.shape(values)[1:]), np.asarray(values).dtype)
    whole[indices] = values
    return place(whole, rows(mesh))


def all_rows(mesh: Mesh, indices, values, total: int) -> np.ndarray:
    """What all processes together hold, [total, ...], on the host of each; each gives the rows that `local_rows` gave it."""
    if jax.process_count() > 1:
        return to_host(from_local_rows(mesh, indices, values, total))
    whole = np.zeros((total, *np.shape(values)[1:]), np.asarray(values).dtype)
    whole[indices] = values
    return whole


def local_rows(array: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The rows that this process's devices hold: (indices int [r], values [r, ...]), each once, in order."""
    parts = {}
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0 if shard.index else 0
        parts.setdefault(start, shard)
    values = [np.asarray(parts[start].data) for start in sorted(parts)]
    indices = [
        start + np.arange(len(value)) for start, value in zip(sorted(parts), values, strict=True)
    ]
    return np.concatenate(indices), np.concatenate(values)
