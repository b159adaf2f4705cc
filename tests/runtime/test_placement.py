"""Each row belongs to one process, and rows come back from the mesh as they went there."""

import types

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.runtime import placement, sharding
from whole_run import finish, start_processes


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "model": 4}, {"fsdp": 4, "model": 2}])
def test_local_rows_give_each_row_once_in_order(shape):
    mesh = tiny.make_mesh(8, **{"data": 1} | shape)
    values = np.arange(32).reshape(16, 2)
    indices, rows = placement.local_rows(placement.place(values, sharding.rows(mesh)))
    assert indices.tolist() == list(range(16))
    np.testing.assert_array_equal(rows, values)
    np.testing.assert_array_equal(
        np.asarray(placement.from_local_rows(mesh, indices, rows, 16)), values
    )


def test_each_row_belongs_to_one_of_the_processes_that_hold_copies_of_it():
    """Two groups of five rows, four copies each: the devices of a group take 2, 2, 1 and 0 rows."""
    mesh = tiny.make_mesh(8, data=2, model=4)
    values = np.arange(20).reshape(10, 2)
    array = placement.place(values, sharding.rows(mesh))
    owned = []
    for own_devices in ({0, 1, 4, 5}, {2, 6}, {3, 7}):
        seen_by_process = types.SimpleNamespace(
            shape=array.shape,
            sharding=array.sharding,
            addressable_shards=[
                shard for shard in array.addressable_shards if shard.device.id in own_devices
            ],
        )
        indices, rows = placement.local_rows(seen_by_process)
        np.testing.assert_array_equal(rows, values[indices])
        owned.append(indices.tolist())
    assert owned == [[0, 1, 2, 3, 5, 6, 7, 8], [4, 9], []]


@pytest.mark.parametrize("dtype", [np.float32, np.int32, bool])
def test_rows_that_processes_share_out_are_exchanged(dtype, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = tiny.make_mesh(8, data=2, model=4)
    values = (np.arange(20).reshape(10, 2) % 3).astype(dtype)
    exchanged = placement.from_local_rows(mesh, np.arange(10), values, 10)
    assert exchanged.sharding.is_equivalent_to(sharding.rows(mesh), 2) and exchanged.dtype == dtype
    np.testing.assert_array_equal(np.asarray(exchanged), values)


@pytest.mark.parametrize("shares", [False, True])
def test_rows_that_the_devices_do_not_divide_are_whole_on_each(monkeypatch, shares):
    """Eight devices are responsible for 1, 1, ..., 1 and 0 of seven rows, and exchange them."""
    monkeypatch.setattr(jax, "process_count", lambda: 1 + shares)
    mesh = tiny.make_mesh(8, data=4, model=2)
    values = np.arange(14).reshape(7, 2)
    array = placement.place(values, sharding.batch_rows(mesh, 7))
    indices, own = placement.local_rows(array)
    assert indices.tolist() == list(range(7))
    joined = placement.from_local_rows(mesh, indices, own, 7)
    assert joined.sharding.is_equivalent_to(array.sharding, 2) and joined.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(joined), values)


def test_accelerators_read_host_memory_and_a_cpu_only_where_it_lists_it():
    def mesh(platform, *kinds):
        memories = [types.SimpleNamespace(kind=kind) for kind in kinds]
        device = types.SimpleNamespace(platform=platform, addressable_memories=lambda: memories)
        return types.SimpleNamespace(devices=np.array([device], dtype=object))

    # A device that is only compiled for lists no memories.
    assert placement.host_memory_kind(mesh("tpu")) == placement.PINNED_HOST
    assert placement.host_memory_kind(mesh("cpu", "unpinned_host")) is None
    assert placement.host_memory_kind(mesh("cpu", "pinned_host")) == placement.PINNED_HOST


# One of two processes with four devices each.
COPIES = """
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_ppo.config.rollout_options import RolloutMesh
from jax_ppo.config.schema import MeshShape
from jax_ppo.runtime import meshes, placement, sharding

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))


def assert_copied(copied, values, layout):
    assert copied.sharding.is_equivalent_to(layout, copied.ndim)
    for shard in copied.addressable_shards:
        is_key = jax.numpy.issubdtype(copied.dtype, jax.dtypes.prng_key)
        part = jax.random.key_data(shard.data) if is_key else shard.data
        np.testing.assert_array_equal(part, values[shard.index])


exchanges = 0
for decoding, shape, rollout_shape in (
    (2, {}, {}),
    (4, {}, {"model": 2}),
    (4, {}, {"model": 4}),
    (4, {"model": 4}, {}),
    (6, {}, {}),
):
    mesh = meshes.make_mesh(MeshShape(**shape), decoding=decoding)
    rollout_mesh = meshes.make_rollout_mesh(mesh, RolloutMesh(devices=decoding, **rollout_shape))
    assert all(len(x.local_devices) == x.size // 2 for x in (mesh, rollout_mesh))
    with jax.set_mesh(mesh):
        values = np.arange(96, dtype=np.float32).reshape(8, 12)
        for spec in (PartitionSpec(), PartitionSpec("model"), PartitionSpec(None, "data")):
            layout = NamedSharding(rollout_mesh, spec)
            array = placement.place(values, sharding.replicated(mesh))
            assert_copied(placement.copy_whole(array, layout), values, layout)
        for rows in (12, 8, 5):
            here, there = (sharding.batch_rows(x, rows) for x in (mesh, rollout_mesh))
            exchanges += not placement._holds_rows(here, there, (rows,))
            values = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
            array = placement.copy_rows(placement.place(values, here), there)
            assert_copied(array, values, there)
            assert_copied(placement.copy_rows(array, here), values, here)
            key = jax.random.key(1, impl="rbg")  # not the default
            keys = jax.jit(lambda: jax.random.split(key, rows), out_shardings=here)()
            values = placement.to_host(jax.random.key_data(keys))
            array = placement.copy_rows(keys, there)
            assert array.dtype == keys.dtype
            assert_copied(array, values, there)
            # Between layouts on the same devices, as with `rollout.mesh.model`.
            everywhere = sharding.replicated(mesh)
            assert_copied(placement.copy_rows(keys, everywhere), values, everywhere)
            assert_copied(placement.copy_rows(array, here), values, here)
print("exchanges", exchanges)
"""


@pytest.mark.slow
def test_each_process_copies_to_its_other_devices_what_they_need(coordinator_address):
    processes = start_processes("-c", COPIES, coordinator_address, own="01", devices=4)
    # Of 12 and 8 rows, where one group of devices decodes all, and of 8, which six cannot split.
    assert finish(processes)[0].splitlines()[-1] == "exchanges 3"
