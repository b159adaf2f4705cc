"""Rows split over eight devices give the same samples as one; no row leaves its device."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_actor import ARCHITECTURE, Actor, make_prompts

from jax_ppo.config.schema import MeshShape
from jax_ppo.runtime import sharding
from jax_ppo.sampler.generate import Sampler, SamplingOptions

OPTIONS = SamplingOptions(12, 1.0, n=2, eos_ids=(3, 7, 11), slots=3)


@pytest.fixture(scope="module")
def actor():
    """An actor with an even vocabulary."""
    return Actor(dataclasses.replace(ARCHITECTURE, vocab_size=62))


@pytest.fixture(scope="module", params=[(8, 1, 1), (2, 2, 2)], ids=str)
def split(actor, request):
    """Return the samples on a mesh of eight devices, and the compiled text."""
    shape = dict(zip(sharding.AXES, request.param, strict=True))
    mesh = sharding.make_mesh(MeshShape(**shape))
    replicated = NamedSharding(mesh, PartitionSpec())
    layout = sharding.tree_shardings(mesh, actor.params, sharding.DECODE_RULES)
    args = (
        jax.device_put(actor.params, layout),
        jax.device_put(make_prompts(range(1, 17)), sharding.rows(mesh)),
        jax.device_put(jax.random.key(0), replicated),
    )
    with jax.set_mesh(mesh):
        sampler = Sampler(actor.decoded, OPTIONS, sharding.split_rows)
        rollout = sampler(*args)
        return rollout, sampler.program.lower(*args).compile().as_text()


def test_eight_devices_draw_the_samples_of_one(actor, split):
    alone = Sampler(actor.decoded, OPTIONS)(
        actor.params, make_prompts(range(1, 17)), jax.random.key(0)
    )
    rollout, _ = split
    for name in ("responses", "lengths", "truncated"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(alone, name))
    np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-5)
    assert 0 < np.asarray(rollout.truncated).sum() < 32


def test_shards_of_rows_say_nothing_to_each_other(split):
    """Each shard of rows ends with its own samples.

    Where matrices are split, all shards continue together.
    """
    rollout, text = split
    shards = len(rollout.slot_steps)
    assert {shard.data.shape for shard in rollout.responses.addressable_shards} == {
        (32 // shards, 12)
    }
    steps = np.asarray(rollout.slot_steps)
    assert (steps >= np.asarray(rollout.lengths).reshape(shards, -1).sum(1)).all()
    collectives = re.findall(
        r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text
    )
    if shards == 8:
        assert not collectives and len(set(steps.tolist())) > 1
    else:
        assert "all-reduce" in collectives and len(set(steps.tolist())) == 1


def test_attention_that_no_compiler_can_split_is_run_by_each_device(actor, cudnn_anywhere):
    """Rows and heads are split; each device runs its own."""
    mesh = sharding.make_mesh(MeshShape(data=2, fsdp=2, model=2))
    layout = sharding.tree_shardings(mesh, actor.params, sharding.DECODE_RULES)
    prompts = make_prompts(range(1, 17))
    with jax.set_mesh(mesh):
        sampler = Sampler(actor.decoded.clone(decoding="cudnn"), OPTIONS, sharding.split_rows)
        rollout = sampler(
            jax.device_put(actor.params, layout),
            jax.device_put(prompts, sharding.rows(mesh)),
            jax.device_put(jax.random.key(0), NamedSharding(mesh, PartitionSpec())),
        )
    alone = Sampler(actor.decoded, OPTIONS)(actor.params, prompts, jax.random.key(0))
    np.testing.assert_array_equal(rollout.responses, alone.responses)
    # Another layout rounds otherwise: by 2.4e-6 of a log-prob, measured.
    np.testing.assert_allclose(rollout.logprobs, alone.logprobs, rtol=5e-6, atol=1e-5)
