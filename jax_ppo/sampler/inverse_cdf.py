"""Draws with given weights, by inverting the distribution function.

A running sum over a large vocabulary is slow and coarse: the first uniform number picks one of N
blocks of W tokens (W about sqrt(V)), the second a token in it. Blocks divide the whole vocabulary,
however many devices split it, so that the draw is the same up to rounding.
"""

import jax
import jax.numpy as jnp

from jax_ppo.runtime.parallelism.vocabulary import WHOLE, VocabularyShards


def draw_tokens(
    weights_BxV: jax.Array, uniforms_Bx2: jax.Array, shards: VocabularyShards = WHOLE
) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row with probability weight / sum; never one of weight 0.

    Returns:
      (tokens, int32 [B]; the sum of each row, float32 [B]).
    """
    width = weights_BxV.shape[-1]
    V = shards.total(width)
    size = block_size(V)
    first, weights_BxMxW = split_into_blocks(weights_BxV, shards.start(width), size)
    # First a block by its total weight, then a token within the block.
    blocks_BxN = weights_BxMxW.sum(-1)
    if not isinstance(first, int):
        # In their places among all blocks, with room for M more: a slice past the end would be
        # moved back inside.
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

    Elsewhere they are `fill`. `start`, the first token's id, is an int if nothing is split.

    Returns:
      (index of the first block; values, [B, M, W]).
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
    rounding leaves none at the very end, the heaviest is taken.

    Returns:
      (indices, int32 [B]; totals, float32 [B]).
    """
    sums_BxN = jnp.cumsum(weights_BxN, axis=-1)
    passed_BxN = (sums_BxN > uniforms_B[:, None] * sums_BxN[:, -1:]) & (weights_BxN > 0)
    first_B = jnp.argmax(passed_BxN, axis=-1)
    heaviest_B = jnp.argmax(weights_BxN, axis=-1)
    indices_B = jnp.where(passed_BxN.any(-1), first_B, heaviest_B).astype(jnp.int32)
    return indices_B, sums_BxN[:, -1]
