"""Decoding with query heads that `mesh.model` does not divide draws the same samples."""

import dataclasses

import jax
import numpy as np
import pytest

import tiny
from hlo import read_collectives
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.decode_loop import sampler_program
from jax_ppo.sampler.engine import SamplingOptions
from tiny_actor import ARCHITECTURE, Actor, T, make_prompts

SAMPLED = SamplingOptions(T, 1.0, eos_ids=(3, 7, 11), slots=2)


@pytest.mark.slow
def test_padded_heads_draw_the_same_samples_and_gather_no_weights():
    odd = dataclasses.replace(ARCHITECTURE, vocab_size=64, num_heads=6)
    actor = Actor(odd)
    rollouts = {}
    for parts in (1, 4):
        mesh = tiny.make_mesh(parts, data=1, model=parts)
        layout = sharding.tree_shardings(mesh, actor.stacked, sharding.TRAIN_RULES)
        params = jax.device_put(actor.stacked, layout)
        prompts = placement.place(make_prompts(range(1, 9)), sharding.rows(mesh))
        key = jax.device_put(jax.random.key(0), sharding.replicated(mesh))
        with jax.set_mesh(mesh):
            engine = BuiltInEngine(mesh, Transformer(odd), actor.stacked)
            engine.update_weights(params)
            rollouts[parts] = jax.tree.map(np.asarray, engine.generate(prompts, key, SAMPLED, None))
            if parts > 1:
                program = engine._program(sampler_program, SAMPLED)
                text = program.lower(engine._weights, prompts, key).compile().as_text()
    for name in ("responses", "lengths", "action_mask"):
        np.testing.assert_array_equal(getattr(rollouts[4], name), getattr(rollouts[1], name))
    np.testing.assert_allclose(rollouts[4].logprobs, rollouts[1].logprobs, atol=1e-5)
    # The smallest kernel that is split is that of the queries: no collective moves one.
    width = odd.num_heads * odd.head_dim
    shapes = {shape for x in read_collectives(text) for shape in x.shapes}
    assert shapes
    assert not {shape for shape in shapes if shape[-2:] == (odd.hidden_size, width)}
