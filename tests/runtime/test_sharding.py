"""The partition table is strict, and copied heads are read by the same heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.runtime import sharding
from jax_ppo.runtime.parallelism.heads import copy_kv_heads, num_split_kv_heads


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


@pytest.mark.parametrize(("query_heads", "heads"), [(4, 1), (4, 2), (12, 6)])
def test_copied_key_heads_are_read_by_the_same_query_heads(query_heads, heads):
    """Query head h reads key head h // (H / K), before and after."""
    keys = np.arange(heads)[None, None, :, None] * np.ones((2, 3, 1, 2))
    with jax.set_mesh(tiny.make_mesh(8, model=4)):
        copied = np.asarray(jax.jit(copy_kv_heads)(keys))
        assert copied.shape[2] % 4 == 0 and copied.shape[2] == num_split_kv_heads(heads)
    for h in range(query_heads):
        read = copied[:, :, h // (query_heads // copied.shape[2])]
        np.testing.assert_array_equal(read, keys[:, :, h // (query_heads // heads)])
