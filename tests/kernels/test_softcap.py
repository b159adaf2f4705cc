"""The soft cap by hand, and the closed-form gradients of log-probs, entropy and KL through it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels.logprobs import token_logprobs
from jax_ppo.kernels.vocabulary_chunks import LogitOptions, softcap, softcap_slope
from jax_ppo.kernels.vocabulary_kl import full_kl

CAP, TEMPERATURE = 2.0, 0.7
MASK = np.array([[1, 0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0]], bool)


def test_by_hand():
    # tanh(1/2) = 0.4621: 2 becomes 4 x 0.4621 = 1.8485 under a cap of 4, with slope
    # 1 - 0.4621^2 = 0.7864.
    np.testing.assert_allclose(
        softcap(jnp.array([2.0, -2.0, 0.0]), 4.0), [1.8485, -1.8485, 0], atol=5e-5
    )
    np.testing.assert_allclose(
        softcap_slope(jnp.array([1.848469, 0.0]), 4.0), [0.7864, 1], atol=5e-5
    )
    np.testing.assert_array_equal(softcap(jnp.array([1e30, -1e30]), 30.0), [30, -30])
    assert softcap(7.0, None) == 7.0 and softcap_slope(7.0, None) == 1.0


def log_p(hidden, unembedding):
    """Compute log-probs by their definition."""
    return jax.nn.log_softmax(CAP * jnp.tanh(hidden @ unembedding.T / CAP) / TEMPERATURE)


@pytest.mark.parametrize("chunk_size", [3, 128])
def test_logprobs_and_kl_are_those_of_the_definition(chunk_size, rng):
    """Values and gradients, in chunks and under a mask.

    The cap has an effect: the standard deviation of the logits equals it.
    """
    hidden, ref_hidden, unembedding, ref_unembedding = (
        rng.normal(size=size).astype(np.float32)
        for size in ((2, 7, 4), (2, 7, 4), (11, 4), (11, 4))
    )
    targets, weights = rng.integers(0, 11, (2, 7)), rng.normal(size=(3, 2, 7)).astype(np.float32)

    def ours(hidden, unembedding):
        options = LogitOptions(TEMPERATURE, CAP, chunk_size=chunk_size)
        logprobs, entropy = token_logprobs(hidden, unembedding, targets, MASK, options)
        kl = full_kl(hidden, unembedding, ref_hidden, ref_unembedding, MASK, options)
        return jnp.stack([logprobs, entropy, kl])

    def naive(hidden, unembedding):
        p, q = log_p(hidden, unembedding), log_p(ref_hidden, ref_unembedding)
        logprobs = jnp.take_along_axis(p, targets[..., None], -1)[..., 0]
        return jnp.where(
            MASK,
            jnp.stack([logprobs, -(jnp.exp(p) * p).sum(-1), (jnp.exp(p) * (p - q)).sum(-1)]),
            0,
        )

    for one, other in zip(
        jax.vjp(ours, hidden, unembedding)[1](weights),
        jax.vjp(naive, hidden, unembedding)[1](weights),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        ours(hidden, unembedding), naive(hidden, unembedding), rtol=1e-4, atol=1e-5
    )
    uncapped = token_logprobs(hidden, unembedding, targets, MASK, LogitOptions(TEMPERATURE))[0]
    assert np.abs(uncapped - ours(hidden, unembedding)[0])[MASK].max() > 0.1
