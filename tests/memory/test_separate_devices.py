"""Memory and time where some devices only decode: each kind counts what lies on it."""

import dataclasses

import jax
import pytest

import tiny
from jax_ppo import plan as plan_command
from jax_ppo.errors import UserError
from jax_ppo.memory import decoding_slots, step_plan
from jax_ppo.memory.memory_check import PPOMemory
from jax_ppo.memory.remedies import PossibleChanges
from jax_ppo.ppo.step_parts import sampling_options
from jax_ppo.runtime import meshes
from jax_ppo.runtime.topologies import parse_topology

AHEAD = {"rollout__max_staleness": 1, "algorithm__rollout_is": "token"}
SEPARATE = AHEAD | {"rollout__mesh__devices": 2}
LEARNING = ("forward_policy", "forward_critic", "estimate", "update_actor", "update_critic")


def plan(folder, topology, compiles=False, **changes):
    config = tiny.config(model__path=folder, **changes)
    return step_plan.plan_step(config, parse_topology(topology), compiles=compiles)


def test_a_plan_counts_what_lies_on_each_kind_of_device(folder):
    shared = plan(folder, "h100:2", mesh__data=1, mesh__fsdp=2, **AHEAD)
    separate = plan(folder, "h100:4", mesh__data=1, mesh__fsdp=2, **SEPARATE)
    ours, theirs = ({x.name: x.memory for x in plan.programs} for plan in (separate, shared))
    for name in LEARNING:
        assert ours[name] == theirs[name]
    decodes = ours["sample"]
    assert decodes.parameters == decodes.optimizer == decodes.frozen == decodes.gradients == 0
    copy = theirs["sample"].decoding_copy
    assert decodes.decoding_copy == copy and decodes.cache == theirs["sample"].cache > 0
    # The model has one layer: it and the embedding are copied one after the other, whole.
    a = tiny.ARCHITECTURE
    others = (a.vocab_size + 1) * a.hidden_size * 4
    assert ours["prepare_weights"].decoding_copy == max(others, copy - others) < copy
    assert ours["prepare_weights"].parameters == theirs["prepare_weights"].parameters > 0
    seconds = {program.name: program.seconds for program in separate.programs}
    # Both kinds of devices begin once the weights are copied.
    copied = seconds.pop("prepare_weights")
    rest = sum(seconds.values()) - seconds["sample"]
    assert separate.seconds == pytest.approx(copied + max(seconds["sample"], rest))
    assert separate.seconds < shared.seconds
    heading = plan_command.format_plan(separate)
    assert "decoding on 2 other devices, data 2 x fsdp 1 x model 1\n" in heading


def test_partial_rollouts_wait_for_their_stages(folder):
    changes = {"rollout__max_staleness": 2, "rollout__partial_length": 2}
    planned = plan(folder, "h100:4", mesh__data=1, mesh__fsdp=2, **SEPARATE | changes)
    assert planned.seconds == pytest.approx(sum(program.seconds for program in planned.programs))


def test_a_plan_takes_six_devices_beside_two_and_as_many_of_each_host(folder):
    planned = plan(folder, "v5e:2x4", **SEPARATE)
    assert (planned.mesh["data"], planned.rollout_mesh["data"]) == (6, 2)
    options = AHEAD | {"rollout__mesh__devices": 1}
    with pytest.raises(UserError, match="devices=1: must be a multiple of .* processes, 2,"):
        plan(folder, "v5p:2x2x2", **options)
    # Two hosts like one: from each, the copies to its own device.
    one, two = (
        {program.name: program for program in plan(folder, topology, **changes).programs}
        for topology, changes in (("v5p:2x2x1", options), ("v5p:2x2x2", SEPARATE))
    )
    for name in ("prepare_weights", "sample"):
        assert one[name].memory.decoding_copy == two[name].memory.decoding_copy > 0
    assert one["prepare_weights"].read_bytes == two["prepare_weights"].read_bytes


@pytest.mark.slow
def test_the_compilers_figures_do_not_count_the_copy_twice(folder):
    compiled = plan(folder, "cpu:4", True, mesh__data=1, mesh__fsdp=2, **SEPARATE)
    shared = plan(folder, "cpu:2", True, mesh__data=1, mesh__fsdp=2, **AHEAD)
    ours, theirs = ({x.name: x.memory for x in plan.programs} for plan in (compiled, shared))
    assert compiled.source.startswith("compiled") and ours["update_actor"] == theirs["update_actor"]
    for name in ("decoding_copy", "batch", "temporaries", "cache"):
        assert getattr(ours["sample"], name) == getattr(theirs["sample"], name), name


def test_the_check_at_the_start_and_the_slots_know_both_kinds():
    config = tiny.config(data__train_batch_size=64, **SEPARATE)
    mesh = meshes.make_mesh(config.mesh, jax.devices()[:5], decoding=2)
    rollout_mesh = meshes.make_rollout_mesh(mesh, config.rollout.mesh)
    with jax.set_mesh(mesh):
        run = PPOMemory(config, tiny.networks(config), mesh)
        least = run.measure()
        shared = dataclasses.replace(config, rollout=tiny.config(**AHEAD).rollout)
        beside = PPOMemory(shared, tiny.networks(config), mesh).measure()
    assert least.separate == beside.decoding > least.decoding and beside.separate == 0
    resident = least.parameters + least.optimizer + least.frozen
    assert least.peak == resident + max(least.gradients, least.decoding)
    assert dataclasses.replace(least, separate=10**9).peak == 10**9
    # By hand: keys and values of P + T tokens in float32, those of a prompt in the prefill buffer,
    # and two copies of the logits.
    a = tiny.ARCHITECTURE
    slot = 2 * a.num_layers * a.num_kv_heads * a.head_dim * (2 * tiny.P + tiny.T) * 4
    slot += 2 * a.vocab_size * 4
    sampling = sampling_options(config.rollout, config.rollout, tiny.T, (1,))

    def count_slots(left):
        limit = (least.separate + left) / 0.85
        with jax.set_mesh(mesh):
            return decoding_slots.count_decoding_slots(run, rollout_mesh, sampling, limit)

    # The weights and optimizer states that learn take no room from the samples.
    assert count_slots(20_000 + 16 * slot) == count_slots(20_000) + 16 == 24
    assert resident > least.separate + 20_000
    # What would help keeps the devices that decode.
    changes = dict(PossibleChanges(config, mesh))
    split = "config.mesh.data=1 with config.mesh.fsdp=3 and config.rollout.mesh.model=2"
    assert changes[split].rollout.mesh.devices == 2
