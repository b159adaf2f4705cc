"""Partial rollouts: responses continue where they stopped, under newer weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.sampler import sampling
from jax_ppo.sampler.continuation import (
    begin_draws,
    begin_responses,
    continuation_program,
    has_ended,
)
from jax_ppo.sampler.engine import SamplingOptions
from tiny_actor import Actor, T, make_prompts

LENGTHS = (5, 16, 1, 9, 2, 12, 7)
EOS = (3, 7, 11, 30)
LENGTH = 5  # tokens of a call


@pytest.fixture(scope="module")
def actor(shallow_actor):
    return shallow_actor


@pytest.fixture(scope="module")
def continuation(actor):
    options = SamplingOptions(T, 1.0, eos_ids=EOS, slots=3, partial_length=LENGTH)
    return continuation_program(actor.decoded, options)


@pytest.fixture(scope="module")
def begun():
    keys = sampling.sample_keys(jax.random.key(0), jnp.arange(len(LENGTHS)))
    return begin_responses(make_prompts(LENGTHS), T), begin_draws(keys)


def continue_to_the_end(continuation, params, rollout, draws, version):
    while not has_ended(rollout).all():
        rollout, draws, _ = continuation(params, rollout, draws, version)
    return jax.device_get(rollout)


def test_with_unchanged_weights_the_tokens_are_those_of_one_rollout(actor, continuation, begun):
    """Samples that enter at different times are at different places of their responses."""
    later = np.arange(len(LENGTHS)) >= 3
    first, draws, _ = continuation(actor.params, *begun, 0)

    def enter(new, old):
        return jnp.where(later.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    rollout, draws = jax.tree.map(enter, begun, (first, draws))
    assert set(np.asarray(rollout.lengths)) >= {0, LENGTH}
    rollout = continue_to_the_end(continuation, actor.params, rollout, draws, 1)
    alone = actor.sample(make_prompts(LENGTHS), eos_ids=EOS, slots=3)
    for name in ("responses", "lengths", "truncated", "action_mask"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(alone, name))
    np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-5)
    assert alone.lengths.max() == T and alone.lengths.min() <= LENGTH


def test_each_tokens_log_prob_is_that_of_the_weights_that_its_version_names(
    actor, continuation, begun
):
    newer = Actor(actor.scored.architecture)
    newer.stacked, newer.params = newer.init(jax.random.key(1))
    rollout, draws, _ = continuation(actor.params, *begun, 4)
    rollout = continue_to_the_end(continuation, newer.params, rollout, draws, 6)
    versions = np.where(np.arange(T) < LENGTH, 4, 6) * rollout.action_mask
    np.testing.assert_array_equal(rollout.versions, versions)
    assert (versions == 6).any()
    for version, policy in ((4, actor), (6, newer)):
        logprobs = policy.logprobs(rollout)
        drawn = rollout.action_mask & (rollout.versions == version)
        np.testing.assert_allclose(rollout.logprobs[drawn], logprobs[drawn], atol=1e-4)
        # The other weights' log-probs differ.
        others = rollout.action_mask & ~drawn
        assert np.abs(rollout.logprobs - logprobs)[others].max() > 0.1
