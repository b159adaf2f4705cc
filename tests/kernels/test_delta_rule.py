"""The gated delta rule: token by token, in chunks, and as transformers computes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import delta_rule

B, H, K, V = 2, 3, 5, 4


def random_inputs(length, slow=1.0):
    """Return queries, keys, values, decays and rates; keys resemble each other."""
    rng = np.random.default_rng(length)
    q, k = (rng.normal(0.7, 1, (B, length, H, K)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(B, length, H, V))
    decay = -slow * rng.exponential(size=(B, length, H))
    rate = rng.uniform(0.3, 1, (B, length, H))
    return [x.astype(np.float32) for x in (q, k, v, decay, rate)]


# One program each: eager operations compile one by one.
run_chunks = jax.jit(delta_rule.delta_chunks)


@jax.jit
def run_tokens(inputs):
    """Return the outputs [B, T, H, V] and the states after each token [T, B, H, K, V]."""

    def step(state, token):
        out, state = delta_rule.delta_step(state, *token)
        return state, (out, state)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    _, (out, states) = jax.lax.scan(step, jnp.zeros((B, H, K, V)), tokens)
    return jnp.moveaxis(out, 0, 1), states


@jax.jit
@jax.grad
def sum_gradients(inputs):
    """Return the gradients of the sum of all outputs."""
    return delta_rule.delta_chunks(*inputs)[0].sum()


def close(ours, expected, tolerance=2e-5):
    expected = np.asarray(expected)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_one_token_by_hand():
    """The state 2 is halved; the value 3 replaces half of what the key 1 reads: 1 + (3 - 1) / 2."""
    one = jnp.ones((1, 1, 1))
    out, state = delta_rule.delta_step(
        2 * one[..., None], 5 * one, one, 3 * one, jnp.log(0.5) * one[0], 0.5 * one[0]
    )
    assert state.item() == pytest.approx(2) and out.item() == pytest.approx(10)


@pytest.mark.parametrize("length", [1, 2, 9, 64, 65, 200])
def test_chunks_are_tokens_one_after_the_other(length):
    inputs = random_inputs(length)
    ends = np.array([length, length // 2])
    out, state = run_chunks(*inputs, None, ends)
    expected, states = run_tokens(inputs)
    close(out, expected)
    for row, end in enumerate(ends):
        close(state[row], states[end - 1, row] if end else np.zeros((H, K, V)), 2e-5 if end else 0)


def test_without_decay_equal_keys_stay_exact():
    """Then the system of a chunk is as far from diagonal as it can be."""
    inputs = random_inputs(150, slow=0.0)
    inputs[1] = np.broadcast_to(inputs[1][:, :1], inputs[1].shape)
    close(run_chunks(*inputs)[0], run_tokens(inputs)[0])


def test_segments_do_not_see_each_other():
    """Borders are inside of chunks, between two, and next to each other."""
    borders = [0, 5, 6, 64, 100, 140]
    inputs = random_inputs(borders[-1])
    segments = np.repeat([4, 1, 2, 0, 3], np.diff(borders))
    out, state = run_chunks(*inputs, np.stack([segments] * B), np.array([120, 64]))
    for first, last in zip(borders, borders[1:], strict=False):
        alone, states = run_tokens([x[:, first:last] for x in inputs])
        close(out[:, first:last], alone)
        if first < 120 <= last:
            close(state[0], states[119 - first, 0])
        if first < 64 <= last:
            close(state[1], states[63 - first, 1])


def test_gradients_of_chunks_are_those_of_tokens():
    inputs = random_inputs(70)
    of_chunks, of_tokens = (
        jax.jit(jax.grad(lambda x, run=run: jnp.sin(run(x)[0]).sum()))(inputs)
        for run in (lambda x: delta_rule.delta_chunks(*x), run_tokens)
    )
    for ours, expected in zip(of_chunks, of_tokens, strict=True):
        close(ours, expected, 1e-4)


@pytest.mark.slow
def test_no_decay_is_too_strong():
    """Even if exp(-decay) overflows, outputs and gradients are finite."""
    inputs = random_inputs(70, slow=90.0)
    close(run_chunks(*inputs)[0], run_tokens(inputs)[0])
    gradients = sum_gradients(inputs)
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("strong", [1e3, 1e6, np.inf])
def test_a_strong_decay_does_not_round_the_weak_ones_after_it(strong):
    """Regression: differences of sums had the precision of the largest sum of the chunk."""
    inputs = random_inputs(150, slow=0.01)
    inputs[3][:, ::7] = -strong
    segments = np.stack([np.repeat([1, 2], [70, 80])] * B)
    out, _ = run_chunks(*inputs, segments)
    for part in (slice(70), slice(70, None)):
        close(out[:, part], run_tokens([x[:, part] for x in inputs])[0])
    gradients = sum_gradients(inputs)
    assert all(np.isfinite(x).all() for x in gradients)
