"""`rollout.exact_filters`: training sees the distribution that filtered tokens are drawn from."""

import csv
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from enumerate_policy import Enumerated
from jax_ppo.config.loading import load_config
from jax_ppo.config.notes import train_notes
from jax_ppo.demonstration import arithmetic
from jax_ppo.errors import UserError
from jax_ppo.kernels import logprobs
from jax_ppo.run import ppo_training
from jax_ppo.sampler import sampling
from llama_folder import write_llama

TOP_K, TOP_P = 6, 0.7


@pytest.mark.slow
def test_by_enumeration_the_gradient_is_of_the_reward_under_the_filtered_policy():
    """Ratios and gradients over all tokens are biased: filtered tokens are never drawn."""
    rng = np.random.default_rng(0)
    responses = Enumerated(vocabulary=5, longest=3)
    theta = jnp.asarray(rng.normal(0, 1.5, responses.shape), jnp.float32)
    rewards = rng.normal(size=len(responses.tokens))
    uniforms = jnp.full((len(theta), 2), 0.5)
    draws = sampling.sample_tokens(theta, uniforms, 1.0, 4, TOP_P, returns_kept=True)
    is_kept = np.unpackbits(draws.kept, axis=1, count=5, bitorder="little").astype(bool)
    assert is_kept.any(1).all() and not is_kept.all(1).all()

    def restrict(theta):
        return jnp.where(is_kept, theta, -1e9)

    def expected_reward(theta):
        return responses.expect(restrict(theta), rewards)

    def surrogate(theta, kept):
        """Return each token's ratio times the response's reward, as the kernel sees it."""

        def token_logprobs(theta):
            # The logits of each position are its state's row of theta.
            hidden = jax.nn.one_hot(responses.states, len(theta))
            mask = jnp.asarray(responses.mask, bool)
            bits = None if kept is None else kept[responses.states]
            return logprobs.token_logprobs(
                hidden, theta.T, responses.tokens, mask, 1.0, kept_GxNxW=bits
            )[0]

        ratio = jnp.exp(token_logprobs(theta) - jax.lax.stop_gradient(token_logprobs(theta)))
        return responses.mask * ratio * rewards[:, None]

    expected = jax.grad(expected_reward)(theta)
    exact, full = (
        responses.expected_gradient(
            theta, lambda theta, kept=kept: surrogate(theta, kept), sampler=restrict(theta)
        )
        for kept in (draws.kept, None)
    )
    np.testing.assert_allclose(exact, expected, atol=1e-5)
    assert np.abs(full - expected).max() > 0.02  # two thousand times as far


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"rollout__max_staleness": 1, "algorithm__rollout_is": "token"},
            marks=pytest.mark.exhaustive,
            id="sampled ahead",
        ),
    ],
)
def test_a_run_learns_the_distribution_that_it_samples(changes, tmp_path):
    """In float32 sampler and trainer agree, unless they read another sample's or token's set."""
    texts = [
        prompt + response for prompt, response in arithmetic.generate_worked_solutions(100, 0.5, 0)
    ]
    write_llama(tmp_path, texts, 192)
    config = tiny.config(
        model__path=str(tmp_path / "llama"),
        data__train_files="arithmetic:32",
        data__max_prompt_length=80,
        reward__terms="length[5:200]:1",
        rollout__exact_filters=True,
        rollout__top_k=TOP_K,
        rollout__top_p=TOP_P,
        rollout__min_new_tokens=2,
        trainer__export=False,
        trainer__save_freq=1,
        trainer__max_checkpoints=4,
        trainer__total_training_steps=4,
        **changes,
    )

    def run():
        ppo_training.train_ppo(config, tmp_path / "run")
        with (tmp_path / "run" / "training_metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return [
            [float(row[name]) for row in rows]
            for name in ("rollout/logprob_difference", "actor/entropy", "kl/reference")
        ]

    differences, entropies, kls = run()
    steps_of_newest_weights = 1 if config.rollout.max_staleness else 4
    assert max(differences[:steps_of_newest_weights]) < 1e-5
    # Entropy and KL are those over the kept tokens, too.
    assert max(entropies) <= math.log(TOP_K) and abs(kls[0]) < 1e-6
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    assert run()[0] == differences


def test_only_an_inexact_filter_is_said_to_be_off_policy():
    assert "exact_filters" in " ".join(train_notes(tiny.config(rollout__min_p=0.1)))
    exact = tiny.config(rollout__min_p=0.1, rollout__exact_filters=True)
    assert train_notes(exact) == []


def test_an_engine_that_cannot_record_draws_is_refused():
    values = {"rollout.exact_filters": True, "rollout.top_k": TOP_K, "rollout.engine": "a:B"}
    with pytest.raises(UserError, match=r"config\.rollout\.engine='a:B' does not record it"):
        load_config("arithmetic", values)
