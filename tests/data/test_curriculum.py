"""Prompts are drawn by their solve rates."""

import collections
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.data.prompt_batches import CurriculumBatches, solve_rate_weights
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.errors import UserError
from jax_ppo.ppo.rewarding import observe_solve_rates
from jax_ppo.types import Example


def batches(solve_rates, position=0, rows=8, batch_size=2):
    examples = tuple(Example(str(row), "mine") for row in range(rows))
    dataset = PromptDataset(examples, [np.array([row]) for row in range(rows)], 16)
    return CurriculumBatches(dataset, batch_size, 0, position, solve_rates)


def test_prompts_that_are_always_or_never_solved_are_drawn_twenty_times_less_often():
    rates = {"0": 1.0, "1": 0.0, "2": 0.5, "3": 0.25}
    weights = solve_rate_weights(rates, 5)
    np.testing.assert_allclose(weights / weights[4], [0.05, 0.05, 1, 0.75, 1])
    counts = collections.Counter()
    drawn = batches(rates, rows=5, batch_size=1)
    for _ in range(4000):
        counts.update(next(drawn).indices.tolist())
    assert [counts[row] / 4000 for row in range(5)] == pytest.approx(weights, abs=0.02)


def test_a_batch_follows_from_position_and_rates_and_has_no_prompt_twice():
    rates = {"3": 1.0}
    undisturbed = batches(rates)
    first = [next(undisturbed).indices.tolist() for _ in range(5)]
    resumed = batches(dict(rates), position=4)
    assert [next(resumed).indices.tolist() for _ in range(3)] == first[2:]
    assert all(len(set(indices)) == 2 for indices in first)
    assert resumed.position == undisturbed.position == 10


def test_newer_responses_count_more_and_undefined_correctness_nothing():
    rates = {}
    drawn = batches(rates)
    drawn.observe(np.array([5, 6]), np.array([1, 1, 0, np.nan]))
    assert rates == {"5": 1.0, "6": 0.0}
    drawn.observe(np.array([5]), np.array([0.0, 0.0]))
    drawn.observe(np.array([5, 7]), np.array([0.0, 0.0, np.nan, np.nan]))
    assert rates == {"5": 0.25, "6": 0.0}


def test_a_rule_without_correctness_is_refused():
    with pytest.raises(UserError, match="config.data.curriculum='solve_rate'.*correctness"):
        batches({}).observe(np.array([0]), np.array([np.nan, np.nan]))


def test_a_step_whose_responses_could_not_be_scored_changes_nothing():
    """Regression: one such step ended the run, as if the rule did not define correctness."""
    drawn = batches({"5": 0.5})
    batch = types.SimpleNamespace(indices=np.array([5]))
    rewards = types.SimpleNamespace(failures=2, scored=2, correct=jnp.full(2, jnp.nan))
    observe_solve_rates(drawn, batch, rewards)
    assert drawn.solve_rates == {"5": 0.5}
    rewards.failures = 1
    with pytest.raises(UserError, match="does not define correctness"):
        observe_solve_rates(drawn, batch, rewards)
