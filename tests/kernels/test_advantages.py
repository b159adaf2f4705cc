import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import advantages as kernel

gae = jax.jit(kernel.gae)


def test_by_hand():
    # gamma = lam = 1/2.
    # delta_2 = 8 + 0 - 4 = 4; delta_1 = 2 + 4/2 - 2 = 2; delta_0 = 1 + 2/2 - 1 = 1.
    # A_2 = 4; A_1 = 2 + 4/4 = 3; A_0 = 1 + 3/4 = 1.75. Returns A + V.
    rewards, values, mask = jnp.array([1.0, 2, 8]), jnp.array([1.0, 2, 4]), jnp.ones(3)
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    np.testing.assert_array_equal(advantages, [1.75, 3, 4])
    np.testing.assert_array_equal(returns, [2.75, 5, 8])
    # With 2 as the value after the end:
    # delta_2 = 5, A_2 = 5, A_1 = 2 + 5/4 = 3.25, A_0 = 1 + 3.25/4 = 1.8125.
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5, bootstrap_value=2.0)
    np.testing.assert_array_equal(advantages, [1.8125, 3.25, 5])
    np.testing.assert_array_equal(returns, [2.8125, 5.25, 9])


def test_a_batch_is_refused():
    with pytest.raises(AssertionError, match="vmap"):
        gae(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones((2, 3)), 1.0, 1.0)


TURNS = np.array([0, 0, 1, 1, 2, 0, 3, 0])  # the turn of each token, 0 if nobody's
TURN_MASK, TURN_STARTS = TURNS > 0, np.array([0, 0, 1, 0, 1, 0, 1, 0])


def test_turns_by_hand(poison):
    """Turns of 2, 1 and 1 tokens, nothing between the first two; gamma = lam = 1/2, bootstrap 4.

    Rewards 1 + 2, 4, 8; values 2, 4, 6. delta = 8 + 4/2 - 6 = 4; 4 + 6/2 - 4 = 3; 3 + 4/2 - 2 = 3.
    A = 4; 3 + 4/4 = 4; 3 + 4/4 = 4. Returns 10, 8, 6.
    """
    rewards = poison(np.array([0, 0, 1.0, 2, 4, 0, 8, 0]), TURN_MASK)
    values = poison(np.array([0, 0, 2.0, 99, 4, 0, 6, 0]), TURN_STARTS)
    advantages, returns = jax.jit(kernel.turn_gae)(
        rewards, values, TURN_MASK, TURN_STARTS, 0.5, 0.5, 4.0
    )
    assert advantages.dtype == returns.dtype == jnp.float32
    np.testing.assert_array_equal(advantages, [0, 0, 4, 4, 4, 0, 4, 0])
    np.testing.assert_array_equal(returns, [0, 0, 6, 0, 8, 0, 10, 0])


def test_turns_and_their_tokens_by_hand(poison):
    """The turns above, with gamma 1 and lam 1/2 within them, and 3 the value of the second token.

    After the first turn 4/2 + 4/4 = 3 follows: delta_1 = 2 + 3 - 3 = 2; delta_0 = 1 + 3 - 2 = 2;
    A_0 = 2 + 2/2 = 3. The others have one token: as above.
    """
    rewards = poison(np.array([0, 0, 1.0, 2, 4, 0, 8, 0]), TURN_MASK)
    values = poison(np.array([0, 0, 2.0, 3, 4, 0, 6, 0]), TURN_MASK)
    advantages, returns = jax.jit(kernel.bi_level_gae)(
        rewards, values, TURN_MASK, TURN_STARTS, 1.0, 0.5, 0.5, 0.5, 4.0
    )
    assert advantages.dtype == returns.dtype == jnp.float32
    np.testing.assert_array_equal(advantages, [0, 0, 3, 2, 4, 0, 4, 0])
    np.testing.assert_array_equal(returns, [0, 0, 5, 5, 8, 0, 10, 0])


def test_turns_against_gae(rng, poison):
    """Turns of one token; lambdas of 1; a single turn; the first token of each turn."""
    rewards, values = rng.normal(0, 1, (2, 8)).astype(np.float32)
    rewards, values = (poison(x, TURN_MASK) for x in (rewards, values))
    every, one = TURN_MASK, np.arange(8) == 2
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    parts = (rewards, values, TURN_MASK)
    close(kernel.turn_gae(*parts, every, 0.9, 0.7, 2.0), gae(*parts, 0.9, 0.7, 2.0))
    close(kernel.bi_level_gae(*parts, every, 0.3, 0.2, 0.9, 0.7, 2.0), gae(*parts, 0.9, 0.7, 2.0))
    close(kernel.bi_level_gae(*parts, one, 0.9, 0.7, 0.3, 0.2), gae(*parts, 0.9, 0.7))
    close(kernel.bi_level_gae(*parts, TURN_STARTS, 1.0, 1.0, 1.0, 1.0), gae(*parts, 1.0, 1.0))
    turns = kernel.turn_gae(*parts, TURN_STARTS, 0.9, 0.7, 2.0)
    both = kernel.bi_level_gae(*parts, TURN_STARTS, 1.0, 1.0, 0.9, 0.7, 2.0)
    close(turns[0][TURN_STARTS == 1], both[0][TURN_STARTS == 1])
    close(turns[1][TURN_STARTS == 1], both[1][TURN_STARTS == 1])
    assert np.abs(turns[0] - both[0]).max() > 0.1


def test_length_adaptive_lam_by_hand():
    # alpha = 0.05: 1 - 1 / (0.05 x 100) = 0.8 for 100 tokens, 1 - 1 / 20 = 0.95 for 400;
    # 20 tokens result in 0, and so do fewer.
    lam = kernel.length_adaptive_lam(jnp.array([[100, 400], [20, 10], [1, 0]]), 0.05)
    assert lam.dtype == jnp.float32
    np.testing.assert_allclose(lam, [[0.8, 0.95], [0, 0], [0, 0]], atol=1e-6)


def test_reward_to_go_by_hand(poison):
    # gamma = 1/2: 8; 2 + 8/2 = 6; 1 + 6/2 = 4.
    mask = np.array([1, 1, 1, 0, 0, 0])
    rewards = poison(np.array([1.0, 2, 8, 5, 5, 5]), mask)
    result = jax.jit(kernel.reward_to_go)(rewards, mask, 0.5)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, [4, 6, 8, 0, 0, 0])
    slope = jax.grad(lambda r: kernel.reward_to_go(r, mask, 0.5)[0])(jnp.asarray(rewards))
    np.testing.assert_array_equal(slope, [1, 0.5, 0.25, 0, 0, 0])


def test_a_group_that_differs_by_rounding_is_equal():
    """Rewards 1, -0.9 and -0.1 sum to 0 or 2e-8, by their order: sizes 2, which round by 2e-6.

    Divided by its standard deviation, 1e-8, that would be an advantage of 1e-2. In the second group
    the same difference is one of scores of 1e-8.
    """
    scores = jnp.array([0.0, 2e-8, 0.0, 2e-8])
    equal = kernel.equalize_groups(scores, jnp.array([2.0, 2.0, 2e-8, 2e-8]), 2)
    np.testing.assert_array_equal(equal, scores.at[1].set(0))
    np.testing.assert_array_equal(kernel.grpo(equal, 2, by_std=True)[:2], 0)
    both = jnp.stack([equal, jnp.array([1.0, 1 + 1e-7, 1.0, 2.0])], axis=1)
    np.testing.assert_array_equal(
        kernel.equalize_groups(both, jnp.abs(both), 2)[:, 1], [1, 1, 1, 2]
    )


def test_groups_by_hand():
    # Groups (1, 2, 6) and (0, 0, 3). Means 3 and 1;
    # means of the others (4, 3.5, 1.5) and (1.5, 1.5, 0);
    # sums of squares 4 + 1 + 9 = 14 and 1 + 1 + 4 = 6, by n - 1 = 2: std sqrt(7) and sqrt(3).
    scores = jnp.array([1, 2, 6, 0, 0, 3])
    deviations = np.array([-2, -1, 3, -1, -1, 2], np.float32)
    std = np.repeat(np.sqrt([7, 3]), 3)
    for result, expected in (
        (kernel.grpo(scores, 3, by_std=False), deviations),
        (kernel.group_mean_baseline(scores, 3), deviations),
        (kernel.grpo(scores, 3, by_std=True), deviations / std),
        (kernel.rloo(scores, 3), [-3, -1.5, 4.5, -1.5, -1.5, 3]),
    ):
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, expected, rtol=2e-6)


def test_groups_do_not_see_each_other_and_equal_scores_give_0(rng):
    scores = rng.normal(0, 1, 12).astype(np.float32)
    scores[4:8] = 0.1  # the mean of three or more equal float32 numbers is often not that number
    scores[8:] *= 1e4
    for advantage in (lambda x: kernel.grpo(x, 4, by_std=True), lambda x: kernel.rloo(x, 4)):
        whole = advantage(scores)
        np.testing.assert_array_equal(whole[4:8], 0)
        np.testing.assert_allclose(whole[:4], advantage(scores[:4]), rtol=1e-6)
    np.testing.assert_array_equal(kernel.grpo(np.full(9, 0.1, np.float32), 3, by_std=True), 0)


@pytest.mark.parametrize("n", [1, 4])
def test_what_is_no_group_is_refused(n):
    grpo = functools.partial(kernel.grpo, by_std=True)
    for advantage in (grpo, kernel.rloo, kernel.group_mean_baseline):
        with pytest.raises(AssertionError, match="groups"):
            advantage(jnp.ones(6), n)
