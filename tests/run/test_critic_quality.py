"""Figures of the critic on held-out responses."""

import dataclasses
import types

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.config import loading
from jax_ppo.kernels.masked_statistics import empty_moments, update_moments
from jax_ppo.ppo.step_parts import StepOptions
from jax_ppo.run import critic_quality, ppo_training
from jax_ppo.run.critic_quality import Predictions, collect_predictions, describe_critic
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.control import first_control
from whole_run import read_lines


def predictions(values, returns, tenths=None):
    tenths = np.zeros(len(values), int) if tenths is None else np.array(tenths)
    return Predictions(np.array(values, np.float32), np.array(returns, np.float32), tenths)


def test_figures_by_hand():
    """Errors 1, 0, -1, 2 of returns 0, 1, 2, 3: variances 1.25 of both."""
    figures = describe_critic([predictions([1, 1, 1, 5], [0, 1, 2, 3], [0, 0, 9, 9])])
    assert figures["bias"] == pytest.approx(0.5)
    assert figures["error"] == pytest.approx(np.sqrt(1.5))
    assert figures["explained_variance"] == pytest.approx(0.0)
    assert figures["bias_tenth_1"] == 0.5 and figures["error_tenth_10"] == pytest.approx(2.5**0.5)
    assert "bias_tenth_2" not in figures
    # Equal values keep their order: each bin holds one token.
    assert figures["calibration_error"] == pytest.approx(1.0)


def test_an_exact_critic_explains_everything_and_is_calibrated():
    returns = np.random.default_rng(0).normal(size=100)
    figures = describe_critic([predictions(returns, returns)])
    assert figures["explained_variance"] == 1
    assert figures["bias"] == figures["error"] == figures["calibration_error"] == 0


def test_equal_returns_leave_no_variance_to_explain():
    assert describe_critic([predictions([0, 1], [1, 1])])["explained_variance"] == 0
    by_rounding = predictions([0, 1], [1, np.nextafter(np.float32(1), 2)])
    assert describe_critic([by_rounding])["explained_variance"] == 0


def knows_rewards(moments=None, **options):
    config = tiny.config(**options)
    control = first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    if moments is not None:
        control = dataclasses.replace(control, moments={"rewards": moments})
    return critic_quality.knows_rewards(config.algorithm, control)


def test_returns_have_no_unit_before_the_moments_have_seen_a_reward():
    assert knows_rewards() and not knows_rewards(reward__normalize="running")
    seen = update_moments(empty_moments(), np.ones(2), np.ones(2, bool))
    assert knows_rewards(seen, reward__normalize="running")


def test_returns_of_rewards_that_only_a_rollout_shapes_are_not_compared():
    """Whitened ones, in which the critic's values are, and a KL whose reference is missing."""
    assert not knows_rewards(algorithm__whiten_rewards=True)
    config = tiny.config(algorithm__use_kl_in_reward=True)
    control = first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    without = dataclasses.replace(config.algorithm, use_reference=False)
    assert critic_quality.knows_rewards(config.algorithm, control)
    assert not critic_quality.knows_rewards(without, control)


def test_a_policy_that_equals_its_reference_has_no_kl_at_any_temperature_of_evaluations():
    """The sampler's log-probs, here 0, are not at the temperature of training."""
    config = tiny.config(
        rollout__reuse_logprobs="always",
        algorithm__use_kl_in_reward=True,
        algorithm__kl_ctrl__kl_coef=1.0,
    )
    mesh = tiny.make_mesh()
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)

        def run_forward_passes(state, batch, rollout, **changes):
            return tiny.score_rollout(config, mesh, state, rollout, changes=changes)

        run = types.SimpleNamespace(
            step_options=StepOptions(config), run_forward_passes=run_forward_passes
        )
        batch = types.SimpleNamespace(examples=range(tiny.B), count=tiny.B)
        rules = types.SimpleNamespace(steps=None)
        rewards = placement.place(np.ones(tiny.B, np.float32), sharding.rows(mesh))
        predicted = critic_quality.predict_returns(run, state, batch, rollout, rules, rewards)
    np.testing.assert_array_equal(predicted.returns, 1)


def test_a_token_is_in_the_tenth_of_its_response_that_its_own_tokens_reach():
    """Tokens that the policy did not choose neither count nor move the others."""
    actions = np.array([[True, False, True], [True, False, False]])
    collected = collect_predictions(np.zeros((2, 3)), np.zeros((2, 3)), actions)
    assert collected.tenths.tolist() == [0, 5, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", [False, True])
def test_before_training_the_bias_is_the_negative_mean_return(shared, tmp_path):
    """A head of zeros predicts 0, and without discount each token has its response's reward."""
    options = {
        "data.train_files": "arithmetic:16",
        "data.val_files": "arithmetic:12:heldout",
        "data.train_batch_size": 8,
        "data.val_batch_size": 8,
        "actor.ppo_mini_batch_size": 8,
        "critic.shared_trunk": shared,
        "algorithm.lam": 0.9,
        "reward.missing_eos_penalty": 1.0,
        "trainer.critic_warmup": 0,
        "trainer.total_training_steps": 1,
        "trainer.save_freq": 0,
        "trainer.export": False,
    }
    summary = ppo_training.train_ppo(loading.load_config("arithmetic", options), tmp_path)
    (rollouts,) = tmp_path.glob("rollouts/evaluation_000000.jsonl")
    records = read_lines(rollouts)
    returns = np.array([record["score"] - record["truncated"] for record in records])
    lengths = np.array([len(record["response_ids"]) for record in records])
    first, last = summary["evaluations"]
    assert len(records) == 12 and returns.any()
    mean, square = (np.average(x, weights=lengths) for x in (returns, returns**2))
    assert first["critic/bias"] == pytest.approx(-mean, abs=1e-6)
    assert first["critic/error"] == pytest.approx(np.sqrt(square), abs=1e-6)
    assert last["critic/bias"] != first["critic/bias"]
