"""Rows split over eight devices: the same samples as on one, and no row leaves its device."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny_actor import make_prompts

from jax_ppo.sampler.generate import Sampler, SamplingOptions

FREE = PartitionSpec.UNCONSTRAINED
OPTIONS = SamplingOptions(12, 1.0, n=2, eos_ids=(3, 7, 11))


def constrain(rows):
    return jax.lax.with_sharding_constraint(rows, PartitionSpec("data", *[FREE] * (rows.ndim - 1)))


@pytest.fixture(scope="module")
def split(actor):
    """Sampler, its arguments on the mesh, and the compiled text."""
    assert len(jax.devices()) == 8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    replicated, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    args = (jax.device_put(actor.params, replicated), jax.device_put(make_prompts(range(1, 17)), rows),
            jax.device_put(jax.random.key(0), replicated))
    with jax.set_mesh(mesh):
        sampler = Sampler(actor.decoded, OPTIONS, constrain)
        rollout = sampler(*args)
        return rollout, sampler._sample.lower(*args).compile().as_text()


def test_eight_devices_draw_the_samples_of_one(actor, split):
    alone = Sampler(actor.decoded, OPTIONS)(actor.params, make_prompts(range(1, 17)), jax.random.key(0))
    rollout, _ = split
    for name in ("responses", "lengths", "truncated"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(alone, name))
    np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-5)
    assert 0 < np.asarray(rollout.truncated).sum() < 32


def test_devices_agree_on_whether_to_go_on_and_on_nothing_else(split):
    rollout, text = split
    assert {shard.data.shape for shard in rollout.responses.addressable_shards} == {(4, 12)}
    assert not re.search(r" (all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(", text)
    reduced = re.findall(r"= (\S+) all-reduce(?:-start)?\(", text)
    assert reduced and all(re.match(r"(pred|s32|u32)\[\]", shape) for shape in reduced), reduced
