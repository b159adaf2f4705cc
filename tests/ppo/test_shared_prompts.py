"""Samples that share one copy of their prompt in a row have the numbers that they have alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.memory.step_flops import count_forward_flops, count_step_flops
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import mini_batches
from jax_ppo.ppo.forward_passes import join_sequences
from jax_ppo.ppo.step_parts import StepOptions
from jax_ppo.training import forward, packing
from jax_ppo.training.decoders import build_decoder
from jax_ppo.training.networks import Networks
from jax_ppo.types import Prompts, Sequences

N = 4
WINDOWS = dataclasses.replace(
    tiny.ARCHITECTURE,
    family="gemma2",
    num_layers=2,
    sliding_window=5,
    local_layers=(True, False),
    attention_softcap=20.0,
)
BIASES = dataclasses.replace(tiny.ARCHITECTURE, family="qwen2", qkv_bias=True)


def make_rollout(mesh, same_prompt=N):
    """Return `tiny.make_rollout` in which consecutive samples have one prompt."""
    rollout = tiny.make_rollout(mesh)
    first = np.repeat(np.arange(0, tiny.B, same_prompt), same_prompt)
    prompts = jax.tree.map(lambda x: x[first], rollout.prompts)
    return dataclasses.replace(rollout, prompts=Prompts(*jax.tree.leaves(prompts)))


def take_step(share_prompts, **changes):
    """Return the outputs of the forward passes, the weights after an update, and the metrics."""
    config = tiny.config(
        packing__share_prompts=share_prompts,
        packing__row_length=40,
        data__train_batch_size=tiny.B // N,
        actor__ppo_mini_batch_size=tiny.B // N // 2,  # half of the samples, whatever their prompts
        rollout__n=N,
        actor__ppo_epochs=1,
        **changes,
    )
    mesh = tiny.make_mesh()
    nets = tiny.networks(config)
    with jax.set_mesh(mesh):
        state = tiny.make_state(config, mesh)
        rollout = make_rollout(mesh)
        packer = mini_batches.make_packer(config, mesh, has_critic=config.has_critic)
        prompt_lengths = np.asarray(rollout.prompts.lengths)
        packed = packer.pack(0, prompt_lengths + np.asarray(rollout.lengths), prompt_lengths[::N])
        sequences = join_sequences(rollout, config.sequence_length)
        outputs = tiny.run_forward_passes(config, nets, state, sequences, *packed.forward)
        rewards = jax.device_put(np.linspace(-1, 1, tiny.B).astype(np.float32))
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
    places = int((np.asarray(packed.forward[0].sample) >= 0).sum())
    return jax.device_get((outputs, state.models, metrics)), places


@pytest.mark.slow
def test_a_step_with_adapters_differs_by_rounding_alone():
    alone, places = take_step(False, model__lora__rank=2)
    shared, fewer_places = take_step(True, model__lora__rank=2)
    assert fewer_places < places
    for expected, actual in zip(jax.tree.leaves(alone), jax.tree.leaves(shared), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(WINDOWS, marks=pytest.mark.slow), BIASES],
    ids=lambda architecture: architecture.family,
)
def test_families_have_the_same_logprobs_and_gradients(architecture):
    model = Transformer(architecture)
    params = tiny.random_params(architecture, 0, 0, "lm")
    sequences = join_sequences(make_rollout(tiny.make_mesh()), tiny.P + tiny.T)
    prompt_lengths = np.asarray(sequences.prompt_lengths)
    lengths = prompt_lengths + np.asarray(sequences.lengths)
    results = []
    for shared in (None, packing.SharedPrompts(prompt_lengths, N, 1)):
        packed_rows, _ = packing.pack_samples(lengths, [range(tiny.B)], tiny.B, 64, shared=shared)
        rows = packing.gather_rows(sequences, jax.tree.map(lambda x: x[0, 0], packed_rows))

        @jax.jit
        @jax.value_and_grad
        def run(params, rows=rows):
            hidden = forward.hidden_states(model, params, rows)
            logprobs, _ = forward.target_logprobs(model, params, hidden, rows, 1.0)
            weights = packing.to_rows(np.cos(np.arange(tiny.B * tiny.T)).reshape(tiny.B, -1), rows)
            return (logprobs * weights).sum()

        results.append(run(params))
    for expected, actual in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_rows_by_hand():
    """Prompts (7, 8, 9) of samples 0 and 1 and (5,) of samples 2 and 3, in rows of 6."""
    shared = packing.SharedPrompts(np.array([3, 3, 1, 1]), 2, 1)
    packed_rows, counts = packing.pack_samples([4, 4, 2, 3], [[3, 1, 0, 2]], 4, 6, shared=shared)
    assert counts.tolist() == [1] and packed_rows.sample.shape == (1, 1, 4, 6)
    # Sample 1 begins with the prompt's last token; so do all samples of a prompt of one token.
    assert packed_rows.sample[0, 0, :2].tolist() == [[0, 0, 0, 0, 1, 1], [2, 2, 3, 3, 3, -1]]
    assert packed_rows.position[0, 0, :2].tolist() == [[0, 1, 2, 3, 2, 3], [0, 1, 0, 1, 2, 0]]
    sequences = Sequences(
        tokens=np.array([[7, 8, 9, 1], [7, 8, 9, 2], [5, 3, 0, 0], [5, 4, 6, 0]]),
        prompt_lengths=np.array([3, 3, 1, 1]),
        lengths=np.array([1, 1, 1, 2]),
        truncated=np.zeros(4, bool),
        action_mask=np.array([[1, 0], [1, 0], [1, 0], [1, 1]], bool),
    )
    rows = packing.gather_rows(sequences, jax.tree.map(lambda x: x[0, 0, :2], packed_rows))
    assert rows.targets.tolist() == [[0, 0, 1, 0, 2, 0], [3, 0, 4, 6, 0, 0]]
    assert rows.segments.tolist() == [[4, 4, 0, 0, 1, 1], [2, 2, 3, 3, 3, -1]]
    assert rows.prefixes.tolist() == [[4, 4, 4, 4, 4, 4], [5, 5, 5, 5, 5, -1]]


def test_a_row_holds_one_copy_of_a_prompt():
    """Else a response that follows the second copy would read both."""
    shared = packing.SharedPrompts(np.full(3, 2), 3, 1)
    # Responses of 10, 15 and 3 tokens: only the first and the last fit a row of 20 together.
    packed_rows, counts = packing.pack_samples([12, 17, 5], [[0, 1, 2]], 1, 20, shared=shared)
    assert counts.tolist() == [2]
    assert packing.count_starts(packed_rows, 3).tolist() == [1, 1, 0]


def test_flops_count_prompts_as_often_as_rows_hold_them():
    config = tiny.config(
        packing__share_prompts=True,
        packing__row_length=40,
        data__train_batch_size=2,
        actor__ppo_mini_batch_size=2,
        rollout__n=2,
        actor__ppo_epochs=2,
        teacher__path="a folder",
        teacher__loss_coef=1.0,
    )
    prompts = np.array([3, 5])
    lengths = np.array([4, 6, 8, 9])
    packer = mini_batches.make_packer(config, tiny.make_mesh(), has_critic=True)
    packed = packer.pack(0, lengths, prompts)
    assert packed.whole is packed.forward  # no reward model reads others
    net = tiny.networks(config)
    count = functools.partial(
        count_step_flops,
        StepOptions.from_config(config),
        Networks(**net, teacher=net.actor),
        0,
        prompts,
        lengths,
    )
    # Forward passes of actor, reference, critic and teacher; then two epochs, in which actor and
    # critic take three passes and the teacher one. Each prompt's second sample has its last token.
    saved = (4 + 2 * (3 + 3 + 1)) * count_forward_flops(tiny.ARCHITECTURE, prompts - 1)
    assert count() - count(packed.whole_prompts) == pytest.approx(saved)


@pytest.mark.parametrize(
    "changes",
    [{"packing__enabled": False}, {"mesh__context": 2}, {"critic__router_aux_loss_coef": 0.1}],
    ids=lambda changes: next(iter(changes)),
)
def test_options_that_split_prompts_are_refused(changes):
    with pytest.raises(UserError, match=r"config.packing.share_prompts=True: config.*=.*default"):
        tiny.config(packing__share_prompts=True, **changes)


def test_recurrent_layers_and_splash_attention_are_refused():
    options = tiny.config().model
    linear = dataclasses.replace(tiny.ARCHITECTURE, block="convolution", linear_layers=(True,))
    with pytest.raises(UserError, match="share_prompts=True: expected a model of attention layers"):
        build_decoder(linear, options, 64, shares_prompts=True)
    with pytest.raises(UserError, match="splash attention takes no shared prompts"):
        build_decoder(
            tiny.ARCHITECTURE, dataclasses.replace(options, attention="splash"), 128, True
        )
