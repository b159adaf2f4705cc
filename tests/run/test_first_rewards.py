"""Moments of the first policy's rewards."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.run import first_rewards
from jax_ppo.training.control import first_control
from jax_ppo.training.state import TrainState


def measure(monkeypatch, failures):
    """Return the moments of two batches of the rewards 1 to 8; `failures` of each failed."""
    monkeypatch.setattr(first_rewards, "response_rewards", lambda *arguments: arguments[-1].scores)
    rewards = RuleRewards(
        scores=jnp.arange(1.0, 9.0),
        steps=None,
        correct=np.full(8, np.nan),
        failures=failures,
        scored=8,
        extra={},
    )
    config = tiny.config(reward__normalize="reference", reward__normalize_samples=9)
    run = types.SimpleNamespace(
        config=config,
        batches=lambda position: iter([types.SimpleNamespace(prompts=None)] * 2),
        engine=types.SimpleNamespace(
            update_weights=lambda params: None,
            generate=lambda *arguments: None,
            release_weights=lambda: None,
        ),
        policy_params=lambda state: None,
        place_prompts=lambda prompts: None,
        sample_keys=lambda *address: None,
        sampling=None,
        rules=types.SimpleNamespace(score=lambda batch, rollout: rewards),
    )
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        models={},
        optimizers={},
        control=first_control(config.algorithm.kl_ctrl, config.reward, config.critic),
    )
    return first_rewards.measure_first_rewards(run, state).control.moments["rewards"]


def test_rewards_of_whole_batches_count(monkeypatch, capsys):
    moments = measure(monkeypatch, failures=0)
    assert (float(moments.count), float(moments.mean)) == (16, 4.5)
    assert capsys.readouterr().out == "the first policy's rewards: mean 4.5, deviation 2.291\n"


def test_rewards_that_could_not_be_measured_are_reported(monkeypatch, capsys):
    """Regression: with a reward server that was down, nothing was normalized, silently."""
    measure(monkeypatch, failures=3)
    assert "; 6 of 16 have config.reward.fallback_score" in capsys.readouterr().out
    with pytest.raises(UserError, match="reference': the reward function failed on all 16 resp"):
        measure(monkeypatch, failures=8)
