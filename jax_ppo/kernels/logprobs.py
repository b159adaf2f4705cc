"""Token log-probabilities from hidden states, in chunks, with their closed-form gradient.

Logits are computed only for the positions that the mask selects, one chunk at a time, and are then
discarded, so that no array over [tokens, vocabulary] is ever built. The backward pass recomputes
the logits of each chunk from what the forward pass saved: one number per token.

Shape letters: G groups (one per device: no data moves between groups), N positions per group, C
positions per chunk, V vocabulary, D model width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Integer, Shaped

from jax_ppo.kernels.masked_statistics import zero_outside
from jax_ppo.kernels.vocabulary_chunks import (
    LogitOptions,
    MaskedChunks,
    assert_widths,
    chunk_logits,
    hidden_and_weight_grad,
    sum_products,
)


def token_logprobs(
    hidden_GxNxD: Float[Array, " G N D"],
    unembedding_VxD: Float[Array, " V D"],
    targets_GxN: Integer[Array, " G N"],
    mask_GxN: Shaped[Array, " G N"],
    options: LogitOptions,
    with_entropy: bool = True,
) -> tuple[Float32[Array, " G N"], Float32[Array, " G N"] | None]:
    """Return log p(target) and the entropy of p, where p = softmax(logits / temperature).

    logits = hidden @ unembedding.T, or c tanh(hidden @ unembedding.T / c) with a soft cap c.

    The positions where mask = 1 are moved to the front of each group, and only as many chunks are
    computed as the fullest group needs: the cost follows the mask, while one compiled program
    serves all masks. The largest temporaries are a few arrays of [G, chunk_size, V]. Values depend
    on the chunk size and on the rest of the mask through rounding only.

    With z = logits / temperature and H the entropy, the gradient is

        d log p(target) / dz_v = [v = target] - p_v        dH / dz_v = -p_v (log p_v + H)

    and through a soft cap d logits_v / d (hidden @ unembedding.T)_v = 1 - (logits_v / c)^2.

    Its matrix products are in the dtype of `hidden` with float32 sums. The sum of the unembedding
    gradient over chunks is kept per group until the last chunk, so that groups on several devices
    exchange it once. An entropy that no loss is differentiated through costs nothing in the
    backward pass.

    Args:
      hidden_GxNxD: last hidden states, in the dtype of the matrix products (logits are always
        float32). Position n predicts targets[:, n]: a shift by one is up to the caller.
      unembedding_VxD: output embedding, the float32 master copy if there is one.
      targets_GxN: token ids in [0, V) where mask = 1.
      mask_GxN: 1 where a log-prob is computed, in any pattern. Elsewhere hidden states and targets
        may hold anything, NaN included.
      options: of the logits, which receive no gradient.
      with_entropy: whether to compute the entropy.

    Returns:
      (logprobs_GxN <= 0, entropy_GxN in [0, log V]), float32, in nats, 0 where mask = 0. The
      entropy is None unless `with_entropy`.
    """
    assert_widths(hidden_GxNxD, unembedding_VxD)
    shapes = (hidden_GxNxD.shape[:2], targets_GxN.shape, mask_GxN.shape)
    assert len(set(shapes)) == 1, f"hidden, targets, mask differ in [G, N]: {shapes}"
    logprobs, entropy = _token_logprobs(
        (hidden_GxNxD, unembedding_VxD, targets_GxN, mask_GxN.astype(bool)),
        options.chunked(hidden_GxNxD.shape[1], unembedding_VxD.shape[0]),
        with_entropy,
    )
    return logprobs, entropy if with_entropy else None


_Inputs = tuple[Any, ...]  # hidden states, unembedding, targets and mask


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _token_logprobs(
    inputs: _Inputs, options: LogitOptions, with_entropy: bool
) -> tuple[jax.Array, jax.Array]:
    return _forward(inputs, options, with_entropy)[:2]


def _forward(
    inputs: _Inputs, options: LogitOptions, with_entropy: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log p(target), entropy (0 unless `with_entropy`) and logsumexp z, each [G, N]."""
    hidden, unembedding, targets, mask = inputs
    chunks = MaskedChunks(mask, options.chunk_size)
    weight = options.layout.gather(unembedding.astype(hidden.dtype))

    def process_chunk(i: jax.Array, buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # Shifting by the largest logit keeps exp from overflowing.
        logits = chunk_logits(chunks.gather(hidden, i), weight, options)
        z = logits / options.temperature
        target = jnp.take_along_axis(z, chunks.gather(targets, i)[..., None], axis=-1)[..., 0]
        top = jnp.max(z, axis=-1)
        shifted = z - top[..., None]
        total = jnp.sum(jnp.exp(shifted), axis=-1)
        # Both terms of the entropy are >= 0; logsumexp - E[z] would dip below 0 by rounding.
        if with_entropy:
            mean_gap = sum_products(jnp.exp(shifted), -shifted) / total
        else:
            mean_gap = -jnp.log(total)  # this makes the entropy exactly 0
        logprob = (target - top) - jnp.log(total)
        entropy = jnp.log(total) + mean_gap
        # The compiler may fuse the division by the temperature into the difference, so that
        # z - top is not exactly 0 at the largest logit.
        results = (jnp.minimum(logprob, 0), jnp.maximum(entropy, 0), top + jnp.log(total))
        return tuple(chunks.write(buffer, x, i) for buffer, x in zip(buffers, results, strict=True))

    empty = (chunks.buffer(jnp.float32),) * 3
    compact = jax.lax.fori_loop(0, chunks.count, process_chunk, empty)
    logprobs, entropy, logsumexp = (zero_outside(chunks.scatter(x), mask) for x in compact)
    return logprobs, entropy, logsumexp


def _forward_and_residuals(
    inputs: _Inputs, options: LogitOptions, with_entropy: bool
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    # With symbolic zeros, jax wraps each differentiable argument in an object with its `.value`.
    inputs = tuple(x.value for x in inputs)
    logprobs, entropy, logsumexp = _forward(inputs, options, with_entropy)
    return (logprobs, entropy), (*inputs, entropy, logsumexp)


def _backward(
    options: LogitOptions,
    with_entropy: bool,
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[Any, Any],
) -> tuple[_Inputs]:
    hidden, unembedding, targets, mask, entropy, logsumexp = residuals
    # A loss without an entropy bonus has no cotangent for it: that term is then left out.
    logprobs_grad, entropy_grad = (
        None if isinstance(x, jax.custom_derivatives.SymbolicZero) else zero_outside(x, mask)
        for x in cotangents
    )
    chunks = MaskedChunks(mask, options.chunk_size)
    V = len(unembedding)

    def logits_grad(i: jax.Array, logits: jax.Array) -> jax.Array:
        # The saved logsumexp spares the backward pass a reduction over the vocabulary.
        z = logits / options.temperature
        log_p = z - chunks.gather(logsumexp, i)[..., None]
        slope = jnp.zeros_like(logits)
        if logprobs_grad is not None:
            is_target = jnp.arange(V) == chunks.gather(targets, i)[..., None]
            slope = chunks.gather(logprobs_grad, i)[..., None] * (is_target - jnp.exp(log_p))
        if entropy_grad is not None:
            excess = log_p + chunks.gather(entropy, i)[..., None]
            slope = slope - chunks.gather(entropy_grad, i)[..., None] * jnp.exp(log_p) * excess
        return slope / options.temperature

    gradients = hidden_and_weight_grad(mask, chunks, hidden, unembedding, logits_grad, options)
    return ((*gradients, None, None),)


_token_logprobs.defvjp(_forward_and_residuals, _backward, symbolic_zeros=True)
