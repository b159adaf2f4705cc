"""With `mesh.virtual_replicas`, a step has the same bits on any number of devices."""

import functools

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.ppo import mini_batches
from jax_ppo.ppo.forward_passes import join_sequences
from jax_ppo.runtime import sharding
from jax_ppo.runtime.parallelism.replicas import computed_by_replicas, sum_over_replicas
from jax_ppo.runtime.parallelism.rows import split_rows
from jax_ppo.sampler.decode_loop import sampler_program
from jax_ppo.sampler.engine import SamplingOptions
from tiny_actor import Actor, make_prompts


def bits_of_step(devices, **options):
    """Return the bits of log-probs, values, advantages and weights of a step."""
    config = tiny.config(
        mesh__virtual_replicas=8,
        actor__ppo_mini_batch_size=4,
        **{"packing__row_length": 64} | options,
    )
    mesh = tiny.make_mesh(devices, virtual_replicas=8)
    nets = tiny.networks(config)
    has_critic = nets.critic is not None
    with jax.set_mesh(mesh):
        state = tiny.make_state(config, mesh)
        rollout = tiny.make_rollout(mesh)
        packer = mini_batches.make_packer(config, mesh, has_critic=has_critic)
        packed = packer.pack(0, np.asarray(rollout.prompts.lengths) + np.asarray(rollout.lengths))
        sequences = join_sequences(rollout, config.sequence_length)
        outputs = tiny.run_forward_passes(config, nets, state, sequences, *packed.forward)
        rewards = np.linspace(-1, 1, tiny.B).astype(np.float32)
        rewards = jax.device_put(rewards, rollout.lengths.sharding)
        experience, _ = tiny.estimate_experience(
            config, state.control, sequences, rollout.logprobs, outputs, rewards, None
        )
        state, metrics = tiny.update_state(
            config,
            nets,
            10,
            state,
            experience,
            packed.mini_batches["actor"],
            packed.mini_batches.get("critic"),
        )
        outputs = {
            "old_logprobs": experience.old_logprobs,
            "advantages": experience.advantages,
            "loss": metrics,
            "weights/actor": state.actor,
        }
        if has_critic:
            outputs |= {"values": experience.values, "weights/critic": state.critic}
        return jax.tree.map(lambda x: np.asarray(x).tobytes(), outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm__adv_estimator": "reinforce_plus_plus", "algorithm__use_reference": False},
        {"packing__enabled": False, "packing__row_length": None, "actor__ppo_epochs": 2},
        {
            "algorithm__adv_estimator": "grpo",
            "rollout__n": 2,
            "actor__use_kl_loss": True,
            "model__gradient_checkpointing": True,
        },
    ],
    ids=("without_critic", "padded_two_epochs", "groups"),
)
def test_a_step_has_the_same_bits_on_two_devices_and_on_eight(options):
    assert bits_of_step(2, **options) == bits_of_step(8, **options)


def test_sums_are_added_in_one_order():
    rows = np.random.default_rng(0).normal(size=(8, 1000)).astype(np.float32)
    in_tree = {}
    by_compiler = {}
    for devices in (2, 8):
        mesh = tiny.make_mesh(devices, virtual_replicas=8)
        with jax.set_mesh(mesh):
            add = computed_by_replicas(0)(functools.partial(sum_over_replicas, lambda row: row))
            in_tree[devices] = np.asarray(jax.jit(add)(rows))
        mesh = tiny.make_mesh(devices)
        split = jax.device_put(rows, sharding.rows(mesh))
        by_compiler[devices] = np.asarray(jax.jit(lambda x: x.sum(0))(split))
    pairs = rows[0::2] + rows[1::2]
    np.testing.assert_array_equal(in_tree[2], (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]))
    np.testing.assert_array_equal(in_tree[2], in_tree[8])
    # As the compiler adds them, they depend on the number of devices.
    assert (by_compiler[2] != by_compiler[8]).any()


@pytest.mark.slow
def test_samples_and_their_log_probs_have_the_same_bits():
    actor = Actor()
    options = SamplingOptions(12, 1.0, n=2, eos_ids=(3, 7), replicas=8)
    rollouts = []
    for devices in (2, 8):
        with jax.set_mesh(tiny.make_mesh(devices, virtual_replicas=8)):
            sampler = sampler_program(actor.decoded, options, split_rows)
            # Eleven prompts are filled up to two for each replica.
            rollout = sampler(actor.params, make_prompts(range(1, 12)), jax.random.key(0))
            rollouts.append(jax.device_get(rollout))
    jax.tree.map(np.testing.assert_array_equal, *rollouts)
    assert rollouts[0].lengths.shape == (22,) and (rollouts[0].logprobs < 0).sum() > 22


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh__fsdp": 2}, "sums over other axes depend on their sizes; leave config.mesh.fsdp"),
        ({"mesh__model": 2}, "leave config.mesh.fsdp, model, stage, context and expert at 1"),
        ({"rollout__mesh__model": 1}, "config.rollout.mesh.model unset"),
        ({"reward__model_path": "a"}, "leave config.reward.model_path unset"),
        ({"rollout__multi_turn__environment": "a:B"}, "leave config.rollout.multi_turn.env"),
        ({"actor__optim__gradient_dtype": "bfloat16"}, "set config.actor.optim.gradient_dtype"),
    ],
)
def test_where_it_does_not_hold_it_is_refused(options, message):
    with pytest.raises(UserError, match=f"config.mesh.virtual_replicas=8: .*{message}"):
        tiny.config(mesh__virtual_replicas=8, **options)


@pytest.mark.parametrize(("replicas", "devices"), [(6, 2), (2, 4)])
def test_devices_share_the_replicas_evenly(replicas, devices):
    with pytest.raises(UserError, match=f"power of two and a multiple of .* devices, {devices}"):
        tiny.make_mesh(devices, virtual_replicas=replicas)


def test_a_single_device_is_refused():
    with pytest.raises(UserError, match="needs two devices or more: .*JAX_NUM_CPU_DEVICES=2"):
        tiny.make_mesh(1, virtual_replicas=8)
