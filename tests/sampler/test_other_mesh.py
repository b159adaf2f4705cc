"""Decoding on a separate mesh draws the same samples; weights are laid out once per update."""

import dataclasses

import jax
import numpy as np
import pytest

import tiny
from hlo import read_collectives
from jax_ppo.config.rollout_options import RolloutMesh
from jax_ppo.errors import UserError
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import compiled_programs, meshes, placement, sharding
from jax_ppo.sampler import sampling
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.continuation import begin_draws, begin_responses
from jax_ppo.sampler.decode_loop import sampler_program
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.other_mesh import OtherMeshEngine, engine_on_shapes
from tiny_actor import ARCHITECTURE, Actor, T, make_prompts

SAMPLED = SamplingOptions(T, 1.0, n=2, eos_ids=(3, 7, 11), slots=3)
GREEDY = SamplingOptions(T, 0.0)
RUN_SHAPE = {"data": 1, "fsdp": 8}


@dataclasses.dataclass
class Run:
    """An actor whose parameters are split for training, and engines with and without a mesh."""

    mesh: jax.sharding.Mesh
    params: dict
    prompts: object
    key: jax.Array
    plain: BuiltInEngine
    wrapped: OtherMeshEngine


@pytest.fixture(scope="module")
def run():
    actor = Actor(dataclasses.replace(ARCHITECTURE, vocab_size=68))
    mesh = tiny.make_mesh(8, **RUN_SHAPE)
    model = Transformer(actor.scored.architecture)
    rollout_mesh = meshes.make_rollout_mesh(mesh, RolloutMesh(model=4))
    inner = BuiltInEngine(rollout_mesh, model, actor.stacked)
    layout = sharding.tree_shardings(mesh, actor.stacked, sharding.TRAIN_RULES)
    return Run(
        mesh=mesh,
        params=jax.device_put(actor.stacked, layout),
        prompts=placement.place(make_prompts(range(1, 17)), sharding.rows(mesh)),
        key=jax.device_put(jax.random.key(0), sharding.replicated(mesh)),
        plain=BuiltInEngine(mesh, model, actor.stacked),
        wrapped=OtherMeshEngine(inner, mesh=rollout_mesh, run_mesh=mesh),
    )


@pytest.mark.slow
def test_another_mesh_draws_the_same_samples_from_weights_laid_out_once(run):
    inner = run.wrapped._engine
    reshards = []
    prepare = inner._prepare_weights
    inner._prepare_weights = lambda params: reshards.append(1) or prepare(params)
    with jax.set_mesh(run.mesh):
        for engine in (run.plain, run.wrapped):
            engine.update_weights(run.params)
        for options, first in ((SAMPLED, None), (SAMPLED, 32), (GREEDY, 0)):
            ours, expected = (
                engine.generate(run.prompts, run.key, options, first)
                for engine in (run.wrapped, run.plain)
            )
            for name in ("responses", "lengths", "truncated", "action_mask"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(expected, name))
            np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-5)
            # The rollout is back on the run's mesh, split as its own would be.
            rows = sharding.rows(run.mesh)
            slot_steps = ours.slot_steps
            assert slot_steps.sharding.is_equivalent_to(sharding.replicated(run.mesh), 1)
            for x in jax.tree.leaves(dataclasses.replace(ours, slot_steps=None)):
                assert x.sharding.mesh == run.mesh and x.sharding.is_equivalent_to(rows, x.ndim)
    inner._prepare_weights = prepare
    assert len(reshards) == 1
    # Four devices split each matrix, where training splits them over eight.
    kernel = inner._weights["layer_0"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (32, 12)


def test_decoding_gathers_no_weights(run):
    """Each weight is split as the program reads it, so that only activations move per token."""
    with jax.set_mesh(run.mesh):
        run.wrapped.update_weights(run.params)
        arguments = run.wrapped.send(run.prompts, run.key)
    inner = run.wrapped._engine
    with jax.set_mesh(run.wrapped._mesh):
        program = inner._program(sampler_program, SAMPLED)
        text = program.lower(inner._weights, *arguments).compile().as_text()
    collectives = read_collectives(text)
    assert "all-gather" not in {x.kind for x in collectives}
    # Per slot: hidden states of D = 32, or of the 16 tokens of a prompt in a prefill.
    assert max(x.bytes for x in collectives) <= 4 * 16 * 32 * max(SAMPLED.slots, 2)


def test_no_device_receives_a_whole_matrix_while_weights_are_laid_out(run):
    inner = run.wrapped._engine
    with jax.set_mesh(run.wrapped._mesh):
        moved = run.wrapped._move_embeddings(run.params)
        index = jax.device_put(np.int32(0), sharding.replicated(run.wrapped._mesh))
        others = {name: value for name, value in moved.items() if name != "layers"}
        preparation = inner._prepare_weights
        programs = (
            preparation._others.lower(others),
            preparation._layer[()].lower(moved["layers"], index, 1),
        )
        texts = [program.compile().as_text() for program in programs]
    # The largest weights are embeddings, [68, 32] in float32: a device keeps a quarter.
    collectives = [x for text in texts for x in read_collectives(text)]
    assert max(x.bytes for x in collectives) == 4 * 68 * 32 // 4
    table = moved["embed"]["embedding"]
    assert table.addressable_shards[0].data.shape == (17, 16)


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_on_shapes_an_engine_returns_the_shapes_of_its_rollouts(run):
    names = []

    def record(name, *program):
        names.append(name)
        return compiled_programs.compile_program(name, *program)

    with jax.set_mesh(run.mesh):
        run.wrapped.update_weights(run.params)
        with compiled_programs.run_on_shapes(record):
            engine = engine_on_shapes(run.wrapped, run.mesh)
            engine.update_weights(shapes_of(run.params))
            ahead = engine.generate(*shapes_of((run.prompts, run.key)), GREEDY)
        # The engine itself still has its weights.
        with compiled_programs.count_compilations() as compiled:
            rollout = run.wrapped.generate(run.prompts, run.key, GREEDY)
    assert names == ["prepare_weights", "prepare_weights", "sample"]
    assert compiled.programs == 0
    for one, other in zip(jax.tree.leaves(ahead), jax.tree.leaves(rollout), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, len(one.shape))


@pytest.mark.slow
def test_responses_continue_as_on_the_runs_mesh(run):
    rows = sharding.rows(run.mesh)
    continued = dataclasses.replace(SAMPLED, n=1, partial_length=3)
    keys = sampling.sample_keys(jax.random.key(0), np.arange(16))
    begun = (begin_responses(make_prompts(range(1, 17)), T), begin_draws(keys))
    begun = jax.device_put(begun, rows)
    version = jax.device_put(np.int32(5), sharding.replicated(run.mesh))
    newer = jax.tree.map(lambda x: x * 1.02, run.params)
    results = []
    with jax.set_mesh(run.mesh):
        for engine in (run.plain, run.wrapped):
            engine.update_weights(run.params)
            first = engine.continue_responses(*begun, version, continued)
            engine.update_weights(newer)
            second = engine.continue_responses(*first[:2], version + 1, continued)
            results.append((first[:2], second[:2]))
        assert second[2].sharding.is_equivalent_to(sharding.replicated(run.mesh), 1)
        with compiled_programs.run_on_shapes():
            engine = engine_on_shapes(run.wrapped, run.mesh)
            engine.update_weights(shapes_of(run.params))
            ahead = engine.continue_responses(*shapes_of((*begun, version)), continued)
        shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in (ahead, second)]
        assert shapes[0] == shapes[1]
    for ours, theirs in zip(*map(jax.tree.leaves, results[::-1]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert ours.sharding.mesh == run.mesh and ours.sharding.is_equivalent_to(rows, ours.ndim)
    assert set(np.unique(results[1][1][0].versions)) == {0, 5, 6}


def test_impossible_rollout_meshes_are_refused_in_one_line():
    mesh = tiny.make_mesh(8)
    assert meshes.make_rollout_mesh(mesh, RolloutMesh()) is mesh
    same = meshes.make_rollout_mesh(mesh, RolloutMesh(model=1))
    assert same == mesh
    for shape in (RolloutMesh(model=3), RolloutMesh(model=4, data=1)):
        sizes = f"config.rollout.mesh.data={shape.data} x config.rollout.mesh.model={shape.model}"
        with pytest.raises(UserError, match=f"^{sizes}: must multiply to the number of devices, 8"):
            meshes.make_rollout_mesh(mesh, shape)
    odd = dataclasses.replace(tiny.ARCHITECTURE, intermediate_size=36)
    eight = meshes.make_rollout_mesh(mesh, RolloutMesh(model=8))
    with pytest.raises(UserError, match="config.rollout.mesh.model=8: must divide"):
        meshes.validate_architecture(eight, odd, option="config.rollout.mesh")
    with pytest.raises(UserError, match="set config.rollout.mesh.model"):
        tiny.config(rollout__mesh__data=2)
