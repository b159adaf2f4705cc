"""Decoding in stages draws the samples of one stage, with fewer slots where there is more room."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.config.schema import MeshShape
from jax_ppo.runtime import sharding
from jax_ppo.runtime.meshes import make_mesh
from jax_ppo.runtime.parallelism.rows import split_rows
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.sampler.slots import build_job, initial_state
from jax_ppo.sampler.stages import build_next_stage, stage_limits
from tiny_actor import ARCHITECTURE, Actor, make_prompts

LENGTHS = (5, 16, 1, 9, 2, 12, 7)
EOS = (3, 7, 11, 30)


@pytest.fixture(scope="module")
def actor(shallow_actor):
    return shallow_actor


@pytest.mark.parametrize(
    ("length", "longest", "limits"),
    [
        (None, 100, (100,)),
        (100, 100, (100,)),
        (200, 100, (100,)),
        (99, 100, (99, 100)),
        (30, 100, (30, 60, 100)),
        (25, 100, (25, 50, 100)),
    ],
)
def test_limits_double_up_to_the_longest_response(length, longest, limits):
    assert stage_limits(SamplingOptions(longest, 1.0, stage_length=length)) == limits


@pytest.fixture(scope="module")
def alone(actor):
    return actor.sample(make_prompts(LENGTHS), n=3, eos_ids=EOS, slots=5)


@pytest.mark.parametrize(
    ("stage_length", "decoding"),
    [
        pytest.param(1, "cpu", marks=pytest.mark.slow),
        pytest.param(3, "tpu", marks=pytest.mark.exhaustive),
        (11, "cudnn"),
    ],
)
def test_stages_draw_the_samples_of_one(actor, alone, cudnn_anywhere, stage_length, decoding):
    options = SamplingOptions(12, 1.0, n=3, eos_ids=EOS, slots=5, stage_length=stage_length)
    sampler = sampler_program(actor.decoded.clone(decoding=decoding), options)
    staged = jax.device_get(sampler(actor.params, make_prompts(LENGTHS), jax.random.key(0)))
    for name in ("responses", "lengths", "truncated", "action_mask"):
        np.testing.assert_array_equal(getattr(staged, name), getattr(alone, name))
    np.testing.assert_allclose(staged.logprobs, alone.logprobs, atol=1e-5)
    np.testing.assert_array_equal(staged.prompts.tokens, alone.prompts.tokens)
    # Some end in each stage.
    assert alone.lengths.min() <= stage_length < alone.lengths.max() == 12


@pytest.mark.exhaustive
def test_eight_devices_decode_stages_like_one():
    actor = Actor(dataclasses.replace(ARCHITECTURE, vocab_size=68))
    mesh = make_mesh(MeshShape(data=2, fsdp=2, model=2))
    rules = sharding.decode_rules(mesh, ARCHITECTURE.num_kv_heads)
    prompts = make_prompts(range(1, 17))
    options = SamplingOptions(12, 1.0, n=2, eos_ids=EOS, slots=3, stage_length=4)
    with jax.set_mesh(mesh):
        split = sampler_program(actor.decoded, options, split_rows)(
            jax.device_put(actor.params, sharding.tree_shardings(mesh, actor.params, rules)),
            jax.device_put(prompts, sharding.rows(mesh)),
            jax.device_put(jax.random.key(0), sharding.replicated(mesh)),
        )
    alone = actor.sample(prompts, n=2, eos_ids=EOS)
    np.testing.assert_array_equal(split.responses, alone.responses)
    np.testing.assert_allclose(split.logprobs, alone.logprobs, atol=1e-5)


def test_a_stage_nobody_reaches_takes_no_step(actor):
    """With every token an EOS, all responses end in the first stage."""
    every = tuple(range(ARCHITECTURE.vocab_size))
    rollout = actor.sample(make_prompts(LENGTHS), eos_ids=every, slots=4, stage_length=6)
    assert rollout.slot_steps[0] <= 2 * 4 and rollout.lengths.max() == 1


def test_the_slots_of_each_stage_fit_in_the_cache_of_the_first(actor):
    """One stage would take 13 times the memory."""
    prompts = jax.tree.map(jnp.asarray, make_prompts(LENGTHS))
    options = SamplingOptions(1024, 1.0, n=8, eos_ids=EOS, slots=48, stage_length=64)

    def cache_bytes(state):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.slots.cache))

    def build(params, keys):
        first = build_job(actor.decoded, options, params, prompts, keys, limit=64)
        states = [initial_state(first)]
        repeated = jax.tree.map(lambda x: x.repeat(8, axis=0), prompts)
        for start, limit in ((64, 128), (128, 256), (256, 512), (512, 1024)):
            state = build_next_stage(first, repeated, states[-1], start, limit).state
            states.append(state)
        one = build_job(actor.decoded, options, params, prompts, keys)
        return states, initial_state(one)

    keys = jax.random.split(jax.random.key(0), 56)
    states, one = jax.eval_shape(build, actor.params, keys)
    first, *others = [cache_bytes(state) for state in states]
    assert all(first / 2 < other <= first for other in others)
    assert cache_bytes(one) == first * (16 + 1024) // (16 + 64)
