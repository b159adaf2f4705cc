"""Optimizer states in the host's memory outside of the update."""

import dataclasses

import jax
import numpy as np

import tiny
from jax_ppo.models import heads
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.ppo import memory_check
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.networks import Folders
from jax_ppo.training.state import create_state, trained_shapes, trained_trees

OPTIONS = {"algorithm__adv_estimator": "reinforce_plus_plus", "algorithm__use_reference": False}
OFFLOADED = {**OPTIONS, "actor__optimizer_offload": True}


def memory_kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def test_an_offloaded_optimizer_trains_alike_and_stays_on_the_host(tmp_path):
    mesh = tiny.make_mesh(4, data=2, fsdp=2)
    params = heads.init_params(tiny.networks(tiny.config()).actor, jax.random.key(0), "lm")
    export_checkpoint(params, tiny.ARCHITECTURE, tmp_path / "actor")
    results = []
    with jax.set_mesh(mesh):
        for changes in (OPTIONS, OFFLOADED):
            config = tiny.config(**changes)
            nets = tiny.networks(config)
            folders = Folders(tmp_path / "actor", None, None)
            state = create_state(config, nets, folders, mesh, lambda name: None)
            kinds = memory_kinds(state.actor_optimizer)
            assert kinds == ({"pinned_host"} if changes is OFFLOADED else {"device"})
            rollout = tiny.make_rollout(mesh)
            experience, _ = tiny.make_experience(config, mesh, state, rollout, rows=4)
            batches = tiny.plan(config, mesh, rollout, [np.arange(tiny.B)], rows=4)
            after, _ = tiny.update_state(config, nets, 4, state, experience, batches, None)
            assert memory_kinds(after.actor_optimizer) == kinds
            assert memory_kinds(after.actor) == {"device"}
            results.append((after.actor, after.actor_optimizer))
        jax.tree.map(np.testing.assert_array_equal, *results)
        # A checkpoint is read to where the state was.
        with Checkpointer(tmp_path / "checkpoints", 1, "reward_mean", print) as checkpoints:
            checkpoints.save(1, trained_trees(after), {}, {})
            shapes = trained_shapes(config, nets, mesh)
            restored, _ = checkpoints.restore(1, shapes)
    assert memory_kinds(restored["optimizer"]) == {"pinned_host"}
    jax.tree.map(np.testing.assert_array_equal, restored["optimizer"]["actor"], results[1][1])


def test_only_the_update_needs_room_for_an_offloaded_optimizer():
    mesh = tiny.make_mesh(4, data=2, fsdp=2)
    kept, offloaded = (
        memory_check.measure_least_memory(config, tiny.networks(config), mesh)
        for config in (tiny.config(**OPTIONS), tiny.config(**OFFLOADED))
    )
    assert (offloaded.optimizer, offloaded.fetched) == (0, kept.optimizer) and kept.fetched == 0
    # What decodes is the peak where the weights are copied to every device.
    wide = dataclasses.replace(kept, decoding=10**9).peak
    assert wide - dataclasses.replace(offloaded, decoding=10**9).peak == kept.optimizer
