"""Impossible meshes are refused with both numbers, and slices are put on the right axes."""

import dataclasses
import math
import re
import types

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError
from jax_ppo.runtime import meshes


@pytest.mark.parametrize("shape", [{"data": 3}, {"model": 3}, {"fsdp": 2, "data": 1}])
def test_impossible_meshes(shape):
    with pytest.raises(UserError, match="number of devices, 8"):
        meshes.make_mesh(MeshShape(**shape), jax.devices()[:8])


def test_free_axis_takes_what_is_left():
    ones = {"stage": 1, "fsdp": 1, "expert": 1, "context": 1}
    mesh = meshes.make_mesh(MeshShape(model=2), jax.devices()[:8])
    assert mesh.shape == ones | {"data": 4, "model": 2}
    shape = MeshShape(data=1, fsdp=2, model=-1)
    assert meshes.make_mesh(shape, jax.devices()[:8]).shape["model"] == 4


def devices_in_slices(slices, per_slice):
    """Return stand-ins for devices, in an order that mixes slices."""
    return [
        types.SimpleNamespace(
            id=number,
            slice_index=number % slices,
            process_index=number % slices,
            platform="gpu",
            device_kind="NVIDIA H100 80GB HBM3",
        )
        for number in range(slices * per_slice)
    ]


@pytest.mark.parametrize(
    ("sizes", "slices", "slow_axes"),
    [((2, 2, 2), 2, (0,)), ((1, 4, 2), 2, (1,)), ((2, 4, 1), 4, (0, 1)), ((1, 1, 8), 2, (2,))],
)
def test_slices_are_split_along_the_axes_that_exchange_least(sizes, slices, slow_axes):
    devices = devices_in_slices(slices, math.prod(sizes) // slices)
    arranged = meshes.arrange_slices(sizes, devices)
    assert arranged.shape == sizes
    slice_of = np.vectorize(lambda device: device.slice_index)(arranged)
    for axis in range(3):
        # Along a fast axis all devices belong to one slice.
        assert (np.ptp(slice_of, axis).max() == 0) == (axis not in slow_axes)
    assert {device.id for device in arranged.flat} == set(range(len(devices)))


def test_slices_must_be_of_one_size():
    devices = devices_in_slices(2, 4)[:-1]
    with pytest.raises(UserError, match="slices of 4, 3 devices"):
        meshes.arrange_slices((7, 1, 1), devices)


def test_model_that_the_mesh_cannot_split():
    """Heads of Qwen2.5-0.5B, 14 and 2, are padded and copied; an MLP width is not."""
    heads = {"num_heads": 14, "num_kv_heads": 2, "head_dim": 4}
    architecture = dataclasses.replace(tiny.ARCHITECTURE, **heads)
    mesh = tiny.make_mesh(8, model=4)
    meshes.validate_architecture(mesh, architecture)
    meshes.validate_architecture(mesh, dataclasses.replace(architecture, vocab_size=33))
    narrow = dataclasses.replace(architecture, intermediate_size=30)
    message = (
        "config.mesh.model=4: must divide the model's MLP width (30); on 8 devices it may be 1 or 2"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        meshes.validate_architecture(mesh, narrow)
    # An encoder's heads are split, and its vocabulary is not.
    odd = dataclasses.replace(architecture, num_kv_heads=14, vocab_size=31)
    message = "config.mesh.model=4: must divide the model's attention heads (14); on 8 devices"
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        meshes.validate_architecture(mesh, odd, is_encoder=True)
    hidden = dataclasses.replace(tiny.ARCHITECTURE, hidden_size=20)
    with pytest.raises(UserError, match="mesh.fsdp=8: must divide the model's hidden size .20."):
        meshes.validate_architecture(tiny.make_mesh(8, fsdp=8), hidden)
