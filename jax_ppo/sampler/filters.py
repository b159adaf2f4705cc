"""Top-k, top-p and min-p: the tokens among which one is drawn, and the draw.

Filters are applied in Hugging Face's order: temperature, then top-k, then top-p of what top-k left,
then min-p. All keep every token as likely as the last one kept: no order of a sort matters.

Tokens have weights: softmax(logits / temperature) without its division, so that the largest is 1.
Draws invert their distribution function. A running sum over a large vocabulary is slow and coarse:
the first uniform number picks one of N blocks of W tokens (W about sqrt(V)), the second a token in
it. Blocks divide the whole vocabulary, however many devices split it, so that the draw is the same
up to rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.runtime.parallelism.vocabulary import WHOLE, VocabularyShards


class Filters(NamedTuple):
    """How the distribution that a token is drawn from differs from softmax(logits); static."""

    temperature: float = 1.0  # divides the logits; 0 takes the likeliest token
    top_k: int = -1  # draw among the k likeliest; if not positive, or V or more, among all
    top_p: float = 1.0  # draw among the likeliest that together hold this probability, in (0, 1]
    # Draw among those at least this fraction as likely as the likeliest, in [0, 1].
    min_p: float = 0.0

    def has_top(self, V: int) -> bool:
        """Return whether top-k or top-p leaves out some of V tokens."""
        return 0 < self.top_k < V or self.top_p < 1

    def weigh(self, logits_BxM: jax.Array, largest_B: jax.Array) -> jax.Array:
        """Return the tokens' weights; `largest_B` are the largest logits of the rows."""
        return jnp.exp(logits_BxM / self.temperature - (largest_B / self.temperature)[:, None])

    def keep(
        self,
        logits_BxM: jax.Array,
        weights_BxM: jax.Array,
        sums_B: jax.Array,
        shards: VocabularyShards,
    ) -> "Kept":
        """Return which of M tokens of each row are kept; `sums_B` are sums over whole rows."""

        def least_logit(kept_BxM: jax.Array) -> jax.Array:
            return shards.min(jnp.where(kept_BxM > 0, logits_BxM, jnp.inf).min(-1))

        top_BxM = keep_top_k(weights_BxM, self.top_k, shards)
        if top_BxM is not weights_BxM:
            sums_B = shards.sum(top_BxM.sum(-1))
        kept_BxM = keep_top_p(top_BxM, self.top_p, sums_B, shards)
        kept_BxM = keep_min_p(kept_BxM, self.min_p)
        least_B = least_logit(kept_BxM)
        # Top-p adds up all that top-k left, those equal to the k-th included.
        is_summed = top_BxM is not weights_BxM and self.top_p < 1
        return Kept(kept_BxM, least_B, least_logit(top_BxM) if is_summed else least_B)


class Kept(NamedTuple):
    """The tokens that filters keep, out of M in each row."""

    weights: jax.Array  # float32 [B, M], 0 for tokens that are left out
    least: jax.Array  # float32 [B], the least logit of those that are kept
    # float32 [B], the least logit on which the choice depends: the M tokens have all from it on.
    read: jax.Array


def keep_top_k(weights_BxM: jax.Array, k: int, shards: VocabularyShards = WHOLE) -> jax.Array:
    """Replace all weights by 0 but the k largest and those equal to the k-th."""
    if not 0 < k < shards.total(weights_BxM.shape[-1]):
        return weights_BxM
    # Each token measures 1, so that k of them are kept.
    return _keep_heaviest(weights_BxM, jnp.ones_like(weights_BxM), k, shards)


def keep_top_p(
    weights_BxM: jax.Array, p: float, sums_B: jax.Array, shards: VocabularyShards = WHOLE
) -> jax.Array:
    """Replace all weights by 0 but the largest, as few as together hold a share p of the sum.

    Those equal to the last one are kept, too. `sums_B` are the sums of whole rows.
    """
    if p >= 1:
        return weights_BxM
    # Tokens measure their own weight.
    return _keep_heaviest(weights_BxM, weights_BxM, p * sums_B, shards)


def keep_min_p(weights_BxM: jax.Array, p: float) -> jax.Array:
    """Replace weights below p times the largest by 0 (Nguyen et al. 2024, arXiv:2407.01082)."""
    return weights_BxM if p <= 0 else jnp.where(weights_BxM >= p, weights_BxM, 0)


def _keep_heaviest(
    weights_BxM: jax.Array,
    measures_BxM: jax.Array,
    needed_B: jax.Array | int,
    shards: VocabularyShards,
) -> jax.Array:
    """Replace all weights by 0 but the heaviest, as few as measure `needed` together.

    Those equal to the least are kept, too. Bisection over the bits finds it exactly in 30 sums.
    """
    bits_BxM = jax.lax.bitcast_convert_type(weights_BxM, jnp.int32)

    # The tokens from `low` on measure enough, those from `high` on do not.
    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds
        middle_B = (low_B + high_B) >> 1
        measured_B = jnp.where(bits_BxM >= middle_B[:, None], measures_BxM, 0).sum(-1)
        enough_B = shards.sum(measured_B) >= needed_B
        return jnp.where(enough_B, middle_B, low_B), jnp.where(enough_B, high_B, middle_B)

    low_B = jnp.zeros_like(bits_BxM[:, 0])
    high_B = low_B + 0x3F800001  # the bits of 1, the largest weight, plus one: less than 2^30
    least_B, _ = jax.lax.fori_loop(0, 30, halve, (low_B, high_B))
    return jnp.where(bits_BxM >= least_B[:, None], weights_BxM, 0)


def draw_tokens(
    weights_BxV: jax.Array, uniforms_Bx2: jax.Array, shards: VocabularyShards = WHOLE
) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row with probability weight / sum; never one of weight 0.

    Return tokens, int32 [B], and the sum of each row, float32 [B].
    """
    width = weights_BxV.shape[-1]
    V = shards.total(width)
    size = block_size(V)
    first, weights_BxMxW = split_into_blocks(weights_BxV, shards.start(width), size)
    # First a block by its total weight, then a token within the block.
    blocks_BxN = weights_BxMxW.sum(-1)
    if not isinstance(first, int):
        # In their places among all blocks, with room for M more: slices past the end move back.
        B, M = blocks_BxN.shape
        N = -(-V // size)
        empty = jnp.zeros((B, N + M), blocks_BxN.dtype)
        blocks_BxN = jax.lax.dynamic_update_slice_in_dim(empty, blocks_BxN, first, axis=1)[:, :N]
    block_B, sums_B = invert_cdf(shards.sum(blocks_BxN), uniforms_Bx2[:, 0])
    block_BxW = shards.sum(take_local(weights_BxMxW, block_B - first))
    within_B, _ = invert_cdf(block_BxW, uniforms_Bx2[:, 1])
    return block_B * size + within_B, sums_B


def block_size(V: int) -> int:
    """Return a power of two near the square root of V, so that both steps of a draw are short."""
    return 1 << ((V - 1).bit_length() + 1) // 2


def split_into_blocks(
    values_BxV: jax.Array, start: jax.Array | int, size: int, fill: float = 0
) -> tuple[jax.Array | int, jax.Array]:
    """Return this device's values in blocks of W = `size` tokens of the whole vocabulary.

    Elsewhere they are `fill`. `start`, the first token's id, is an int if nothing is split. Return
    the index of the first block, and values [B, M, W].
    """
    B, V = values_BxV.shape
    if isinstance(start, int):
        padded_BxMW = jnp.pad(values_BxV, ((0, 0), (0, -V % size)), constant_values=fill)
        return 0, padded_BxMW.reshape(B, -1, size)
    # As many blocks as V tokens overlap, wherever in a block the first one is.
    room = (-(-(V - 1) // size) + 1) * size
    empty_BxMW = jnp.full((B, room), fill, values_BxV.dtype)
    padded_BxMW = jax.lax.dynamic_update_slice_in_dim(empty_BxMW, values_BxV, start % size, axis=1)
    return start // size, padded_BxMW.reshape(B, -1, size)


def take_local(x_BxNx: jax.Array, index_B: jax.Array) -> jax.Array:
    """Return x[b, index[b]] of each row; 0 where the index is another device's."""
    last = x_BxNx.shape[1] - 1
    is_local_B = (index_B >= 0) & (index_B <= last)
    expand = (slice(None),) + (None,) * (x_BxNx.ndim - 1)
    taken_Bx1x = jnp.take_along_axis(x_BxNx, jnp.clip(index_B, 0, last)[expand], axis=1)
    return jnp.where(is_local_B[expand], taken_Bx1x, 0)[:, 0]


def invert_cdf(weights_BxN: jax.Array, uniforms_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first index of positive weight whose running sum passes uniform x total.

    Parallel running sums round, and may even decrease: indices of weight 0 are excluded, and if
    none is left at the very end, the heaviest is taken. Return indices, int32 [B], and totals,
    float32 [B].
    """
    sums_BxN = jnp.cumsum(weights_BxN, axis=-1)
    passed_BxN = (sums_BxN > uniforms_B[:, None] * sums_BxN[:, -1:]) & (weights_BxN > 0)
    first_B = jnp.argmax(passed_BxN, axis=-1)
    heaviest_B = jnp.argmax(weights_BxN, axis=-1)
    indices_B = jnp.where(passed_BxN.any(-1), first_B, heaviest_B).astype(jnp.int32)
    return indices_B, sums_BxN[:, -1]
