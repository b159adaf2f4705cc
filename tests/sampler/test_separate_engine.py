"""Devices that only decode: what lies on them, what they draw, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

from jax_ppo.config.rollout_options import RolloutMesh
from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo.step_parts import make_engine
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.sampler import sampling
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.continuation import begin_draws, begin_responses
from jax_ppo.sampler.engine import SamplingOptions
from tiny_actor import ARCHITECTURE as TINY
from tiny_actor import Actor, T, make_prompts

ARCHITECTURE = dataclasses.replace(TINY, vocab_size=68)  # mesh.model may be 2
SAMPLED = SamplingOptions(T, 1.0, n=2, eos_ids=(3, 7, 11), slots=3)
PROMPTS = make_prompts(range(1, 7))


def make_meshes(devices, separate, **shape):
    """Return the run's mesh and the mesh to decode on, of so many devices together."""
    mesh = meshes.make_mesh(MeshShape(), jax.devices()[:devices], decoding=separate)
    return mesh, meshes.make_rollout_mesh(mesh, RolloutMesh(devices=separate, **shape))


def build(mesh, rollout_mesh, actor):
    """Return an engine with the weights, and prompts and a key on the run's mesh."""
    layout = sharding.tree_shardings(mesh, actor.stacked, sharding.TRAIN_RULES)
    params = jax.device_put(actor.stacked, layout)
    model = Transformer(ARCHITECTURE)
    engine = make_engine(BuiltInEngine, model, params, mesh, rollout_mesh)
    prompts = placement.place(PROMPTS, sharding.batch_rows(mesh, len(PROMPTS.lengths)))
    key = jax.device_put(jax.random.key(0), sharding.replicated(mesh))
    return engine, params, prompts, key


def device_sets(tree):
    return {frozenset(x.devices()) for x in jax.tree.leaves(tree)}


def test_weights_lie_on_the_devices_that_decode_alone_and_stay_there():
    mesh, rollout_mesh = make_meshes(4, 1)
    engine, params, _, _ = build(mesh, rollout_mesh, Actor(ARCHITECTURE))
    with jax.set_mesh(mesh):
        engine.update_weights(params)
    inner = engine._engine
    weights = inner._weights
    assert device_sets(weights) == {frozenset(jax.devices()[3:4])}
    assert device_sets(params) == {frozenset(jax.devices()[:3])}
    tables = (tree["embed"]["embedding"] for tree in (weights, params))
    np.testing.assert_array_equal(*tables)
    # Nothing else needs the memory, and what is decoded ahead reads them.
    engine.release_weights()
    assert inner._weights is weights
    engine.stop()
    assert inner._weights is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "separate", "shape", "same"),
    [
        (2, 1, {}, {}),
        (4, 2, {}, {}),
        (4, 2, {"model": 2}, {"model": 2}),
        (5, 2, {"model": 2}, {"model": 2}),  # three learn: rows divide otherwise
    ],
)
def test_separate_devices_draw_what_the_same_layout_on_shared_ones_does(
    devices, separate, shape, same
):
    actor = Actor(ARCHITECTURE)
    shared = meshes.make_mesh(MeshShape(), jax.devices()[:separate])
    cases = (shared, meshes.make_rollout_mesh(shared, RolloutMesh(**same)))
    continued = SamplingOptions(T, 1.0, eos_ids=(3, 7, 11), slots=3, partial_length=3)
    results = []
    for mesh, rollout_mesh in (cases, make_meshes(devices, separate, **shape)):
        engine, params, prompts, key = build(mesh, rollout_mesh, actor)
        rows = sharding.batch_rows(mesh, 6)
        keys = sampling.sample_keys(jax.random.key(0), np.arange(6))
        begun = jax.device_put((begin_responses(PROMPTS, T), begin_draws(keys)), rows)
        version = jax.device_put(np.int32(5), sharding.replicated(mesh))
        with jax.set_mesh(mesh):
            engine.update_weights(params)
            rollout = engine.generate(prompts, key, SAMPLED)
            stage = engine.continue_responses(*begun, version, continued)
            engine.update_weights(jax.tree.map(lambda x: x * 1.02, params))
            newer = engine.generate(prompts, key, SAMPLED)
        results.append((rollout, stage, newer))
        on_mesh = {frozenset(mesh.devices.flat)}
        assert device_sets(results[-1]) == on_mesh
    decoding = {frozenset(rollout_mesh.devices.flat)}
    assert device_sets(engine._engine._weights) == decoding
    # The programs that decode, with their slots, run there, too.
    with jax.set_mesh(rollout_mesh):
        moved = engine.send(prompts, key)
        assert device_sets(engine._engine.generate(*moved, SAMPLED)) == decoding
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    engine.stop()


@pytest.mark.parametrize(
    ("devices", "separate", "shape", "message"),
    [
        (4, 4, {}, r"config.rollout.mesh.devices=4: expected fewer than the 4 devices of the run"),
        (4, 2, {"model": 4}, r"config.rollout.mesh.data=-1 x config.rollout.mesh.model=4: must "
            r"multiply to config.rollout.mesh.devices=2$"),
        (4, 2, {"model": 1, "data": 1}, r"multiply to config.rollout.mesh.devices=2$"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused_in_one_line(devices, separate, shape, message):
    with pytest.raises(UserError, match=message):
        make_meshes(devices, separate, **shape)


def test_the_last_devices_decode_and_the_others_learn():
    mesh, rollout_mesh = make_meshes(8, 2, model=2)
    assert mesh.size == 6 and mesh.shape["data"] == 6 and rollout_mesh.shape["model"] == 2
    devices = [*mesh.devices.flat, *rollout_mesh.devices.flat]
    assert devices == jax.devices()[:8]
    with pytest.raises(UserError, match=r"must multiply to the number of devices, 6$"):
        meshes.make_mesh(MeshShape(fsdp=8), jax.devices()[:8], decoding=2)


def test_each_process_gives_its_last_devices():
    devices = jax.devices()[:8]
    mesh = meshes.make_mesh(MeshShape(), devices, decoding=2, processes=2)
    assert list(mesh.devices.flat) == devices[:3] + devices[4:7]
    rollout_mesh = meshes.make_rollout_mesh(mesh, RolloutMesh(devices=2))
    assert list(rollout_mesh.devices.flat) == [devices[3], devices[7]]
    with pytest.raises(UserError, match="devices=8: expected fewer than the 8 devices"):
        meshes.make_mesh(MeshShape(), devices, decoding=8, processes=2)


def test_a_number_that_the_processes_do_not_share_evenly_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = r"^config.rollout.mesh.devices=1: must be a multiple of the number of processes, 2, "
    with pytest.raises(UserError, match=message):
        make_meshes(4, 1)
