"""The partition table is strict, and parameters and optimizer states are split by it."""

import jax.numpy as jnp
import pytest

import tiny
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
    moment = state.optimizers["actor"][1].mu["layers"]["mlp"]["up_proj"]["kernel"]
    assert moment.sharding == kernel.sharding


@pytest.mark.parametrize("name", ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
def test_scales_of_quantized_kernels_have_a_rule(name):
    scales = {"layer_0": {"attention": {name: {"kernel_scale": jnp.zeros(4)}}}}
    sharding.tree_shardings(tiny.make_mesh(), scales, sharding.DECODE_RULES)
