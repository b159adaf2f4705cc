"""Devices that split the columns of the cache draw the samples of one, and gather no cache."""

import dataclasses

import jax
import numpy as np
import pytest

import tiny
from hlo import read_collectives
from jax_ppo.config.schema import RolloutMesh
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.runtime.parallelism.rows import split_rows
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.sampler.stages import cache_bytes_per_device, cache_shapes
from tiny_actor import ARCHITECTURE, Actor, T, make_prompts

OPTIONS = SamplingOptions(T, 1.0, n=2, eos_ids=(3, 7, 11), slots=3)


@pytest.fixture(scope="module")
def actor():
    """An actor whose first layer has a window of 5 tokens and whose scores have a soft cap."""
    return Actor(
        dataclasses.replace(
            ARCHITECTURE,
            vocab_size=68,
            sliding_window=5,
            local_layers=(True, False),
            attention_softcap=3.0,
        )
    )


@pytest.fixture(scope="module")
def expected(actor):
    return sampler_program(actor.decoded, OPTIONS)(
        actor.params, make_prompts(range(1, 17)), jax.random.key(0)
    )


# Three devices have room for 10 columns each, of which there are 28.
@pytest.mark.parametrize(
    ("program", "shape", "devices"),
    [
        pytest.param("tpu", RolloutMesh(context=2, model=2), 8, marks=pytest.mark.slow),
        pytest.param("cpu", RolloutMesh(context=3, model=1), 3, marks=pytest.mark.exhaustive),
    ],
)
def test_devices_that_split_the_cache_draw_the_samples_of_one(
    actor, expected, program, shape, devices
):
    mesh = meshes.make_rollout_mesh(tiny.make_mesh(devices), shape)
    rules = sharding.decode_rules(mesh, ARCHITECTURE.num_kv_heads)
    model = actor.decoded.clone(decoding=program)
    arguments = (
        jax.device_put(actor.params, sharding.tree_shardings(mesh, actor.params, rules)),
        placement.place(make_prompts(range(1, 17)), sharding.rows(mesh)),
        jax.device_put(jax.random.key(0), sharding.replicated(mesh)),
    )
    with jax.set_mesh(mesh):
        sampler = sampler_program(model, OPTIONS, split_rows)
        compiled = sampler.lower(*arguments).compile()
        rollout = compiled(*arguments)
    for name in ("responses", "lengths", "truncated"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name))
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=1e-5)
    # Sums over devices alone; none is larger than the hidden states of a prefill.
    collectives = read_collectives(compiled.as_text())
    assert {x.kind for x in collectives} == {"all-reduce"}
    prompts = make_prompts(range(1, 17)).tokens.shape[1]
    assert max(x.bytes for x in collectives) <= 4 * 2 * prompts * ARCHITECTURE.hidden_size


def test_each_device_has_its_part_of_the_cache(actor):
    mesh = meshes.make_rollout_mesh(tiny.make_mesh(8), RolloutMesh(context=4, model=1))
    prompts = jax.eval_shape(lambda: make_prompts(range(1, 17)))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        ((slots, stage),) = cache_shapes(actor.decoded, OPTIONS, prompts)
    width, group = OPTIONS.slots, stage[0][0].shape[0]
    S = prompts.tokens.shape[1] + T
    per_column = 2 * ARCHITECTURE.num_layers * ARCHITECTURE.num_kv_heads * ARCHITECTURE.head_dim * 4
    expected = per_column * (width * -(-S // 4) + group * prompts.tokens.shape[1])
    assert cache_bytes_per_device((slots, stage), mesh) == expected
