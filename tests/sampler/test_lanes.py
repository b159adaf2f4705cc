"""Where programs can overlap, several sample a small model and draw the same samples."""

import jax
import numpy as np
import pytest

from jax_ppo.config import schema
from jax_ppo.runtime import meshes
from jax_ppo.runtime.parallelism.rows import split_rows
from jax_ppo.sampler import generate
from tiny_actor import make_prompts

EOS = (3, 7, 11, 30)


def sample(actor, lengths, first=None, devices=None, **options):
    """Return a rollout and its new sampler, under a mesh of `~devices` devices or none."""
    sampler = generate.Sampler(
        actor.decoded,
        generate.SamplingOptions(12, 1.0, eos_ids=EOS, **options),
        split_rows,
    )
    arguments = actor.params, make_prompts(lengths), jax.random.key(0), first
    if devices is None:
        return sampler(*arguments), sampler
    with jax.set_mesh(meshes.make_mesh(schema.MeshShape(), jax.devices()[:devices])):
        return sampler(*arguments), sampler


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"n": 3, "slots": 4, "first": 7}], ids=str)
def test_they_draw_the_samples_of_one_program(actor, options):
    lengths = (5, 16, 1, 9, 2, 12)
    (whole, _), (shared, sampler) = (
        sample(actor, lengths, devices=devices, **options) for devices in (None, 1)
    )
    for name in ("responses", "lengths", "truncated"):
        np.testing.assert_array_equal(getattr(shared, name), getattr(whole, name))
    np.testing.assert_array_equal(shared.prompts.tokens, whole.prompts.tokens)
    np.testing.assert_allclose(shared.logprobs, whole.logprobs, atol=1e-5)
    assert whole.slot_steps.shape == (1,) and shared.slot_steps.shape == (2,)
    assert sampler.compilations == 1  # of the same shapes: compiled once for both


def test_slots_are_shared_out(actor):
    """With one slot per program, every step uses all slots."""
    rollout, _ = sample(actor, (5, 16, 1, 9), slots=2, devices=1)
    lengths = np.asarray(rollout.lengths).reshape(2, 2)
    np.testing.assert_array_equal(rollout.slot_steps, lengths.sum(1))
    assert (lengths[:, 0] != lengths[:, 1]).all()  # otherwise one queue would be enough


@pytest.mark.parametrize(
    "lengths, devices, options",
    [((5, 16, 1), 1, {}), ((5, 16, 1, 9), 1, {"slots": 3}), ((5,), 1, {"n": 2}), ((5, 3), 2, {})],
)
def test_one_program_where_they_would_not_be_equal_or_not_run_side_by_side(
    actor, lengths, devices, options
):
    with jax.set_mesh(meshes.make_mesh(schema.MeshShape(), jax.devices()[:devices])):
        sampler = generate.Sampler(actor.decoded, generate.SamplingOptions(12, 1.0, **options))
        assert len(sampler.programs(actor.params, make_prompts(lengths), jax.random.key(0))) == 1


def test_one_program_where_each_would_read_large_weights_again(actor, monkeypatch):
    weights = sum(x.nbytes for x in jax.tree.leaves(actor.params))
    arguments = (make_prompts((5, 16)), jax.random.key(0))
    sampler = generate.Sampler(actor.decoded, generate.SamplingOptions(12, 1.0))
    with jax.set_mesh(meshes.make_mesh(schema.MeshShape(), jax.devices()[:1])):
        for most, programs in ((weights, 2), (weights - 1, 1)):
            monkeypatch.setattr(generate, "MAX_SHARED_WEIGHT_BYTES", most)
            assert len(sampler.programs(actor.params, *arguments)) == programs
