"""The advantage estimators in examples/estimators/ by hand and in expectation."""

import jax
import jax.numpy as jnp
import numpy as np

from enumerate_policy import Enumerated
from jax_ppo.kernels.advantages import grpo

WORLD = Enumerated(vocabulary=3, longest=2)  # 7 responses, of which groups are enumerated
THETA = np.random.default_rng(1).normal(0, 0.7, WORLD.shape)
SCORES, OTHERS = np.random.default_rng(2).normal(size=(2, 7))


def groups(n):
    """Return all groups of n responses, [7^n, n]."""
    return np.stack([x.reshape(-1) for x in np.mgrid[(slice(0, 7),) * n]], 1)


def group_gradient(advantages_B, n):
    """Return the expected gradient over all groups, of the group mean of A grad log pi."""
    members = groups(n)
    p = jnp.prod(WORLD.probabilities(THETA)[members], 1)
    weights = p[:, None] * advantages_B.reshape(members.shape) / n
    return jax.grad(lambda theta: jnp.sum(weights * jnp.log(WORLD.probabilities(theta))[members]))(
        THETA
    )


def at_the_last_token(scores, lengths, width):
    """Return rewards [B, width] and mask."""
    columns = np.arange(width)
    mask = columns < np.asarray(lengths)[:, None]
    return jnp.where(columns == np.asarray(lengths)[:, None] - 1, scores[:, None], 0.0), mask


def test_opo_by_hand(example):
    # Groups (1, 2, 6) and (0, 0, 3); counts 1, 1, 2 and 4, 1, 1: baselines (1 + 2 + 12) / 4 and
    # 3 / 6.
    rewards, mask = at_the_last_token(np.float32([1, 2, 6, 0, 0, 3]), [1, 1, 2, 4, 1, 1], 4)
    advantages = example("estimators/opo").opo(rewards, mask, 3)
    np.testing.assert_allclose(advantages, [-2.75, -1.75, 2.25, -0.5, -0.5, 2.5], rtol=2e-6)
    equal = example("estimators/opo").opo(*at_the_last_token(np.full(3, 0.1), [1, 2, 3], 3), 3)
    assert equal.tolist() == [0, 0, 0]


def test_opo_compares_two_responses_by_the_share_of_the_others_tokens(example):
    """A_1 = s_1 - (c_1 s_1 + c_2 s_2) / (c_1 + c_2) = (s_1 - s_2) c_2 / (c_1 + c_2)."""
    members = groups(2).reshape(-1)
    with jax.enable_x64(True):
        opo, counts = example("estimators/opo").opo, WORLD.lengths
        gradient = group_gradient(
            opo(*at_the_last_token(SCORES[members], counts[members], 2), 2), 2
        )
        distance = SCORES[:, None] - SCORES
        expected = (distance * counts / (counts[:, None] + counts)) @ WORLD.probabilities(THETA)
        closed = jax.grad(lambda theta: WORLD.expect(theta, expected))(THETA)
        np.testing.assert_allclose(gradient, closed, rtol=0, atol=1e-10)
        truth = jax.grad(lambda theta: WORLD.expect(theta, SCORES))(THETA)
        assert np.abs(gradient - truth / 2).max() > 1e-2
        equal = group_gradient(opo(*at_the_last_token(SCORES[members], np.full(98, 2), 2), 2), 2)
        np.testing.assert_allclose(equal, truth / 2, rtol=0, atol=1e-10)


def test_gdpo_by_hand(example, monkeypatch):
    # Groups (1, 2, 6) and (0, 0, 3): means 3 and 1, std by n - 1 sqrt(7) and sqrt(3). The second
    # reward is another scale of the first in one group, and equal in the other.
    module = example("estimators/gdpo")
    monkeypatch.setattr(module, "WEIGHTS", (1.0, 0.5))
    scores = jnp.array([1.0, 2, 6, 0, 0, 3])
    advantages = module.gdpo(None, None, 3, scores, scores * jnp.array([9, 9, 9, 0, 0, 0]))
    std = np.repeat(np.sqrt([7, 3]), 3)
    expected = np.array([-2, -1, 3, -1, -1, 2]) / std * [1.5, 1.5, 1.5, 1, 1, 1]
    np.testing.assert_allclose(advantages, expected, rtol=2e-6)


def test_gdpo_is_the_sum_of_grpos_and_not_grpo_of_the_sum(example, monkeypatch):
    """Two rewards whose sum has another order of the responses than either."""
    module = example("estimators/gdpo")
    monkeypatch.setattr(module, "WEIGHTS", (1.0, 2.0))
    members = groups(3).reshape(-1)
    with jax.enable_x64(True):
        first, second = (jnp.asarray(x[members]) for x in (SCORES, OTHERS))
        both = group_gradient(module.gdpo(None, None, 3, first, second), 3)
        parts = [group_gradient(grpo(x, 3, by_std=True), 3) for x in (first, second)]
        np.testing.assert_allclose(both, parts[0] + 2 * parts[1], rtol=0, atol=1e-10)
        of_sum = group_gradient(grpo(first + 2 * second, 3, by_std=True), 3)
        assert np.abs(both - of_sum).max() > 1e-2
