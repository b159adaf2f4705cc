"""Optimizer states in the host's memory outside of the update."""

import dataclasses

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory import memory_check
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.ppo import forward_passes
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.networks import Folders, Networks
from jax_ppo.training.state import StateBuilder, policy_params, trained_trees

OPTIONS = {"algorithm__adv_estimator": "reinforce_plus_plus", "algorithm__use_reference": False}
OFFLOADED_ROLES = {
    "critic__param_offload": True,
    "critic__optimizer_offload": True,
    "algorithm__reference_offload": True,
    "reward__param_offload": True,
    "reward__model_path": "a folder",
}


def memory_kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def assert_in(place, actors_place, state):
    """Assert in which memory the parameters of the actor are, and all that may idle."""
    idle = [state.models[role] for role in ("reference", "reward", "critic")]
    assert [memory_kinds(x) for x in (*state.optimizers.values(), *idle)] == [{place}] * 5
    assert memory_kinds(state.actor) == {actors_place}


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1, 2])
def test_idle_roles_wait_in_the_host_memory_and_train_alike(tmp_path, fsdp):
    """On one device, the actor's parameters stay there."""
    actor = {"actor__param_offload": fsdp > 1, "actor__optimizer_offload": True}
    mesh = tiny.make_mesh(fsdp * fsdp, data=fsdp, fsdp=fsdp)
    model = tiny.networks(tiny.config()).actor
    for head in ("lm", "scalar"):
        params = tiny.random_params(tiny.ARCHITECTURE, seed=0, stream=1, head=head)
        if head == "scalar":  # it starts from zeros
            params = {**params, "score": {"kernel": np.ones_like(params["score"]["kernel"])}}
        export_checkpoint(params, tiny.ARCHITECTURE, tmp_path / head)
    results = []
    with jax.set_mesh(mesh):
        for changes in ({}, actor | OFFLOADED_ROLES):
            config = tiny.config(actor__use_kl_loss=True, **changes)
            nets = Networks(**tiny.networks(config), reward=model)
            folders = Folders(
                actor=tmp_path / "lm", critic=tmp_path / "scalar", reward=tmp_path / "scalar"
            )
            state = StateBuilder(config, nets, mesh).create(folders, lambda name: None)
            place = "pinned_host" if changes else "device"
            places = place, place if fsdp > 1 else "device"
            assert_in(*places, state)
            rollout = tiny.make_rollout(mesh)
            batches = tiny.pack_batches(config, mesh, rollout, [np.arange(tiny.B)], rows=4)
            experience, _ = tiny.make_experience(config, mesh, state, rollout, rows=4)
            batch = tiny.pack_batch(config, mesh, rollout, rows=4)
            inputs = (experience.sequences, (batch.packing, batch.counts))
            rewards = forward_passes.reward_model_scores(
                nets.reward, state.models["reward"], *inputs, "auto"
            )
            after, _ = tiny.update_state(config, state, experience, batches, batches, 4)
            sampled = policy_params(nets, after)
            assert memory_kinds(sampled) == memory_kinds(rewards) == {"device"}
            jax.tree.map(np.testing.assert_array_equal, sampled, after.actor)
            assert_in(*places, after)
            results.append((experience, rewards, trained_trees(after)))
        jax.tree.map(np.testing.assert_array_equal, *results)
        assert np.abs(results[0][1]).sum() > 0
        # A checkpoint is read to where the state was.
        with Checkpointer(tmp_path / "checkpoints", 1, "reward_mean", print) as checkpoints:
            checkpoints.save(1, results[1][2], {}, {})
            shapes = StateBuilder(config, nets, mesh).trained_shapes()
            restored, _ = checkpoints.restore(1, shapes)
    assert memory_kinds(restored["optimizer"]) == {"pinned_host"}
    jax.tree.map(np.testing.assert_array_equal, restored, results[1][2])


def measure(**changes):
    config, mesh = tiny.config(**changes), tiny.make_mesh(4, data=2, fsdp=2)
    with assume_platform("tpu"):  # the memory of CPU devices is the host's
        return memory_check.PPOMemory(config, tiny.networks(config), mesh).measure()


def test_only_the_phases_that_read_it_need_room_for_an_idle_role():
    kept, offloaded = measure(), measure(**OFFLOADED_ROLES)
    # Actor and critic have the same trunk, of which the reference is a third copy.
    assert offloaded.frozen == 0 < kept.frozen
    assert kept.parameters / 2 <= offloaded.parameters + tiny.ARCHITECTURE.hidden_size * 4
    assert offloaded.optimizer < kept.optimizer
    # The critic's update has its parameters and two moments on the device.
    critic = kept.parameters - offloaded.parameters
    assert 3 * critic == pytest.approx(offloaded.fetched, rel=0.01)
    assert offloaded.peak < kept.peak


def test_the_sampler_needs_no_room_for_an_offloaded_actor():
    kept, offloaded = measure(), measure(actor__param_offload=True)
    actor = kept.parameters - offloaded.parameters
    assert 0 < actor == offloaded.fetched and kept.fetched == 0
    assert offloaded.decoding == kept.decoding


def test_only_the_update_needs_room_for_an_offloaded_optimizer():
    kept, offloaded = measure(**OPTIONS), measure(**OPTIONS, actor__optimizer_offload=True)
    assert (offloaded.optimizer, offloaded.fetched) == (0, kept.optimizer) and kept.fetched == 0
    # What decodes is the peak where the weights are copied to every device.
    wide = dataclasses.replace(kept, decoding=10**9).peak
    assert wide - dataclasses.replace(offloaded, decoding=10**9).peak == kept.optimizer
