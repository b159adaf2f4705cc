"""Each row belongs to one process, and rows come back from the mesh as they went there."""

import types

import numpy as np
import pytest

import tiny
from jax_ppo.runtime import placement, sharding


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
    monkeypatch.setattr(placement, "_shares_rows", lambda mesh, total: True)
    mesh = tiny.make_mesh(8, data=2, model=4)
    values = (np.arange(20).reshape(10, 2) % 3).astype(dtype)
    exchanged = placement.from_local_rows(mesh, np.arange(10), values, 10)
    assert exchanged.sharding.is_equivalent_to(sharding.rows(mesh), 2) and exchanged.dtype == dtype
    np.testing.assert_array_equal(np.asarray(exchanged), values)


@pytest.mark.parametrize("shares", [False, True])
def test_rows_that_the_devices_do_not_divide_are_whole_on_each(monkeypatch, shares):
    """Eight devices are responsible for 1, 1, ..., 1 and 0 of seven rows, and exchange them."""
    monkeypatch.setattr(placement, "_shares_rows", lambda mesh, total: shares)
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
