"""The partition table is strict, and impossible meshes are refused with both numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError
from jax_ppo.runtime import sharding


def test_a_parameter_without_a_rule_raises():
    with pytest.raises(ValueError, match="layers/attention/new_proj/kernel: no partition rule"):
        sharding.tree_shardings(
            tiny.make_mesh(),
            {"layers": {"attention": {"new_proj": {"kernel": jnp.zeros((2, 4, 4))}}}},
            sharding.TRAIN_RULES,
        )


def test_parameters_are_split():
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    state = tiny.make_state(tiny.config(), mesh)
    kernel = state.actor["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (1, 8, 16)  # [1, 16, 32] over fsdp 2, model 2
    moment = state.actor_optimizer[1].mu["layers"]["mlp"]["up_proj"]["kernel"]
    assert moment.sharding == kernel.sharding


@pytest.mark.parametrize(
    ("shape", "devices"), [({"data": 3}, 8), ({"model": 3}, 8), ({"fsdp": 2, "data": 1}, 8)]
)
def test_impossible_meshes(shape, devices):
    with pytest.raises(UserError, match=rf"number of devices, {devices}"):
        sharding.make_mesh(MeshShape(**shape), jax.devices()[:devices])


def test_free_axis_takes_what_is_left():
    assert dict(sharding.make_mesh(MeshShape(model=2), jax.devices()[:8]).shape) == {
        "data": 4,
        "fsdp": 1,
        "model": 2,
    }


def test_model_that_the_mesh_cannot_split():
    mesh = tiny.make_mesh(8, model=8)
    with pytest.raises(
        UserError, match="config.mesh.model=8: must divide attention heads of the model, 4"
    ):
        sharding.validate_architecture(mesh, tiny.ARCHITECTURE)


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "model": 4}, {"fsdp": 4, "model": 2}])
def test_local_rows_give_each_row_once_in_order(shape):
    mesh = tiny.make_mesh(8, **{"data": 1} | shape)
    values = np.arange(32).reshape(16, 2)
    indices, rows = sharding.local_rows(sharding.place(values, sharding.rows(mesh)))
    assert indices.tolist() == list(range(16))
    np.testing.assert_array_equal(rows, values)
    np.testing.assert_array_equal(
        np.asarray(sharding.from_local_rows(mesh, indices, rows, 16)), values
    )
