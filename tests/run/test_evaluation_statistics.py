"""pass@k, maj@k and best of k against all subsets, one by one; intervals against their coverage."""

import collections
import itertools
import time

import numpy as np
import pytest

from jax_ppo.run.evaluation_statistics import (
    best_of_k,
    bootstrap_interval,
    describe_prompts,
    majority_at_k,
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


def vote(correct, answers):
    """Return the probability that the most frequent answer of these responses is right."""
    votes = collections.Counter(
        "right" if is_right else answer
        for is_right, answer in zip(correct, answers, strict=True)
        if is_right or answer is not None
    )
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return winners.count("right") / max(len(winners), 1)


@pytest.mark.parametrize("seed", range(12))
def test_the_majority_is_an_average_over_all_subsets(seed):
    random = np.random.default_rng(seed)
    n = 7
    answers = random.choice([None, "a", "b", "c", "right"], n)
    # What a rule reads as right may be written in two ways.
    correct = np.array([float(answer == "right") for answer in answers])
    answers[answers == "right"] = random.choice(["1/2", "0.5"], int(correct.sum()))
    for k in (1, 2, 3, 4, 7):
        subsets = map(list, itertools.combinations(range(n), k))
        expected = np.mean([vote(correct[chosen], answers[chosen]) for chosen in subsets])
        assert majority_at_k(correct, answers, k) == pytest.approx(expected, abs=1e-12)


def test_a_majority_of_many_responses_is_found_in_a_moment():
    correct = np.arange(64) % 2.0
    answers = np.array([str(i % 8) for i in range(64)], object)
    started = time.process_time()
    shares = [majority_at_k(correct, answers, k) for k in (2, 4, 8, 16, 32, 64)]
    assert time.process_time() - started < 2 and shares[-1] == 1
    assert shares == sorted(shares) and shares[0] == pytest.approx(0.5)


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
    figures = describe_prompts(
        np.ones((3, 1)), np.array([[1.0], [0.0], [1.0]]), np.full((3, 1), "7", object), ["a"] * 3
    )
    assert figures.keys() == {"accuracy_low", "accuracy_high"}
    assert figures["accuracy_low"] <= 2 / 3 <= figures["accuracy_high"]


def test_sources_are_described_apart():
    scores = np.array([[1.0, 3.0], [0.0, 0.0], [5.0, 5.0]])
    correct = np.array([[1.0, 0.0], [0.0, 0.0], [np.nan, np.nan]])
    answers = np.array([["4", "5"], [None, "6"], [None, None]], object)
    figures = describe_prompts(scores, correct, answers, ["math", "math", "story"])
    # Of the two answers to the first prompt, each is as likely; the second is never right.
    assert figures["maj@2"] == figures["math/maj@2"] == 0.25 and "story/maj@2" not in figures
    assert (figures["pass@2"], figures["best@2"]) == (0.5, pytest.approx(8 / 3))
    assert (figures["math/accuracy"], figures["math/worst@2"]) == (0.25, 0.5)
    assert figures["story/reward_mean"] == 5 and "story/accuracy" not in figures
    assert "story/reward_mean_low" in figures


def test_a_response_that_the_rule_failed_on_takes_no_other_out_of_a_figure():
    """Of 3, 4 and 2 known responses 2, 0 and 2 are right."""
    correct = np.array([[1, np.nan, 1, 0], [0, 0, 0, 0], [1, 1, np.nan, np.nan]])
    answers = np.array([["4", None, "4", "5"], ["6"] * 4, ["7", "7", None, None]], object)
    scores = np.nan_to_num(correct)
    figures = describe_prompts(scores, correct, answers, ["a", "a", "b"])
    assert figures["a/accuracy"] == pytest.approx(2 / 7) and figures["b/accuracy"] == 1
    assert 0 < figures["a/accuracy_high"] <= 2 / 3 and figures["b/accuracy_low"] == 1
    # Two of the first prompt's three: all pairs have a right one, and one of three pairs agrees.
    assert figures["pass@2"] == pytest.approx(2 / 3) and figures["a/pass@4"] == 0
    assert figures["a/maj@2"] == pytest.approx((1 + 0.5 + 0.5) / 3 / 2)
    assert "b/pass@4" not in figures and "b/maj@4" not in figures
