import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import logprobs as kernel

token_logprobs = jax.jit(kernel.token_logprobs, static_argnames=("chunk_size", "with_entropy"))


def inputs(rng, rows, length, width, vocabulary):
    hidden = rng.normal(0, 1, (rows, length, width)).astype(np.float32)
    unembedding = rng.normal(0, 1, (vocabulary, width)).astype(np.float32)
    return hidden, unembedding, rng.integers(0, vocabulary, (rows, length))


def test_by_hand():
    # Logits are the hidden state itself: (ln 3, 0) at T = 1 is p = (3/4, 1/4), entropy 3/4 ln 4/3 + 1/4 ln 4 = 0.5623.
    # At T = 1/2 the odds are squared: p = (9/10, 1/10), entropy 0.3251.
    hidden = jnp.full((1, 2, 2), jnp.array([math.log(3), 0.0]))
    targets = jnp.array([[0, 1]])
    logprobs, entropy = token_logprobs(hidden, jnp.eye(2), targets, 1.0)
    np.testing.assert_allclose(np.exp(logprobs), [[0.75, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(entropy, [[0.5623, 0.5623]], atol=5e-5)
    logprobs, entropy = token_logprobs(hidden, jnp.eye(2), targets, 0.5)
    np.testing.assert_allclose(np.exp(logprobs), [[0.9, 0.1]], rtol=1e-6)
    np.testing.assert_allclose(entropy, [[0.3251, 0.3251]], atol=5e-5)


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 7, 128])
def test_against_loops_in_chunks_of(chunk_size, rng):
    hidden, unembedding, targets = inputs(rng, 2, 7, 4, 11)
    logprobs, entropy = token_logprobs(hidden, unembedding, targets, 0.6, chunk_size)
    assert logprobs.shape == entropy.shape == (2, 7)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    for r in range(2):
        for t in range(7):
            exponentials = [math.exp(float(hidden[r, t] @ w) / 0.6) for w in unembedding]
            p = [e / sum(exponentials) for e in exponentials]
            np.testing.assert_allclose(logprobs[r, t], math.log(p[targets[r, t]]), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(entropy[r, t], -sum(q * math.log(q) for q in p), rtol=1e-4, atol=1e-5)


def test_gradient_does_not_depend_on_the_chunk(rng):
    hidden, unembedding, targets = inputs(rng, 2, 7, 4, 11)
    weights = rng.normal(0, 1, (2, 2, 7)).astype(np.float32)

    def unchunked(hidden, unembedding, temperature):
        log_p = jax.nn.log_softmax(hidden @ unembedding.T / temperature)
        chosen = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        return jnp.sum(weights[0] * chosen - weights[1] * jnp.sum(jnp.exp(log_p) * log_p, -1))

    def chunked(hidden, unembedding, temperature, chunk_size):
        logprobs, entropy = token_logprobs(hidden, unembedding, targets, temperature, chunk_size)
        return jnp.sum(weights[0] * logprobs + weights[1] * entropy)

    expected = jax.jit(jax.grad(unchunked, (0, 1, 2)))(hidden, unembedding, 0.7)
    for chunk_size in (3, 128):
        gradients = jax.grad(chunked, (0, 1, 2))(hidden, unembedding, 0.7, chunk_size)
        for got, wanted in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [3, 128])
def test_without_entropy(chunk_size, rng):
    hidden, unembedding, targets = inputs(rng, 2, 7, 4, 11)
    logprobs, entropy = token_logprobs(hidden, unembedding, targets, 1.0, chunk_size, with_entropy=False)
    assert entropy is None
    np.testing.assert_array_equal(logprobs, token_logprobs(hidden, unembedding, targets, 1.0, chunk_size)[0])


def test_same_function_twice_gives_ratio_one(rng):
    """Rollout scoring and the first mini-batch differ in rows and in what is differentiated, and must agree."""
    hidden, unembedding, targets = inputs(rng, 4, 10, 8, 50)
    for temperature in (0.6, 1.0):
        old, _ = token_logprobs(hidden, unembedding, targets, temperature, 4, with_entropy=False)
        score = lambda u, t=temperature: (token_logprobs(hidden[1:3], u, targets[1:3], t, 4)[0],) * 2  # noqa: E731
        _, pullback, new = jax.vjp(score, jnp.asarray(unembedding), has_aux=True)
        assert np.any(pullback(jnp.ones((2, 10)))[0] != 0)
        assert np.abs(new - old[1:3]).max() < 1e-5


def test_entropy_is_never_negative_nor_logprob_positive(rng):
    """Peaked distributions with large logits, where logsumexp(z) - E[z] rounds below 0."""
    hidden, unembedding, targets = inputs(rng, 4, 50, 8, 20)
    for scale in (10.0, 100.0, 1000.0):
        logprobs, entropy = token_logprobs(scale * hidden, unembedding, targets, 1.0, 16)
        assert entropy.min() >= 0 and logprobs.max() <= 0
        assert np.isfinite(logprobs).all() and np.isfinite(entropy).all()
    _, entropy = token_logprobs(0 * hidden, unembedding, targets, 1.0, 16)
    np.testing.assert_allclose(entropy, math.log(20), rtol=1e-6)


def test_bfloat16_hidden_still_gives_float32_logits(rng):
    """Rounded to bfloat16, logits near 100 are off by up to 0.25."""
    hidden, unembedding, targets = inputs(rng, 1, 6, 4, 8)
    rounded = [jnp.asarray(x).astype(jnp.bfloat16) for x in (30 * hidden, unembedding)]
    logprobs, _ = token_logprobs(rounded[0], unembedding, targets, 1.0, 4)
    exact, _ = token_logprobs(*(x.astype(jnp.float32) for x in rounded), targets, 1.0, 4)
    assert logprobs.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, exact, rtol=1e-4, atol=1e-4)


def test_gradient_of_the_master_is_summed_in_float32(rng):
    """Summed in bfloat16 over 1024 chunks, equal addends stop counting after 256 of them."""
    hidden, targets = jnp.ones((1, 1024, 2), jnp.bfloat16), jnp.zeros((1, 1024), jnp.int32)
    loss = lambda u: token_logprobs(hidden, u, targets, 1.0, 1, with_entropy=False)[0].sum()  # noqa: E731
    gradient = jax.grad(loss)(jnp.zeros((2, 2)))
    # p = 1/2 throughout: every position adds 1 - 1/2 to the row of the target and -1/2 to the other.
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, [[512, 512], [-512, -512]], rtol=1e-3)


def temporaries(score, length, chunk_size=16, rows=4, width=16, vocabulary=4096):
    """Bytes the compiled gradient needs beyond its arguments and results. Nothing is run."""

    def loss(hidden, unembedding, targets):
        logprobs, entropy = score(hidden, unembedding, targets, 1.0, chunk_size)
        return jnp.sum(logprobs) + jnp.sum(entropy)

    shapes = ((rows, length, width), jnp.float32), ((vocabulary, width), jnp.float32), ((rows, length), jnp.int32)
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_never_holds_rows_by_length_by_vocabulary():
    whole = 4 * 4 * 256 * 4096  # bytes of [R, L, V] in float32 at L = 256
    short, long = temporaries(token_logprobs, 64), temporaries(token_logprobs, 256)
    assert long < 1.25 * short and long < whole / 2, (short, long, whole)

    def in_one_piece(*arguments):
        return token_logprobs(*arguments[:-1], chunk_size=10**6)

    assert temporaries(in_one_piece, 256) > whole  # the measure sees what it is meant to see


def test_wrong_shapes_are_refused():
    with pytest.raises(AssertionError):
        token_logprobs(jnp.ones((2, 3, 4)), jnp.ones((5, 4)), jnp.zeros((2, 4), int), 1.0)
    with pytest.raises(AssertionError):
        token_logprobs(jnp.ones((2, 3, 4)), jnp.ones((4, 5)), jnp.zeros((2, 3), int), 1.0)
