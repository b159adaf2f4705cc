"""The host is called once for all devices that have the same arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.runtime.meshes import ROWS
from jax_ppo.runtime.parallelism.rows import call_host

SHAPES = {
    "double": jax.ShapeDtypeStruct((2,), jnp.float32),
    "is_even": jax.ShapeDtypeStruct((2,), jnp.bool_),
}


def make_host(calls):
    def host(x):
        calls.append(np.asarray(x))
        return {"double": 2 * np.asarray(x), "is_even": np.asarray(x) % 2 == 0}

    return host


def test_without_a_mesh_the_host_is_called_once():
    calls = []
    result = jax.jit(lambda x: call_host(make_host(calls), SHAPES, x))(jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(result["double"], [2, 4])
    np.testing.assert_array_equal(result["is_even"], [False, True])
    assert len(calls) == 1


@pytest.mark.parametrize("shape", [{"data": 2, "model": 4}, {"fsdp": 4, "model": 2}], ids=str)
def test_devices_of_the_same_rows_call_the_host_once(shape):
    """Each shard of two rows calls once, whatever the number of devices along `model`."""
    calls = []
    parts = shape.get("data", 1) * shape.get("fsdp", 1)
    x = np.arange(2.0 * parts, dtype=np.float32)
    with jax.set_mesh(tiny.make_mesh(8, **{"data": 1} | shape)):
        on_own_rows = jax.shard_map(
            lambda rows: call_host(make_host(calls), SHAPES, rows),
            in_specs=jax.P(ROWS),
            out_specs=jax.P(ROWS),
            axis_names=set(ROWS),
            check_vma=False,
        )
        result = jax.device_get(jax.jit(on_own_rows)(x))
    np.testing.assert_array_equal(result["double"], 2 * x)
    np.testing.assert_array_equal(result["is_even"], x % 2 == 0)
    assert sorted(call[0] for call in calls) == list(range(0, 2 * parts, 2))
