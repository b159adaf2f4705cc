"""Meshes: the devices of a run, arranged along named axes.

`data` replicates the parameters; `fsdp` splits parameters and optimizer states, which are gathered
layer by layer; `expert` divides the experts, and splits other parameters as `fsdp` does; so does
`context`, whose devices hold parts of the same packed rows; `model` splits each matrix product
(tensor parallelism); `stage` splits the layers. What the devices of an axis compute and exchange is
the subject of a file in parallelism/.

A further axis is a field of `config.schema.MeshShape` and named in `AXES`; in `ROWS` if it splits
the rows of a batch, and in the rules of the parameters that it splits (sharding.py).
"""

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jax_ppo.config.rollout_options import RolloutMesh
from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError

# In the order of the devices: neighbours exchange the most, stages the least.
AXES = ("stage", "data", "fsdp", "expert", "context", "model")
_AUTO = (AxisType.Auto,) * len(AXES)
# The axes that split the rows of a batch; the parts of a row are on neighbouring devices.
ROWS = ("stage", "data", "fsdp", "expert", "context")
# Those that split parameters, which are gathered layer by layer. Experts are split over `expert` in
# another way: they are not gathered over it.
WEIGHTS = ("fsdp", "expert", "context")
EXPERT_WEIGHTS = ("fsdp", "context")


def make_mesh(
    shape: MeshShape,
    devices: list[jax.Device] | None = None,
    decoding: int = 0,
    processes: int | None = None,
) -> Mesh:
    """Return the mesh over these devices, by default all.

    At most one size is -1 and takes what the others leave. The last devices of each of the
    `processes`, `decoding` in all, are left to `make_rollout_mesh`. Raise `UserError` if sizes do
    not multiply to the number of devices, slices differ in it, or so many cannot be left.
    """
    if devices is None:
        devices = jax.devices()
    if decoding:
        devices = _leave_devices(devices, decoding, processes or jax.process_count())
    sizes = {axis: getattr(shape, axis) for axis in AXES}
    known = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if free and len(devices) % known == 0:
        sizes[free[0]] = len(devices) // known
    if math.prod(sizes.values()) != len(devices):
        wanted = " x ".join(f"config.mesh.{axis}={getattr(shape, axis)}" for axis in AXES)
        raise UserError(f"{wanted}: must multiply to the number of devices, {len(devices)}")
    lengths = tuple(sizes.values())
    if decoding:
        # JAX would arrange whole slices of TPUs only.
        return Mesh(np.reshape(devices, lengths), AXES, axis_types=_AUTO)
    if len(_devices_per_slice(devices)) > 1:
        return Mesh(arrange_slices(lengths, devices), AXES, axis_types=_AUTO)
    return jax.make_mesh(lengths, AXES, axis_types=_AUTO, devices=devices)


def _leave_devices(devices: list[jax.Device], count: int, processes: int) -> list[jax.Device]:
    """Return all but the last `count` devices, as many of each process; may raise `UserError`."""
    # Weights are copied to the devices that are left inside each process alone.
    option = f"config.rollout.mesh.devices={count}"
    if count % processes:
        raise UserError(
            f"{option}: must be a multiple of the number of processes, {processes}, each of which "
            "gives the last of its devices"
        )
    if count >= len(devices):
        raise UserError(
            f"{option}: expected fewer than the {len(devices)} devices of the run, as some must "
            "learn"
        )
    if processes == 1:
        # Not the processes that devices name: for a plan's TPUs the compiler guesses them.
        return devices[:-count]
    each = len(devices) // processes
    kept = each - count // processes
    return [x for i, x in enumerate(by_process(devices)) if i % each < kept]


def by_process(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """Return the devices in the order of their processes."""
    return sorted(devices, key=lambda device: device.process_index)


def _devices_per_slice(devices: Sequence[jax.Device]) -> collections.Counter[int]:
    """Count the devices of each TPU slice or GPU host, which a fast network connects."""
    return collections.Counter(getattr(device, "slice_index", 0) for device in devices)


def arrange_slices(sizes: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """Return the devices of several slices in the shape of the mesh.

    The slow network between slices is left to the first of the axes, which exchange the least: with
    `data` = the number of slices, nothing but gradients. `sizes` are in the order of `AXES`. Raise
    `UserError` if slices have different numbers of devices.
    """
    per_slice = _devices_per_slice(devices)
    slices = len(per_slice)
    if len(set(per_slice.values())) > 1:
        numbers = ", ".join(str(per_slice[index]) for index in sorted(per_slice))
        raise UserError(f"slices of {numbers} devices: must have the same number of devices")
    across: list[int] = []
    for size in sizes:
        # The greatest part of the remaining slices that divides this axis; what is left over
        # divides the axes that follow.
        across.append(math.gcd(size, slices // math.prod(across)))
    within = [size // outer for size, outer in zip(sizes, across, strict=True)]
    # Some TPUs have physical axes that a mesh of three axes must split.
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def make_rollout_mesh(mesh: Mesh, shape: RolloutMesh) -> Mesh:
    """Return the mesh to decode on: `mesh`, or another over its devices in the same order.

    With `shape.devices` it has that many of the devices that `make_mesh` has left. Neighbours in
    that order split a matrix. Raise `UserError` unless the sizes multiply to their number.
    """
    devices, number = mesh.devices, f"the number of devices, {mesh.size}"
    if shape.devices:
        used = set(devices.flat)
        left = [x for x in devices.flat[0].client.devices() if x not in used]
        devices = np.array(by_process(left)[: shape.devices])
        number = f"config.rollout.mesh.devices={shape.devices}"
    elif shape.model is None:
        return mesh
    model = shape.model or 1
    data = devices.size // model if shape.data == -1 else shape.data
    if data * model != devices.size:
        raise UserError(
            f"config.rollout.mesh.data={shape.data} x config.rollout.mesh.model={model}: must "
            f"multiply to {number}"
        )
    sizes = {"data": data, "model": model}
    devices = devices.reshape([sizes.get(axis, 1) for axis in AXES])
    return Mesh(devices, AXES, axis_types=_AUTO)


def shares_devices(mesh: Mesh, other: Mesh) -> bool:
    """Return whether two meshes have devices in common."""
    return not set(mesh.devices.flat).isdisjoint(other.devices.flat)


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of parts that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def rows_per_shard(mesh: Mesh | AbstractMesh, count: int) -> int:
    """Return the rows of each part that `count` rows are split into, padding included."""
    return -(-count // row_shards(mesh))


def split_copies(mesh: Mesh | AbstractMesh) -> MeshShape:
    """Return the shape in which `fsdp` also has the devices of `data`: no copies of parameters."""
    copies = {"data": 1, "fsdp": mesh.shape["data"] * mesh.shape["fsdp"]}
    return MeshShape(**{axis: mesh.shape[axis] for axis in AXES} | copies)


def row_parts(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of devices that a packed row is split over."""
    return int(mesh.shape["context"])


def gathers_weights(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether devices gather the parameters for each pass, layer by layer."""
    return any(mesh.shape[axis] > 1 for axis in WEIGHTS)


def needs_large_micro_batches(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether each micro-batch has a fixed cost: weights to gather, stages to fill."""
    return gathers_weights(mesh) or mesh.shape["stage"] > 1


def vocabulary_axis(mesh: Mesh | AbstractMesh, vocab_size: int) -> str | None:
    """Return the axis that splits the vocabulary; `None` if the size is not divisible."""
    return None if vocab_size % mesh.shape.get("model", 1) else "model"


def validate_architecture(
    mesh: Mesh, architecture: Any, is_encoder: bool = False, option: str = "config.mesh"
) -> None:
    """Raise `UserError` if the mesh cannot split the model's dimensions evenly.

    A decoder's heads may be uneven (`pad_query_heads`, `copy_kv_heads`). Messages name `option`.
    """
    a = architecture
    # The dimensions that each axis splits, by their names in messages; 0 if the model has none.
    sizes = {
        "model": {
            "width of the queries": a.num_heads * a.head_dim,
            "width of the keys": a.num_kv_heads * a.head_dim,
            "MLP width": a.intermediate_size,
        },
        "fsdp": {"hidden size": a.hidden_size},
    }
    if is_encoder:
        sizes["model"]["attention heads"] = a.num_heads
    else:
        _require_whole(mesh, architecture, option)
        convolution_heads = a.num_kv_heads if a.block == "convolution" else 0
        sizes["model"] |= {
            "width of the shared expert": a.shared_expert_size,
            "key heads of a Gated DeltaNet": a.delta_key_heads,
            "key heads of attention with short convolutions": convolution_heads,
            "width of the queries without a sliding window": a.num_heads * a.global_head_dim,
            "width of the keys without a sliding window": a.global_kv_heads * a.global_head_dim,
            "width of the values": a.num_heads * a.value_head_dim,
            "width of the MLP without experts": a.dense_size,
        }
        sizes["fsdp"] |= {
            "width of the embeddings of layers": a.num_layers * a.per_layer_size,
            "width of the latents": a.latent_size,
            "width of the queries' latents": a.query_latent_size or 0,
        }
        sizes["stage"] = {"number of layers": a.num_layers}
        sizes["expert"] = {"number of experts": a.num_experts}
    for axis, dimensions in sizes.items():
        factors = [axis]
        if axis == "fsdp":
            # Further axes split the parameters in the same way.
            factors += [other for other in WEIGHTS[1:] if mesh.shape[other] > 1]
        parts = math.prod(mesh.shape[factor] for factor in factors)
        indivisible = [f"{name} ({size})" for name, size in dimensions.items() if size % parts]
        if indivisible:
            common = math.gcd(mesh.size, *dimensions.values())
            possible = [size for size in range(1, common + 1) if common % size == 0]
            name = " x ".join(f"{option}.{factor}" for factor in factors)
            raise UserError(
                f"{name}={parts}: must divide the model's {' and '.join(indivisible)}; "
                f"on {mesh.size} devices it may be {' or '.join(map(str, possible))}"
            )


def _require_whole(mesh: Mesh, architecture: Any, option: str) -> None:
    """Raise `UserError` if the mesh splits what is only computed for whole sequences or models."""
    sinks = "the model has attention sinks, which are only computed for whole sequences"
    kinds = "some layers of the model {}, but stages need layers of one kind"
    states = (
        "the model has layers with a recurrent state, which are only computed for whole sequences "
        "and whole models"
    )
    has_states = any(architecture.linear_layers)
    for axis, is_whole, reason in (
        ("context", architecture.attention_sinks, sinks),
        ("stage", architecture.global_head_dim, kinds.format("have wider heads")),
        ("stage", any(architecture.dense_layers), kinds.format("have no experts")),
        ("context", has_states, states),
        ("stage", has_states, states),
    ):
        size = mesh.shape.get(axis, 1)
        if is_whole and size > 1:
            raise UserError(f"{option}.{axis}={size}: must be 1, as {reason}")
