"""Bias and variance of lambdas and gammas, by hand and against the kernel of advantages."""

import jax
import numpy as np
import pytest

from jax_ppo.kernels.advantages import gae
from jax_ppo.reporting import lambda_table
from jax_ppo.reporting.lambda_table import Tokens, collect_tokens, compare_lambdas, estimate_gae


def row_of(rows, lam, gamma):
    (row,) = [row for row in rows if (row["lambda"], row["gamma"]) == (lam, gamma)]
    return row


def test_bias_and_deviation_by_hand():
    """Two responses of two tokens earn 1 and 0 at their ends; values 0.5 and 0, then 0 and 0.

    Monte-Carlo advantages are 0.5, 1 and 0, 0. One-step errors (lambda 0) are -0.5, 1 and 0, 0:
    the first tokens are -0.5 off on average, the second ones exact.
    """
    tokens = Tokens(
        rewards=np.array([[0.0, 1.0], [0.0, 0.0]]),
        values=np.array([[0.5, 0.0], [0.0, 0.0]]),
        lengths=np.array([2, 2]),
    )
    rows = compare_lambdas(tokens, lam=1.0, gamma=1.0)
    exact = row_of(rows, 1.0, 1.0)
    assert exact["bias_low"] == exact["bias_high"] == 0 and exact["configured"]
    # Mean 0.375, mean square 1.25 / 4.
    assert exact["deviation"] == pytest.approx(np.sqrt(1.25 / 4 - 0.375**2))
    one_step = row_of(rows, 0.0, 1.0)
    assert one_step["bias_low"] == pytest.approx(np.sqrt((2 * 0.5**2 + 2 * 0) / 4))
    assert one_step["bias_high"] == pytest.approx(np.sqrt(1 / 4))
    assert one_step["deviation"] == pytest.approx(np.sqrt(1.25 / 4 - 0.125**2))
    # Half of the next error: 0 - 0.5 + 0.5 x 1 = 0.
    half = row_of(rows, 0.5, 1.0)
    assert half["bias_low"] == pytest.approx(np.sqrt(2 * 0.25**2 / 4))
    assert half["bias_high"] == pytest.approx(np.sqrt(0.5**2 / 4))
    # Discounted by 0.98, the first token's advantage is 0.48 and 0.02 off.
    assert row_of(rows, 1.0, 0.98)["bias_low"] == pytest.approx(np.sqrt(2 * 0.01**2 / 4))


def test_the_bias_of_a_critic_that_knows_only_the_mean_lies_between_the_two():
    """Half of the responses earn 1; values are 0.5 throughout, so lambda 0 sees only the end.

    The first token decides: its advantage is +-0.5, of lambda 0 it is 0. The bias is 0.5 there, and
    nothing of it is in the mean.
    """
    tokens = Tokens(np.array([[0.0, 1.0], [0.0, 0.0]]), np.full((2, 2), 0.5), np.array([2, 2]))
    one_step = row_of(compare_lambdas(tokens, lam=1.0, gamma=1.0), 0.0, 1.0)
    assert one_step["bias_low"] == 0
    assert one_step["bias_high"] == pytest.approx(np.sqrt(2 * 0.5**2 / 4))


def test_the_configured_pair_is_added_to_the_grid():
    tokens = Tokens(np.ones((1, 2)), np.zeros((1, 2)), np.array([2]))
    rows = compare_lambdas(tokens, lam=0.3, gamma=0.7)
    assert len(rows) == (len(lambda_table.LAMBDAS) + 1) * (len(lambda_table.GAMMAS) + 1)
    assert [row for row in rows if row["configured"]] == [row_of(rows, 0.3, 0.7)]
    # Its own gamma defines the return.
    assert row_of(rows, 1.0, 0.7)["bias_high"] == 0


def test_advantages_equal_the_kernels_with_holes_and_ends():
    r = np.random.default_rng(0)
    masks = [[1, 1, 0, 1, 1], [1, 1, 1], [1]]
    records = [
        {
            "rewards": (r.normal(size=len(mask)) * mask).tolist(),
            "values": r.normal(size=len(mask)).tolist(),
            "action_mask": mask,
        }
        for mask in masks
    ]
    tokens = collect_tokens(records)
    assert tokens.lengths.tolist() == [4, 3, 1]
    ours = estimate_gae(tokens, 0.9, 0.95)
    for record, row, length in zip(records, ours, tokens.lengths, strict=True):
        mask = np.array(record["action_mask"], bool)
        arrays = (np.array(record[name], np.float32) for name in ("rewards", "values"))
        theirs, _ = jax.jit(gae)(*arrays, mask, 0.95, 0.9)
        np.testing.assert_allclose(row[:length], theirs[mask], atol=1e-6)
        assert not row[length:].any()


def test_responses_without_values_have_no_table():
    assert collect_tokens([{"rewards": [1.0]}]) is None
    assert collect_tokens([]) is None
