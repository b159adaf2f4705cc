"""Layers are laid out for decoding one at a time, wherever they come from."""

import dataclasses

import jax
import numpy as np
import pytest

import tiny
from hlo import read_collectives
from jax_ppo.config.rollout_options import RolloutMesh
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes, sharding
from jax_ppo.runtime.compiled_programs import count_compilations, run_on_shapes
from jax_ppo.sampler.decoding_weights import WeightPreparation
from tiny_actor import ARCHITECTURE, Actor

NUM_LAYERS = 6


@pytest.mark.parametrize("rollout", [None, RolloutMesh(model=4)], ids=["run's mesh", "its own"])
def test_stages_hand_over_one_layer_at_a_time(rollout):
    actor = Actor(dataclasses.replace(ARCHITECTURE, num_layers=NUM_LAYERS, vocab_size=68))
    mesh = tiny.make_mesh(8, data=1, stage=2, fsdp=2, model=2)
    layout = sharding.tree_shardings(mesh, actor.stacked, sharding.TRAIN_RULES)
    params = jax.device_put(actor.stacked, layout)
    mesh = mesh if rollout is None else meshes.make_rollout_mesh(mesh, rollout)
    with jax.set_mesh(mesh):
        preparation = WeightPreparation(mesh, Transformer(actor.scored.architecture), params)
        weights = preparation(params)
        index = jax.device_put(np.int32(0), sharding.replicated(mesh))
        program = preparation._layer[()].lower(params["layers"], index, 2).compile()
        # One program for the layers of both stages.
        assert preparation._layer[()].jitted._cache_size() == 1
    assert jax.tree.structure(weights) == jax.tree.structure(actor.params)
    jax.tree.map(np.testing.assert_array_equal, weights, actor.params)
    # The largest kernel of a layer is [32, 48]; an index into the stack would gather the layers.
    shapes = [shape for x in read_collectives(program.as_text()) for shape in x.shapes]
    assert shapes and max(np.prod(shape) for shape in shapes) <= 32 * 48 // 2
    assert not any(NUM_LAYERS in shape for shape in shapes)


def test_on_one_device_two_programs_make_the_copy_however_many_layers_there_are():
    actor = Actor(dataclasses.replace(ARCHITECTURE, num_layers=NUM_LAYERS))
    mesh = tiny.make_mesh(1)
    layout = sharding.tree_shardings(mesh, actor.stacked, sharding.TRAIN_RULES)
    params = jax.device_put(actor.stacked, layout)
    with jax.set_mesh(mesh):
        preparation = WeightPreparation(mesh, Transformer(actor.scored.architecture), params)
        with count_compilations() as compilations:
            with run_on_shapes():
                preparation(
                    jax.tree.map(
                        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                        params,
                    )
                )
            weights = preparation(params)
    assert compilations.programs == 2
    jax.tree.map(np.testing.assert_array_equal, weights, actor.params)
