"""From logits to tokens: temperature, top-k, top-p and the draw, as pure functions of rows.

No row depends on another. Filters are applied in Hugging Face's order: temperature, then top-k,
then top-p of what top-k left. Both keep every token that is as likely as the last one kept, so that
nothing depends on the order of a sort (Hugging Face does so for top-k only).

Randomness is addressed: the token at position t of sample b has the key
fold_in(fold_in(step_key, b), t), whichever row it is drawn in and whatever is drawn beside it.
"""

import jax
import jax.numpy as jnp


def sample_keys(step_key: jax.Array, samples_B: jax.Array) -> jax.Array:
    """Return one key per sample.

    Args:
      step_key: the step's key.
      samples_B: int32, the samples' indices in the step's batch.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, samples_B)


def token_uniforms(keys_B: jax.Array, positions: jax.Array | int) -> jax.Array:
    """Return the random numbers that `draw_tokens` takes, float32 [B, 2] in [0, 1).

    Args:
      keys_B: one key per sample.
      positions: int32, scalar or [B], the tokens' positions in their responses.
    """
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, jnp.broadcast_to(positions, keys_B.shape[:1]))
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys_B)


def sample_tokens(
    logits_BxV: jax.Array,
    uniforms_Bx2: jax.Array,
    temperature: float,
    top_k: int = -1,
    top_p: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Draw the next token of each row and return it with its log-probability.

    Args:
      logits_BxV: float32.
      uniforms_Bx2: float32 in [0, 1).
      temperature: >= 0, static; 0 takes the likeliest token, the first of several.
      top_k: static, draw among the k likeliest; if not positive, or V or more, among all.
      top_p: static, in (0, 1], draw among the likeliest that together hold this probability.

    Returns:
      (tokens, int32 [B]; log-probabilities, float32 [B]). The latter are from before the filters:
      of softmax(logits / temperature), or of softmax(logits) when greedy.
    """
    assert logits_BxV.ndim == 2, logits_BxV.shape
    assert uniforms_Bx2.shape == (logits_BxV.shape[0], 2), (logits_BxV.shape, uniforms_Bx2.shape)
    # Greedy: no division by 0, and no random numbers.
    if temperature == 0:
        tokens_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
        return tokens_B, token_logprob(logits_BxV, tokens_B)
    logits_BxV = logits_BxV / temperature
    filtered_BxV = keep_top_p(keep_top_k(logits_BxV, top_k), top_p)
    tokens_B, sums_B = draw_tokens(filtered_BxV, uniforms_Bx2)
    # Without a filter the draw has summed these very logits.
    known_sums_B = sums_B if filtered_BxV is logits_BxV else None
    return tokens_B, token_logprob(logits_BxV, tokens_B, known_sums_B)


def token_logprob(
    logits_BxV: jax.Array, tokens_B: jax.Array, sums_B: jax.Array | None = None
) -> jax.Array:
    """Return log_softmax(logits)[token], float32 [B], without an array of log-probabilities.

    Args:
      logits_BxV: float32.
      tokens_B: int32.
      sums_B: the sums that `draw_tokens` returned for these logits, which saves one pass through
        them.
    """
    drawn_B = jnp.take_along_axis(logits_BxV, tokens_B[:, None], axis=-1)[:, 0]
    if sums_B is None:
        sums_B = _unnormalized_probs(logits_BxV).sum(-1)
    return drawn_B - logits_BxV.max(-1) - jnp.log(sums_B)


def keep_top_k(logits_BxV: jax.Array, k: int) -> jax.Array:
    """Replace all logits by -inf but the k largest and those equal to the k-th."""
    if not 0 < k < logits_BxV.shape[-1]:
        return logits_BxV
    weights_BxV = _unnormalized_probs(logits_BxV)
    # Each token measures 1, so that k of them are kept.
    return _keep_likeliest(logits_BxV, weights_BxV, jnp.ones_like(weights_BxV), k)


def keep_top_p(logits_BxV: jax.Array, p: float) -> jax.Array:
    """Replace all logits by -inf but the likeliest, as few as together hold probability p.

    Those equal to the last one kept are kept, too.
    """
    if p >= 1:
        return logits_BxV
    # Tokens measure their own weight; p is relative to the sum of all.
    weights_BxV = _unnormalized_probs(logits_BxV)
    return _keep_likeliest(logits_BxV, weights_BxV, weights_BxV, p * weights_BxV.sum(-1))


def _keep_likeliest(
    logits_BxV: jax.Array,
    weights_BxV: jax.Array,
    measures_BxV: jax.Array,
    needed_B: jax.Array | int,
) -> jax.Array:
    """Keep the logits of the heaviest tokens, as few as measure `needed` together; others are -inf.

    The least weight kept is found by bisection: non-negative floats have the order of their bits,
    so that 30 sums over the row find it exactly. On a CPU that takes a thirtieth of the time of a
    sort, and `jax.lax.top_k` is a sort there, whatever its k.
    """
    bits_BxV = jax.lax.bitcast_convert_type(weights_BxV, jnp.int32)

    # The tokens from `low` on measure enough, those from `high` on do not.
    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds
        middle_B = (low_B + high_B) >> 1
        enough_B = jnp.where(bits_BxV >= middle_B[:, None], measures_BxV, 0).sum(-1) >= needed_B
        return jnp.where(enough_B, middle_B, low_B), jnp.where(enough_B, high_B, middle_B)

    low_B = jnp.zeros_like(bits_BxV[:, 0])
    # The bits of 1, the largest weight, plus one: less than 2^30.
    high_B = low_B + 0x3F800001
    least_B, _ = jax.lax.fori_loop(0, 30, halve, (low_B, high_B))
    return jnp.where(bits_BxV >= least_B[:, None], logits_BxV, -jnp.inf)


def draw_tokens(logits_BxV: jax.Array, uniforms_Bx2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row from softmax(logits) by inverting its distribution function.

    In two steps, because a running sum over a large vocabulary is slow and coarse: the first
    uniform picks one of N blocks of W tokens (W about sqrt(V)), the second a token in it. A token
    of probability 0 is never drawn, be it filtered (-inf) or padding of the last block.

    Returns:
      (tokens, int32 [B]; the sum of exp(logits - the largest) of each row, float32 [B]).
    """
    B, V = logits_BxV.shape
    # A power of two near the square root of V, so that both steps are short.
    size = 1 << ((V - 1).bit_length() + 1) // 2
    weights_BxV = jnp.pad(_unnormalized_probs(logits_BxV), ((0, 0), (0, -V % size)))
    # First a block by its total weight, then a token within the block.
    weights_BxNxW = weights_BxV.reshape(B, -1, size)
    block_B, sums_B = _invert_cdf(weights_BxNxW.sum(-1), uniforms_Bx2[:, 0])
    block_BxW = jnp.take_along_axis(weights_BxNxW, block_B[:, None, None], axis=1)[:, 0]
    within_B, _ = _invert_cdf(block_BxW, uniforms_Bx2[:, 1])
    return block_B * size + within_B, sums_B


def _invert_cdf(weights_BxN: jax.Array, uniforms_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first index of positive weight whose running sum passes uniform x total.

    Parallel running sums round, and may even decrease. Therefore indices of weight 0 are excluded
    explicitly, and if rounding leaves none at the very end, the heaviest is taken.

    Returns:
      (indices, int32 [B]; totals, float32 [B]).
    """
    sums_BxN = jnp.cumsum(weights_BxN, axis=-1)
    passed_BxN = (sums_BxN > uniforms_B[:, None] * sums_BxN[:, -1:]) & (weights_BxN > 0)
    first_B = jnp.argmax(passed_BxN, axis=-1)
    heaviest_B = jnp.argmax(weights_BxN, axis=-1)
    indices_B = jnp.where(passed_BxN.any(-1), first_B, heaviest_B).astype(jnp.int32)
    return indices_B, sums_BxN[:, -1]


def _unnormalized_probs(logits_BxV: jax.Array) -> jax.Array:
    """Return softmax without its division: in [0, 1], the largest is 1."""
    return jnp.exp(logits_BxV - logits_BxV.max(-1, keepdims=True))
