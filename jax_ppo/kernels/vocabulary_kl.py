"""Exact KL(actor || reference) per token over the whole vocabulary, with its closed-form gradient.

It is computed in chunks of the positions that the mask selects, as `logprobs` computes
log-probabilities, without an array over [tokens, vocabulary]. Shape letters are as in
`logprobs`, and E is the model width of the reference.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from jax_ppo.kernels.masked_statistics import difference_beyond_rounding, zero_outside
from jax_ppo.kernels.vocabulary_chunks import (
    LogitOptions,
    MaskedChunks,
    assert_widths,
    chunk_logits,
    hidden_and_weight_grad,
    sum_products,
)


def full_kl(
    hidden_GxNxD: Float[Array, " G N D"],
    unembedding_VxD: Float[Array, " V D"],
    ref_hidden_GxNxE: Float[Array, " G N E"],
    ref_unembedding_VxE: Float[Array, " V E"],
    mask_GxN: Shaped[Array, " G N"],
    options: LogitOptions,
) -> Float32[Array, " G N"]:
    """Return sum_v p_v (log p_v - log q_v) at each position, q being the reference's p.

    p = softmax(logits / temperature), where logits = hidden @ unembedding.T, with the soft cap of
    `options`. This is the exact KL of the next token given the preceding tokens: the choice of the
    sampled token, which is all that the estimators of `kl` see, adds no variance. Summed over
    tokens sampled from the actor, it is an unbiased estimate of a response's KL to the reference.

    As a loss it has one bias: its gradient treats the preceding tokens as fixed and omits how the
    actor changes which prefixes are reached. As a token's reward it provides only that omitted
    part: it does not restrain the policy by itself. The two together, with gamma = 1, give the
    complete gradient.

    The sum is taken over p_v (exp(-d_v) - 1 + d_v) with d = log p - log q. This is equal because p
    and q each sum to 1, and no term is negative: a small KL keeps its digits. With z = logits /
    temperature the gradient is

        dKL / dz_v = p_v (d_v - sum_u p_u d_u)

    It flows to `hidden_GxNxD` and `unembedding_VxD`, the actor's; the reference and the temperature
    receive none. Cost, precision and arguments are as for `logprobs.token_logprobs`; `options` hold
    for both models.

    Returns:
      float32 [G, N] >= 0, in nats; 0 where mask = 0, and exactly 0 where all log-probs differ by
      rounding alone.
    """
    assert_widths(hidden_GxNxD, unembedding_VxD)
    assert_widths(ref_hidden_GxNxE, ref_unembedding_VxE)
    shapes = (hidden_GxNxD.shape[:2], ref_hidden_GxNxE.shape[:2], mask_GxN.shape)
    assert len(set(shapes)) == 1, f"hidden, ref_hidden, mask differ in [G, N]: {shapes}"
    assert unembedding_VxD.shape[0] == ref_unembedding_VxE.shape[0], "the vocabularies differ"
    references = map(jax.lax.stop_gradient, (ref_hidden_GxNxE, ref_unembedding_VxE))
    return _full_kl(
        (hidden_GxNxD, unembedding_VxD, *references, mask_GxN.astype(bool)),
        # Two distributions are held per position, like one over twice the vocabulary.
        options.chunked(mask_GxN.shape[1], 2 * unembedding_VxD.shape[0]),
    )


# Hidden states and unembedding of the actor and of the reference, and the mask.
_Inputs = tuple[Any, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _full_kl(inputs: _Inputs, options: LogitOptions) -> jax.Array:
    hidden, unembedding, ref_hidden, ref_unembedding, mask = inputs
    chunks = MaskedChunks(mask, options.chunk_size)
    weight = options.layout.gather(unembedding.astype(hidden.dtype))
    ref_weight = options.layout.gather(ref_unembedding.astype(ref_hidden.dtype))

    def process_chunk(i: jax.Array, kl: jax.Array) -> jax.Array:
        logits = chunk_logits(chunks.gather(hidden, i), weight, options)
        ref_logits = chunk_logits(chunks.gather(ref_hidden, i), ref_weight, options)
        log_p = jax.nn.log_softmax(logits / options.temperature)
        log_q = jax.nn.log_softmax(ref_logits / options.temperature)
        p = jnp.exp(log_p)
        d = difference_beyond_rounding(log_p, log_q)
        # Far from 0, exp(-d) would overflow where p is tiny, and no digits cancel there.
        terms = jnp.where(
            jnp.abs(d) < 1, p * (jnp.expm1(-jnp.clip(d, -1, 1)) + d), p * d + (jnp.exp(log_q) - p)
        )
        return chunks.write(kl, jnp.sum(terms, axis=-1), i)

    kl = jax.lax.fori_loop(0, chunks.count, process_chunk, chunks.buffer(jnp.float32))
    return zero_outside(chunks.scatter(kl), mask)


def _forward(inputs: _Inputs, options: LogitOptions) -> tuple[jax.Array, _Inputs]:
    return _full_kl(inputs, options), inputs


def _backward(options: LogitOptions, inputs: _Inputs, kl_grad: jax.Array) -> tuple[_Inputs]:
    hidden, unembedding, ref_hidden, ref_unembedding, mask = inputs
    chunks = MaskedChunks(mask, options.chunk_size)
    ref_weight = options.layout.gather(ref_unembedding.astype(ref_hidden.dtype))

    def logits_grad(i: jax.Array, logits: jax.Array) -> jax.Array:
        ref_logits = chunk_logits(chunks.gather(ref_hidden, i), ref_weight, options)
        # Recomputed from hidden states: the forward pass keeps no distribution.
        log_p = jax.nn.log_softmax(logits / options.temperature)
        d = difference_beyond_rounding(log_p, jax.nn.log_softmax(ref_logits / options.temperature))
        # The softmax's gradient: the part of d that all tokens share has no effect.
        p = jnp.exp(log_p)
        excess = d - sum_products(p, d)[..., None]
        return p * excess * (chunks.gather(kl_grad, i) / options.temperature)[..., None]

    gradients = hidden_and_weight_grad(mask, chunks, hidden, unembedding, logits_grad, options)
    return ((*gradients, None, None, None),)


_full_kl.defvjp(_forward, _backward)
