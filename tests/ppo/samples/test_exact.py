"""Tokens are drawn again by the update's forward pass, whose log-probs the update finds again."""

import contextlib
import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.models.attention import attend_block_of_queries
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import forward_passes
from jax_ppo.ppo.mini_batches import RolloutPacker
from jax_ppo.ppo.samples import exact
from jax_ppo.ppo.samples.exact import replace_tokens
from jax_ppo.ppo.samples.source import SampledBatch
from jax_ppo.ppo.step_parts import StepOptions
from jax_ppo.runtime import placement, sharding
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.continuation import begin_draws
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.training.networks import Networks
from jax_ppo.training.random_streams import SampleKeys, training_stream
from jax_ppo.types import Prompts, Rollout

LLAMA = dataclasses.replace(tiny.ARCHITECTURE, num_layers=2)
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True),
    "gemma2": dataclasses.replace(
        LLAMA,
        family="gemma2",
        post_norms=True,
        norm_plus_one=True,
        norm_in_float32=True,
        activation="gelu_pytorch_tanh",
        scaled_embedding=True,
        attention_softcap=50.0,
        logit_softcap=30.0,
        sliding_window=6,
        local_layers=(True, False),
        query_pre_attn_scalar=4,
    ),
}
SLOW = {("llama", "bfloat16"), ("gemma2", "float32")}
CASES = [
    pytest.param(*case, marks=pytest.mark.slow if case in SLOW else pytest.mark.exhaustive)
    for case in itertools.product(ARCHITECTURES, ("float32", "bfloat16"))
]


def test_capped_scores_have_the_same_bits_with_and_without_gradients():
    """Regression: a CPU's compiler fused the soft cap of Gemma 2 in forward passes alone."""
    queries = 4 * jax.random.normal(jax.random.key(0), (1, 32, 4, 8))
    keys, values = 4 * jax.random.normal(jax.random.key(1), (2, 1, 2, 32, 8))
    visible = jnp.tril(jnp.ones((1, 32, 32), bool))

    def attend(queries):
        out = attend_block_of_queries(queries, keys, values, visible, softcap=50.0)
        return (out**2).sum(), out

    _, forward = jax.jit(attend)(queries)
    (_, kept), _ = jax.jit(jax.value_and_grad(attend, has_aux=True))(queries)
    np.testing.assert_array_equal(forward, kept)


def test_a_response_ends_with_the_first_token_that_is_drawn_otherwise():
    options = SamplingOptions(4, 1.0, eos_ids=(1,))
    responses = np.array([[5, 6, 1, 0], [5, 6, 7, 8], [5, 6, 7, 8], [5, 0, 0, 0]], np.int32)
    lengths = np.array([3, 4, 4, 1], np.int32)
    mask = np.arange(4) < lengths[:, None]
    rollout = Rollout(
        prompts=Prompts(np.ones((4, 2), np.int32), np.full(4, 2, np.int32)),
        responses=responses,
        lengths=lengths,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        truncated=lengths == 4,
        action_mask=mask,
    )
    drawn = np.array([[5, 6, 1, 0], [5, 3, 2, 8], [5, 1, 7, 8], [9, 0, 0, 0]], np.int32)
    draws = begin_draws(jax.random.split(jax.random.key(0), 4))
    layout = sharding.replicated(tiny.make_mesh())
    replaced, _, changed = replace_tokens(options, rollout, drawn, draws, layout)
    assert changed == 3
    expected = [[5, 6, 1, 0], [5, 3, 0, 0], [5, 1, 0, 0], [9, 0, 0, 0]]
    np.testing.assert_array_equal(replaced.responses, expected)
    np.testing.assert_array_equal(replaced.lengths, [3, 2, 2, 1])
    # An EOS among the new tokens ends its response; the two others go on.
    np.testing.assert_array_equal(replaced.truncated, [False, True, False, True])


def test_forward_passes_read_the_micro_batches_of_the_first_epoch():
    config = tiny.config(
        rollout__exact=True,
        rollout__reuse_logprobs="auto",
        packing__row_length=18,
        actor__ppo_epochs=2,
        actor__ppo_mini_batch_size=4,
        actor__ppo_micro_batch_size_per_device=1,
    )
    packer = RolloutPacker(config, tiny.make_mesh(), has_critic=False)
    packed = packer.pack(0, np.array([8, 16, 4, 8, 12, 4, 6, 10]))
    packed = jax.tree.map(np.asarray, vars(packed))
    rows, count = packed["forward"]
    batches = packed["mini_batches"]["actor"]
    used = [batches.packing.sample[u, :n] for u, n in enumerate(batches.counts[:2])]
    assert count == batches.counts[:2].sum() < len(rows.sample)
    np.testing.assert_array_equal(rows.sample[:count], np.concatenate(used))
    assert (rows.sample[count:] == -1).all()
    assert set(rows.sample[rows.sample >= 0]) == set(range(8))


class Step:
    """The parts of a step that exact rollouts need, for a tiny actor."""

    def __init__(self, architecture, dtype, monkeypatch):
        monkeypatch.setattr(tiny, "ARCHITECTURE", architecture)
        self.config = tiny.config(
            model__dtype=dtype,
            rollout__exact=True,
            rollout__reuse_logprobs="auto",
            rollout__n=2,
            algorithm__adv_estimator="grpo",
            algorithm__use_reference=False,
            actor__ppo_mini_batch_size=tiny.B // 2,
            actor__ppo_micro_batch_size_per_device=2,
            actor__ppo_epochs=2,
            actor__optim__lr=3e-3,
        )
        self.mesh = tiny.make_mesh()
        self.nets = Networks(actor=Transformer(architecture, jnp.dtype(dtype)))
        self.state = tiny.make_state(self.config, self.mesh)
        self.step_options = StepOptions(self.config)
        self.sampling = SamplingOptions(tiny.T, 1.0, n=2, eos_ids=(1,), slots=6)
        self.packer = RolloutPacker(self.config, self.mesh, has_critic=False)
        self.sample_keys = SampleKeys(0, self.mesh)
        self.engine = BuiltInEngine(self.mesh, self.nets.actor, self.state.actor)

    def policy_params(self, state):
        return state.actor

    def sample(self, step):
        """Return a batch as the sampler draws it."""
        rng = np.random.default_rng(step)
        lengths = rng.integers(2, tiny.P + 1, tiny.B).astype(np.int32)
        prompts = Prompts(rng.integers(2, 32, (tiny.B, tiny.P)).astype(np.int32), lengths)
        self.engine.update_weights(self.state.actor)
        rollout = self.engine.generate(
            prompts, self.sample_keys(training_stream(0), step), self.sampling
        )
        batch = types.SimpleNamespace(prompts=prompts)
        return SampledBatch(batch=batch, rollout=rollout, position=0)

    def draw_exactly(self, sampled, step):
        observer = types.SimpleNamespace(
            phase=lambda name: contextlib.nullcontext(), write_pending_report=lambda: None
        )
        return exact.draw_exactly(self, self.state, sampled, step, observer)

    def learn(self, sampled, step):
        """Update the actor on a batch; return the metrics."""
        rollout = sampled.rollout
        lengths = np.repeat(sampled.batch.prompts.lengths, 2) + np.asarray(rollout.lengths)
        packed = self.packer.pack(step, lengths)
        sequences = forward_passes.join_sequences(rollout, self.config.sequence_length)
        rewards = np.random.default_rng(step).normal(size=len(lengths)).astype(np.float32)
        experience, _ = tiny.estimate_experience(
            self.config,
            self.state.control,
            sequences,
            rollout.logprobs,
            forward_passes.ForwardOutputs(),
            placement.place(rewards, sharding.rows(self.mesh)),
            None,
        )
        self.state, metrics = tiny.update_state(
            self.config, self.state, experience, packed.mini_batches["actor"], None, nets=self.nets
        )
        return metrics


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_update_finds_the_bits_of_the_rollout(name, dtype, monkeypatch):
    """Over steps that change the weights, and not for a log-prob or a program rounded otherwise."""
    parts = Step(ARCHITECTURES[name], dtype, monkeypatch)
    with jax.set_mesh(parts.mesh):
        tokens = redrawn = 0
        first = jax.device_get(parts.state.actor)
        for step in range(25):
            sampled = parts.draw_exactly(parts.sample(step), step)
            metrics = parts.learn(sampled, step)
            assert metrics["actor/inexact_logprobs"] == 0, step
            assert metrics["actor/first_log_ratio"] == 0
            assert metrics["actor/log_ratio_max"] > 1e-4, "later optimizer steps move the policy"
            tokens += int(sampled.rollout.lengths.sum())
            redrawn += sampled.metrics["rollout/redrawn_tokens"]
        assert tokens > 2000 and redrawn < 0.02 * tokens
        moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), first, parts.state.actor)
        assert max(jax.tree.leaves(moved)) > 0.01

        # A token that the forward pass does not draw is replaced, and what follows it decoded.
        sampled = parts.sample(25)
        expected = parts.draw_exactly(sampled, 25)
        row = int(np.argmax(sampled.rollout.lengths))
        other = sampled.rollout.responses[row, 1] ^ 2
        changed = dataclasses.replace(
            sampled.rollout, responses=sampled.rollout.responses.at[row, 1].set(other)
        )
        restored = parts.draw_exactly(sampled._replace(rollout=changed), 25)
        np.testing.assert_array_equal(restored.rollout.responses, expected.rollout.responses)
        np.testing.assert_array_equal(restored.rollout.logprobs, expected.rollout.logprobs)
        assert restored.metrics["rollout/exact_passes"] > 1

        # One log-prob that is an ulp lower is counted.
        lengths = np.repeat(sampled.batch.prompts.lengths, 2)
        packed = parts.packer.pack(25, lengths + np.asarray(expected.rollout.lengths))
        members = packed.mini_batches["actor"].members[0]
        row = int(np.argmax(members))
        logprobs = np.array(expected.rollout.logprobs)
        logprobs[row, 0] = np.nextafter(logprobs[row, 0], np.float32(-1e9))
        rounded = dataclasses.replace(expected.rollout, logprobs=jnp.asarray(logprobs))
        assert parts.learn(expected._replace(rollout=rounded), 25)["actor/inexact_logprobs"] == 1
        if dtype == "bfloat16":
            # The same pass, in a program that rounds other numbers to bfloat16.
            monkeypatch.setattr(exact, "forward_part_exactly", forward_passes.forward_part)
            sampled = parts.draw_exactly(parts.sample(26), 26)
            assert parts.learn(sampled, 26)["actor/inexact_logprobs"] > 10


@pytest.mark.slow
@pytest.mark.parametrize(("comes_back", "passes"), [(True, 2), (False, tiny.T + 1)])
def test_responses_that_never_settle_stay_in_the_end(comes_back, passes, monkeypatch):
    """When they are read a second time, or after more passes than they have tokens."""
    parts = Step(LLAMA, "float32", monkeypatch)
    draw_again = exact._draw_again
    read = itertools.count(1)

    def change_one(*arguments):
        rollout, replaced, draws, _ = draw_again(*arguments)
        if not comes_back:
            # Beyond the end of a response, where no pass reads it.
            shortest = int(jnp.argmin(rollout.lengths))
            responses = rollout.responses.at[shortest, -1].set(next(read))
            rollout = dataclasses.replace(rollout, responses=responses)
        return rollout, replaced, draws, jnp.int32(1)

    monkeypatch.setattr(exact, "_draw_again", change_one)
    with jax.set_mesh(parts.mesh):
        sampled = parts.draw_exactly(parts.sample(0), 0)
        assert int(sampled.rollout.lengths.min()) < tiny.T
        assert sampled.metrics["rollout/exact_passes"] == passes
        assert sampled.metrics["rollout/undecided_tokens"] == 1
        assert parts.learn(sampled, 0)["actor/inexact_logprobs"] == 0
