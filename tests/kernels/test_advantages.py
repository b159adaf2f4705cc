import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import advantages as kernel

gae = jax.jit(kernel.gae)


def oracle(rewards, values, length, gamma, lam, bootstrap):
    """The definition, A_t = sum_k (gamma lam)^k delta_{t+k}, as a double loop."""
    advantages = np.zeros(len(rewards))
    after = [*values[1:length], bootstrap]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(length)]
    for t in range(length):
        advantages[t] = sum((gamma * lam) ** k * delta[t + k] for k in range(length - t))
    return advantages, np.where(np.arange(len(rewards)) < length, advantages + values, 0)


def test_by_hand():
    # gamma = lam = 1/2. delta_2 = 8 + 0 - 4 = 4; delta_1 = 2 + 4/2 - 2 = 2; delta_0 = 1 + 2/2 - 1 = 1.
    # A_2 = 4; A_1 = 2 + 4/4 = 3; A_0 = 1 + 3/4 = 1.75. Returns A + V.
    rewards, values, mask = jnp.array([1.0, 2, 8]), jnp.array([1.0, 2, 4]), jnp.ones(3)
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    np.testing.assert_array_equal(advantages, [1.75, 3, 4])
    np.testing.assert_array_equal(returns, [2.75, 5, 8])
    # With 2 as the value after the end: delta_2 = 5, A_2 = 5, A_1 = 2 + 5/4 = 3.25, A_0 = 1 + 3.25/4 = 1.8125.
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5, bootstrap_value=2.0)
    np.testing.assert_array_equal(advantages, [1.8125, 3.25, 5])
    np.testing.assert_array_equal(returns, [2.8125, 5.25, 9])


@pytest.mark.parametrize("gamma, lam, bootstrap", [(1.0, 1.0, 0.0), (0.9, 0.95, 0.0), (0.99, 0.0, 1.5), (0.8, 0.7, -2)])
def test_against_loops(gamma, lam, bootstrap, rng, poison):
    lengths = [0, 1, 4, 9]
    rewards, values = rng.normal(0, 1, (2, 4, 9)).astype(np.float32)
    mask = (np.arange(9) < np.array(lengths)[:, None]).astype(np.int32)
    batched = jax.vmap(lambda r, v, m: gae(r, v, m, gamma, lam, bootstrap))
    advantages, returns = batched(poison(rewards, mask), poison(values, mask), mask)
    assert advantages.dtype == returns.dtype == jnp.float32
    for i, length in enumerate(lengths):
        expected = oracle(rewards[i], values[i], length, gamma, lam, bootstrap)
        np.testing.assert_allclose(advantages[i], expected[0], atol=1e-5)
        np.testing.assert_allclose(returns[i], expected[1], atol=1e-5)


def test_never_leaks_past_a_short_response(rng):
    """The same response alone, and in a row with rewards and values after it, gives the same bits."""
    rewards, values = rng.normal(0, 1, (2, 8)).astype(np.float32)
    mask = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    for bootstrap in (0.0, 3.0):
        row = gae(rewards, values, mask, 0.99, 0.95, bootstrap)
        alone = gae(rewards[:3], values[:3], mask[:3], 0.99, 0.95, bootstrap)
        for in_row, by_itself in zip(row, alone, strict=True):
            np.testing.assert_array_equal(in_row[:3], by_itself)
            np.testing.assert_array_equal(in_row[3:], np.zeros(5))


def test_bootstrap_differs_per_row_under_vmap():
    # One token, gamma = 1: A = 1 + bootstrap - 2, wherever the response ends.
    rewards, values = jnp.ones((2, 3)), jnp.full((2, 3), 2.0)
    mask = jnp.array([[1, 0, 0], [1, 0, 0]])
    advantages, _ = jax.vmap(lambda r, v, m, b: gae(r, v, m, 1.0, 1.0, b))(rewards, values, mask, jnp.array([0.0, 5.0]))
    np.testing.assert_array_equal(advantages, [[-1, 0, 0], [4, 0, 0]])


def test_returns_are_made_from_raw_advantages(rng):
    """At lam = 1 a return is the discounted sum of rewards, whatever the critic says."""
    rewards, values, other_values = rng.normal(0, 1, (3, 6)).astype(np.float32)
    expected = [sum(0.9**k * rewards[t + k] for k in range(6 - t)) for t in range(6)]
    for critic in (values, other_values):
        _, returns = gae(rewards, critic, np.ones(6), 0.9, 1.0)
        np.testing.assert_allclose(returns, expected, atol=1e-5)


def test_gradient_is_finite_with_garbage_under_the_mask(rng, poison):
    rewards, values = rng.normal(0, 1, (2, 6)).astype(np.float32)
    mask = np.array([1, 1, 1, 0, 0, 0])
    total = lambda r, v: sum(jnp.sum(x * jnp.arange(6)) for x in gae(r, v, mask, 0.9, 0.8))  # noqa: E731
    dirty = jax.grad(total, (0, 1))(jnp.asarray(poison(rewards, mask)), jnp.asarray(poison(values, mask)))
    clean = jax.grad(total, (0, 1))(jnp.asarray(rewards), jnp.asarray(values))
    for d, c in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(d, c)
        assert np.any(d[:3] != 0) and not np.any(d[3:])


def test_a_batch_is_refused():
    with pytest.raises(AssertionError, match="vmap"):
        gae(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones((2, 3)), 1.0, 1.0)
