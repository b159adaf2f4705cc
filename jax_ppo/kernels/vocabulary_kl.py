"""KL(actor || reference) over the whole vocabulary, without an array over [tokens, vocabulary], and its gradient.

In chunks of the places that the mask names, as `logprobs` computes log-probabilities. Shape letters are those of `logprobs`,
and E the width of the reference.
"""

import functools

import jax
import jax.numpy as jnp

from jax_ppo.kernels.logprobs import MaskedChunks, chunk_logits, default_chunk_size, target_platform
from jax_ppo.kernels.masked import zero_outside
from jax_ppo.kernels.softcap import softcap_slope


def full_kl(
    hidden_GxNxD: jax.Array,
    unembedding_VxD: jax.Array,
    ref_hidden_GxNxE: jax.Array,
    ref_unembedding_VxE: jax.Array,
    mask_GxN: jax.Array,
    temperature: float,
    chunk_size: int | None = None,
    logit_softcap: float | None = None,
) -> jax.Array:
    """sum_v p_v (log p_v - log q_v) of each place, p = softmax(logits / temperature), q the reference's.

    logits = hidden @ unembedding.T, or with a soft cap c = c tanh(hidden @ unembedding.T / c).

    The KL of the next token given the tokens before it, exact, where the estimators of `kl` see the sampled token alone: no
    variance from the choice of that token. As an estimate of a response's KL to the reference, summed over tokens sampled
    from the actor, it is unbiased.

    As a loss it is biased in one thing: its gradient takes the tokens before as given, and leaves out how the actor changes
    which prefixes are reached. As a token's reward it has that alone: it is the same whichever token was chosen, blames those
    before, and does not restrain the policy. The two together, with gamma = 1, are the whole gradient.

    It is summed as p_v (exp(-d_v) - 1 + d_v), d = log p - log q, which is the same because p and q each sum to 1, and has no
    negative term: rounding cannot make the sum negative, and a small KL keeps its digits. With z = logits / temperature
    the gradient that is propagated is

        dKL / dz_v = p_v (d_v - sum_u p_u d_u)

    and through a soft cap d logits_v / d (hidden @ unembedding.T)_v = 1 - (logits_v / c)^2, to hidden and unembedding; there is
    none to the reference and the temperature. Cost follows the mask, and the largest temporaries of either pass are a few of
    [G, chunk_size, V]. Products are in hidden's dtype with float32 sums, the unembedding's gradient over chunks included, which
    is kept group by group until the last chunk.

    Args:
      hidden_GxNxD, ref_hidden_GxNxE: last hidden states, each in the dtype to multiply in (logits are float32 in any case).
      unembedding_VxD, ref_unembedding_VxE: output embeddings over one vocabulary, the float32 master where there is one.
      mask_GxN: 1 where the KL is computed, in any pattern. Elsewhere hidden states may be anything, NaN included.
      temperature: > 0, the one the tokens were sampled at, for both.
      chunk_size: places of each group at a time; None chooses by `default_chunk_size`.
      logit_softcap: c > 0, of both; None: none.

    Returns:
      float32 [G, N] >= 0, in nats; 0 where mask = 0, and exactly 0 where hidden states and unembeddings are equal.
    """
    for hidden, unembedding in (
        (hidden_GxNxD, unembedding_VxD),
        (ref_hidden_GxNxE, ref_unembedding_VxE),
    ):
        assert hidden.ndim == 3 and unembedding.ndim == 2, (hidden.shape, unembedding.shape)
        assert hidden.shape[2] == unembedding.shape[1], (hidden.shape, unembedding.shape)
    shapes = (hidden_GxNxD.shape[:2], ref_hidden_GxNxE.shape[:2], mask_GxN.shape)
    assert len(set(shapes)) == 1, f"hidden, ref_hidden, mask differ in [G, N]: {shapes}"
    assert unembedding_VxD.shape[0] == ref_unembedding_VxE.shape[0], "the vocabularies differ"
    assert chunk_size is None or chunk_size > 0, chunk_size
    # Two distributions of a place are held at once, as one over twice the vocabulary would be.
    chunk_size = chunk_size or default_chunk_size(2 * unembedding_VxD.shape[0], target_platform())
    reference = jax.lax.stop_gradient((ref_hidden_GxNxE, ref_unembedding_VxE))
    return _full_kl(
        hidden_GxNxD,
        unembedding_VxD,
        *reference,
        mask_GxN.astype(bool),
        temperature,
        min(chunk_size, mask_GxN.shape[1]),
        logit_softcap,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _full_kl(hidden, unembedding, ref_hidden, ref_unembedding, mask, temperature, chunk_size, cap):
    chunks = MaskedChunks(mask, chunk_size)
    weight, ref_weight = unembedding.astype(hidden.dtype), ref_unembedding.astype(ref_hidden.dtype)

    def chunk(i, kl):
        log_p = jax.nn.log_softmax(
            chunk_logits(chunks.gather(hidden, i), weight, cap) / temperature
        )
        log_q = jax.nn.log_softmax(
            chunk_logits(chunks.gather(ref_hidden, i), ref_weight, cap) / temperature
        )
        p, d = jnp.exp(log_p), log_p - log_q
        # Far from 0 exp(-d) would overflow where p is next to nothing, and there is nothing left to cancel.
        terms = jnp.where(
            jnp.abs(d) < 1, p * (jnp.expm1(-jnp.clip(d, -1, 1)) + d), p * d + (jnp.exp(log_q) - p)
        )
        return chunks.write(kl, jnp.sum(terms, axis=-1), i)

    kl = jax.lax.fori_loop(0, chunks.count, chunk, chunks.buffer(jnp.float32))
    return zero_outside(chunks.scatter(kl), mask)


def _forward(*arguments):
    return _full_kl(*arguments), arguments[:5]


def _backward(temperature, chunk_size, cap, residuals, of_kl):
    hidden, unembedding, ref_hidden, ref_unembedding, mask = residuals
    chunks = MaskedChunks(mask, chunk_size)
    weight, ref_weight = unembedding.astype(hidden.dtype), ref_unembedding.astype(ref_hidden.dtype)
    V, D = unembedding.shape

    def chunk(i, sums):
        states = chunks.gather(hidden, i)
        x = chunk_logits(states, weight, cap)
        log_p = jax.nn.log_softmax(x / temperature)
        d = log_p - jax.nn.log_softmax(
            chunk_logits(chunks.gather(ref_hidden, i), ref_weight, cap) / temperature
        )
        p = jnp.exp(log_p)
        slope = (
            p
            * (d - jnp.sum(p * d, axis=-1, keepdims=True))
            * (chunks.gather(of_kl, i) / temperature)[..., None]
        )
        slope = (slope * softcap_slope(x, cap)).astype(hidden.dtype)
        of_states = jnp.einsum("gcv,vd->gcd", slope, weight, preferred_element_type=jnp.float32)
        of_weight = jnp.einsum("gcv,gcd->gvd", slope, states, preferred_element_type=jnp.float32)
        return chunks.write(sums[0], of_states.astype(hidden.dtype), i), sums[1] + of_weight

    start = chunks.buffer(hidden.dtype, D), jnp.zeros((mask.shape[0], V, D), jnp.float32)
    of_hidden, of_unembedding = jax.lax.fori_loop(0, chunks.count, chunk, start)
    of_hidden = jnp.where(mask[..., None], chunks.scatter(of_hidden), 0)
    return of_hidden, of_unembedding.sum(0).astype(unembedding.dtype), None, None, None


_full_kl.defvjp(_forward, _backward)
