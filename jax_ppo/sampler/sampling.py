"""From logits to tokens: temperature, top-k, top-p, and the draw. Pure functions on rows; no row looks at another.

Filters act in Hugging Face's order: temperature, then top-k, then top-p of what top-k left. Both keep every token
that is as likely as the last one kept, so that nothing hangs on the order of a sort (Hugging Face: in top-k alone).

Randomness is addressed: the token at position t of sample b has the key fold_in(fold_in(step_key, b), t), whichever row
it is drawn in and whatever is drawn beside it.
"""

import jax
import jax.numpy as jnp


def sample_keys(step_key, samples_B):
    """One key a sample, from the step's key and the samples' indices in the step's batch."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, samples_B)


def uniforms(keys_B, positions):
    """What `draw` takes, float32 [B, 2] in [0, 1), for the tokens at `positions` (int32, scalar or [B])."""
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, jnp.broadcast_to(positions, keys_B.shape[:1]))
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys_B)


def choose(logits_BxV, uniforms_Bx2, temperature: float, top_k: int = -1, top_p: float = 1.0):
    """The next token of each row and its log-probability.

    Args:
      logits_BxV: float32.
      uniforms_Bx2: float32 in [0, 1).
      temperature: >= 0, static; 0 takes the likeliest token, the first of several.
      top_k: static, draw among the k likeliest; not positive, or V and more: among all.
      top_p: static, in (0, 1], draw among the likeliest that together hold this probability.

    Returns:
      (tokens, int32 [B]; log-probabilities, float32 [B]), the latter from before the filters: of
      softmax(logits / temperature), or of softmax(logits) when greedy.
    """
    assert logits_BxV.ndim == 2, logits_BxV.shape
    assert uniforms_Bx2.shape == (logits_BxV.shape[0], 2), (logits_BxV.shape, uniforms_Bx2.shape)
    if temperature == 0:
        tokens_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
        return tokens_B, log_prob(logits_BxV, tokens_B)
    logits_BxV = logits_BxV / temperature
    filtered_BxV = keep_top_p(keep_top_k(logits_BxV, top_k), top_p)
    tokens_B, sums_B = draw(filtered_BxV, uniforms_Bx2)
    return tokens_B, log_prob(logits_BxV, tokens_B, sums_B if filtered_BxV is logits_BxV else None)


def log_prob(logits_BxV, tokens_B, sums_B=None):
    """log_softmax(logits)[token], float32 [B], without an array of log-probabilities. `sums_B`: from `draw`, if it had these
    logits: to pass through them once less."""
    chosen_B = jnp.take_along_axis(logits_BxV, tokens_B[:, None], axis=-1)[:, 0]
    sums_B = _weights(logits_BxV).sum(-1) if sums_B is None else sums_B
    return chosen_B - logits_BxV.max(-1) - jnp.log(sums_B)


def keep_top_k(logits_BxV, k: int):
    """Logits with -inf for all but the k largest and what equals the k-th."""
    if not 0 < k < logits_BxV.shape[-1]:
        return logits_BxV
    weights_BxV = _weights(logits_BxV)
    return _keep_likeliest(logits_BxV, weights_BxV, jnp.ones_like(weights_BxV), k)


def keep_top_p(logits_BxV, p: float):
    """Logits with -inf for all but the likeliest, as few as hold probability p, and what equals the last of them."""
    if p >= 1:
        return logits_BxV
    weights_BxV = _weights(logits_BxV)
    return _keep_likeliest(logits_BxV, weights_BxV, weights_BxV, p * weights_BxV.sum(-1))


def _keep_likeliest(logits_BxV, weights_BxV, measures_BxV, needed_B):
    """Keeps the logits of the heaviest tokens, as few as measure `needed` together, and -inf for the others.

    The least weight kept is found by bisection: floats that are not negative have the order of their bits, so that 30
    sums over the row close in on it exactly. On a CPU that takes a thirtieth of the time of a sort, and `jax.lax.top_k`
    is one there, whatever its k.
    """
    bits_BxV = jax.lax.bitcast_convert_type(weights_BxV, jnp.int32)

    def halve(_, bounds):  # tokens from `low` on are enough, from `high` on they are not
        low_B, high_B = bounds
        middle_B = (low_B + high_B) >> 1
        enough_B = jnp.where(bits_BxV >= middle_B[:, None], measures_BxV, 0).sum(-1) >= needed_B
        return jnp.where(enough_B, middle_B, low_B), jnp.where(enough_B, high_B, middle_B)

    low_B = jnp.zeros_like(bits_BxV[:, 0])
    high_B = low_B + 0x3F800001  # the bits of 1, the largest weight, and one more: less than 2^30
    least_B, _ = jax.lax.fori_loop(0, 30, halve, (low_B, high_B))
    return jnp.where(bits_BxV >= least_B[:, None], logits_BxV, -jnp.inf)


def draw(logits_BxV, uniforms_Bx2):
    """One token a row from softmax(logits) by inverting its distribution function.

    In two steps, as a running sum over a large vocabulary is slow and coarse: one of N blocks of W, about sqrt(V),
    tokens by the first uniform, a token in it by the second. Never a token of probability 0, be it filtered (-inf) or
    padding of the last block.

    Returns:
      (tokens, int32 [B]; the sum of exp(logits - the largest) of each row, float32 [B]).
    """
    B, V = logits_BxV.shape
    size = 1 << ((V - 1).bit_length() + 1) // 2
    weights_BxV = jnp.pad(_weights(logits_BxV), ((0, 0), (0, -V % size)))
    weights_BxNxW = weights_BxV.reshape(B, -1, size)
    block_B, sums_B = _pick(weights_BxNxW.sum(-1), uniforms_Bx2[:, 0])
    within_BxW = jnp.take_along_axis(weights_BxNxW, block_B[:, None, None], axis=1)[:, 0]
    return block_B * size + _pick(within_BxW, uniforms_Bx2[:, 1])[0], sums_B


def _pick(weights_BxN, uniforms_B):
    """The first index where the running sum passes uniform x total, among positive weights, int32 [B]; and the total [B].

    Parallel running sums round, and may even fall. So an index of weight 0 is excluded by name, and should rounding
    leave none at the very end, the heaviest stands in.
    """
    sums_BxN = jnp.cumsum(weights_BxN, axis=-1)
    passed_BxN = (sums_BxN > uniforms_B[:, None] * sums_BxN[:, -1:]) & (weights_BxN > 0)
    first_B, heaviest_B = jnp.argmax(passed_BxN, axis=-1), jnp.argmax(weights_BxN, axis=-1)
    return jnp.where(passed_BxN.any(-1), first_B, heaviest_B).astype(jnp.int32), sums_BxN[:, -1]


def _weights(logits_BxV):
    """softmax without its division: in [0, 1], the largest is 1."""
    return jnp.exp(logits_BxV - logits_BxV.max(-1, keepdims=True))
