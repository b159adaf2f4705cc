"""Transfers between hosts and the mesh: whole arrays, and rows divided among processes."""

import collections
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jax_ppo.runtime.compiled_programs import runs_on_shapes
from jax_ppo.runtime.meshes import row_shards
from jax_ppo.runtime.sharding import batch_rows, copied_rows, replicated

PINNED_HOST = "pinned_host"  # host memory that accelerators copy from and to by themselves


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Put host arrays, the same in every process, on the mesh; in `run_on_shapes`, return shapes.

    Each process transfers the part that its devices hold. Everything that a step sends to the mesh
    passes through here, so that `jax.transfer_guard` catches accidental transfers.
    """
    if runs_on_shapes():
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), tree
        )

    def put(x: Any) -> jax.Array:
        return jax.make_array_from_callback(
            np.shape(x), sharding, lambda index: np.asarray(x)[index]
        )

    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(put, tree)


def host_memory_kind(mesh: Mesh) -> str | None:
    """Return the kind of host memory that the mesh's devices read directly, `None` without one."""
    device = mesh.devices.flat[0]
    # Accelerators have it; a device that programs are only compiled for lists no memories.
    if device.platform != "cpu":
        return PINNED_HOST
    kinds = {memory.kind for memory in device.addressable_memories()}
    return PINNED_HOST if PINNED_HOST in kinds else None


def in_host_memory(shapes: Any, mesh: Mesh) -> Any:
    """Return the shapes with shardings in `host_memory_kind`; without one, unchanged."""
    kind = host_memory_kind(mesh)
    if kind is None:
        return shapes
    return jax.tree.map(lambda x: x.update(sharding=x.sharding.with_memory_kind(kind)), shapes)


def is_in_host_memory(x: Any) -> bool:
    """Return whether a shape, or an array inside a compiled function, is in the host's memory."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding.memory_kind == PINNED_HOST
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """Copy what is in the host's memory to the devices, inside a compiled function."""
    space = jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, space) if is_in_host_memory(x) else x, tree)


def fetch(tree: Any) -> Any:
    """Copy arrays or shapes in the host's memory to the devices, outside of compiled functions."""

    def copy(x: Any) -> Any:
        if x.sharding.memory_kind != PINNED_HOST:
            return x
        layout = x.sharding.with_memory_kind(None)
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=layout)
        return jax.device_put(x, layout)

    return jax.tree.map(copy, tree)


def to_memory_of(tree: Any, like: Any) -> Any:
    """Move `tree` to the memory of `like`, host's or devices', inside a compiled function."""
    is_in_host = any(map(is_in_host_memory, jax.tree.leaves(like)))
    return jax.device_put(tree, jax.memory.Space.Host) if is_in_host else tree


def to_host(array: jax.Array) -> np.ndarray:
    """Return the whole array, in every process; ones for a shape, which has no numbers."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return np.ones(array.shape, array.dtype)
    if array.is_fully_addressable or array.is_fully_replicated:
        return jax.device_get(array)
    return multihost_utils.process_allgather(array, tiled=True)


def copy_whole(array: jax.Array, layout: NamedSharding) -> jax.Array:
    """Copy an array or shape, whole on each device, to other devices of the same processes."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(sharding=layout)
    # An array on one device is cut and copied from there; one on several, through the host.
    whole = array.addressable_data(0)
    if layout.is_fully_addressable:
        return jax.device_put(whole, layout)
    own = Mesh([*whole.devices()], "device")
    # The programs that cut it run on its device alone; they get indices from the host.
    with jax.set_mesh(own), jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(array.shape, layout, lambda index: whole[index])


def copy_rows(array: jax.Array, layout: NamedSharding) -> jax.Array:
    """Copy an array or shape, whose rows may be split, to another mesh of the same processes.

    With several processes it passes through the host of each, unless the devices are the same. If a
    process needs rows of others, a program on the array's devices exchanges them first: every
    process must call this at the same point among the programs on these devices.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(sharding=layout)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        # JAX lays out the data of keys for other processes' devices, too, but not keys.
        data = copy_rows(jax.random.key_data(array), layout)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    held = array.sharding
    if layout.is_fully_addressable or held.device_set == layout.device_set:
        return jax.device_put(array, layout)
    assert isinstance(held, NamedSharding) and isinstance(held.mesh, Mesh)
    if not held.is_fully_replicated and not _holds_rows(held, layout, array.shape):
        everywhere = replicated(held.mesh)
        with jax.set_mesh(held.mesh):
            array = jax.jit(lambda x: x, out_shardings=everywhere)(array)
    host = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        host[shard.index] = shard.data
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(array.shape, layout, lambda index: host[index])


@functools.cache
def _holds_rows(layout: NamedSharding, other: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Return whether each process holds in one layout the rows that it holds in another."""

    def rows_of_processes(layout: NamedSharding) -> dict[int, set[int]]:
        rows = collections.defaultdict[int, set[int]](set)
        indices: Mapping[Any, tuple[slice, ...]] = layout.devices_indices_map(shape)
        for device, index in indices.items():
            rows[device.process_index].update(range(shape[0])[index[0]])
        return rows

    held = rows_of_processes(layout)
    return all(rows <= held[process] for process, rows in rows_of_processes(other).items())


def from_local_rows(mesh: Mesh, indices: np.ndarray, values: Any, total: int) -> jax.Array:
    """Return the array [total, ...] in the layout of `batch_rows`, from the rows of each process.

    Every process must call it, with `values` [r, ...] at `indices` int [r] as `local_rows` returned
    them. Where processes hold copies of each other's rows, the devices exchange them.
    """
    layout = batch_rows(mesh, total)
    if jax.process_count() == 1:
        return place(_scatter_rows(indices, values, total), layout)
    groups = 1 if layout.is_fully_replicated else row_shards(mesh)
    copies, size = mesh.size // groups, total // groups
    # Each group of rows is padded to equal parts, one per device that holds a copy of the group: a
    # device places only its part.
    values = np.asarray(values)
    padded_size = copies * -(-size // copies)
    padded = np.zeros((groups, padded_size, *values.shape[1:]), values.dtype)
    padded[indices // size, indices % size] = values
    parts = place(padded, copied_rows(mesh, groups))
    return _join_parts(parts, size=size, layout=layout)


@functools.partial(jax.jit, static_argnames=("size", "layout"))
def _join_parts(parts_GxN: jax.Array, *, size: int, layout: NamedSharding) -> jax.Array:
    """Return the first `size` rows of each group, [G * size, ...]."""
    joined = parts_GxN[:, :size].reshape(-1, *parts_GxN.shape[2:])
    return jax.lax.with_sharding_constraint(joined, layout)


def all_rows(mesh: Mesh, indices: np.ndarray, values: Any, total: int) -> np.ndarray:
    """Return all processes' rows, [total, ...], on the host of each; see `from_local_rows`."""
    # Through the mesh, since each process has only its rows.
    if jax.process_count() > 1:
        return to_host(from_local_rows(mesh, indices, values, total))
    return _scatter_rows(indices, values, total)


def _scatter_rows(indices: np.ndarray, values: Any, total: int) -> np.ndarray:
    """Return zeros [total, ...] with `values` at `indices`."""
    array = np.zeros((total, *np.shape(values)[1:]), np.asarray(values).dtype)
    array[indices] = values
    return array


def local_rows(array: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that this process is responsible for, in order.

    Each row of an array [B, ...] in the layout of `batch_rows` belongs to exactly one process;
    devices that hold copies of the same rows, as in tensor parallelism, divide these among
    themselves. Return (indices, int [r]; values, [r, ...]), where r may be 0.
    """
    holders = collections.Counter[int]()
    rank_of_device = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        start = index[0].start or 0
        rank_of_device[device] = holders[start]
        holders[start] += 1
    shards: dict[int, Any] = {}
    ranks = collections.defaultdict(set)
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0
        # Of several copies in this process one is enough.
        shards.setdefault(start, shard)
        ranks[start].add(rank_of_device[shard.device])
    indices: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for start in sorted(shards):
        copy = np.asarray(shards[start].data)
        rank_of_row = np.arange(len(copy)) // -(-len(copy) // holders[start])
        assigned = np.flatnonzero(np.isin(rank_of_row, list(ranks[start])))
        indices.append(start + assigned)
        values.append(copy[assigned])
    return np.concatenate(indices), np.concatenate(values)
