"""pass@k and best of k against all subsets, one by one; intervals against their coverage."""

import itertools

import numpy as np
import pytest

from jax_ppo.ppo.evaluation_statistics import (
    best_of_k,
    bootstrap_interval,
    describe_prompts,
    pass_at_k,
    subset_sizes,
)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_and_best_are_averages_over_all_subsets(k):
    random = np.random.default_rng(0)
    scores = random.normal(size=(4, 5)).round(1)
    correct = random.integers(0, 2, (4, 5))
    subsets = list(itertools.combinations(range(5), k))
    best = np.mean([scores[:, subset].max(1) for subset in subsets], axis=0)
    worst = np.mean([scores[:, subset].min(1) for subset in subsets], axis=0)
    passed = np.mean([correct[:, subset].max(1) for subset in subsets], axis=0)
    np.testing.assert_allclose(best_of_k(scores, k), best)
    np.testing.assert_allclose(-best_of_k(-scores, k), worst)
    np.testing.assert_allclose(pass_at_k(correct, k), passed)


@pytest.mark.parametrize(("n", "sizes"), [(1, []), (2, [2]), (4, [2, 4]), (6, [2, 4, 6])])
def test_powers_of_two_and_all_responses_are_reported(n, sizes):
    assert subset_sizes(n) == sizes


def test_the_interval_holds_the_true_mean_as_often_as_it_says():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        low, high = bootstrap_interval(random.binomial(1, 0.3, 200).astype(float))
        held += low <= 0.3 <= high
    assert 0.88 <= held / 200 <= 0.99


def test_one_response_of_one_source_has_an_interval_only():
    figures = describe_prompts(np.ones((3, 1)), np.array([[1.0], [0.0], [1.0]]), ["a"] * 3)
    assert figures.keys() == {"accuracy_low", "accuracy_high"}
    assert figures["accuracy_low"] <= 2 / 3 <= figures["accuracy_high"]


def test_sources_are_described_apart():
    scores = np.array([[1.0, 3.0], [0.0, 0.0], [5.0, 5.0]])
    correct = np.array([[1.0, 0.0], [0.0, 0.0], [np.nan, np.nan]])
    figures = describe_prompts(scores, correct, ["math", "math", "story"])
    assert (figures["pass@2"], figures["best@2"]) == (0.5, pytest.approx(8 / 3))
    assert (figures["math/accuracy"], figures["math/worst@2"]) == (0.25, 0.5)
    assert figures["story/reward_mean"] == 5 and "story/accuracy" not in figures
    assert "story/reward_mean_low" in figures
