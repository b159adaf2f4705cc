"""From logits to tokens: temperature, top-k, top-p and the draw, as pure functions of rows.

No row depends on another. Filters are applied in Hugging Face's order: temperature, then top-k,
then top-p of what top-k left, then min-p. All keep every token that is as likely as the last one
kept, so that nothing depends on the order of a sort (Hugging Face does so for top-k only).

Where several devices split the vocabulary, each keeps its own logits. For a row they exchange the
largest logit, the weights of blocks of tokens and of one block's tokens, one number per bisection
step of a filter, and a few more: never the logits themselves.

Randomness is addressed: the token at position t of sample b has the key
fold_in(fold_in(step_key, b), t), whichever row it is drawn in and whatever is drawn beside it.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class VocabularyShards:
    """The devices that split the vocabulary, seen from one of them, inside `jax.shard_map`."""

    # The mesh axis that splits the vocabulary into equal parts; `None`: nothing is split.
    axis: str | None = None

    def start(self, width: int) -> jax.Array | int:
        """Return the id of the first of this device's `width` tokens."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * width

    def total(self, width: int) -> int:
        """Return V, the number of tokens of all devices, each of which has `width`."""
        return width if self.axis is None else width * jax.lax.axis_size(self.axis)

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum over devices."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        """Return the maximum over devices."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def gather(self, x_BxV: jax.Array) -> jax.Array:
        """Return the columns of all devices."""
        if self.axis is None:
            return x_BxV
        return jax.lax.all_gather(x_BxV, self.axis, axis=1, tiled=True)

    def min(self, x: jax.Array) -> jax.Array:
        """Return the minimum over devices."""
        return x if self.axis is None else jax.lax.pmin(x, self.axis)


WHOLE = VocabularyShards()
# Blocks in which top-p looks first: the likeliest 256 tokens are in them, and most that follow.
_TOP_P_BLOCKS = 256


class Draws(NamedTuple):
    """The tokens drawn for B rows."""

    tokens: jax.Array  # int32 [B]
    # float32 [B]: of softmax(logits / temperature) before filters and without what was added to the
    # logits, or of softmax(logits) when greedy.
    logprobs: jax.Array


def sample_keys(step_key: jax.Array, samples_B: jax.Array) -> jax.Array:
    """Return one key per sample; `samples_B` are their indices in the step's batch."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, samples_B)


def token_uniforms(keys_B: jax.Array, positions: jax.Array | int) -> jax.Array:
    """Return the random numbers that `draw_tokens` takes, float32 [B, 2] in [0, 1).

    `positions`, a scalar or [B], are the tokens' positions in their responses.
    """
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, jnp.broadcast_to(positions, keys_B.shape[:1]))
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys_B)


def sample_tokens(
    logits_BxV: jax.Array,
    uniforms_Bx2: jax.Array,
    temperature: float,
    top_k: int = -1,
    top_p: float = 1.0,
    shards: VocabularyShards = WHOLE,
    added_BxV: jax.Array | None = None,
    min_p: float = 0.0,
) -> Draws:
    """Draw the next token of each row.

    Args:
      logits_BxV: float32; this device's part of them if the vocabulary is split.
      uniforms_Bx2: float32 in [0, 1).
      temperature: >= 0, static; 0 takes the likeliest token, the first of several.
      top_k: static, draw among the k likeliest; if not positive, or V or more, among all.
      top_p: static, in (0, 1], draw among the likeliest that together hold this probability.
      shards: the devices that split the vocabulary.
      added_BxV: added to the logits before the draw, -inf for tokens that are not to be drawn;
        split as the logits are. `None`: nothing.
      min_p: static, in [0, 1], draw among those at least this fraction as likely as the likeliest.
    """
    assert logits_BxV.ndim == 2, logits_BxV.shape
    assert uniforms_Bx2.shape == (logits_BxV.shape[0], 2), (logits_BxV.shape, uniforms_Bx2.shape)
    # Greedy: no division by 0, and no random numbers.
    if temperature == 0:
        preferred_BxV = logits_BxV if added_BxV is None else logits_BxV + added_BxV
        tokens_B = _likeliest_tokens(preferred_BxV, shards)
        return Draws(tokens_B, token_logprob(logits_BxV, tokens_B, shards=shards))
    if 0 < top_k < shards.total(logits_BxV.shape[-1]) or top_p < 1:
        filters = _Filters(temperature, top_k, top_p, min_p)
        return _sample_filtered(logits_BxV, uniforms_Bx2, filters, shards, added_BxV)
    logits_BxV = logits_BxV / temperature
    preferred_BxV = logits_BxV
    if added_BxV is not None:
        preferred_BxV = logits_BxV + added_BxV / temperature
    weights_BxV = _unnormalized_probs(preferred_BxV, shards)
    kept_BxV = keep_min_p(weights_BxV, min_p)
    tokens_B, sums_B = draw_tokens(kept_BxV, uniforms_Bx2, shards)
    # Without a filter the draw has summed the weights of these very logits.
    known_sums_B = sums_B if kept_BxV is weights_BxV and added_BxV is None else None
    return Draws(tokens_B, token_logprob(logits_BxV, tokens_B, known_sums_B, shards))


def _likeliest_tokens(logits_BxV: jax.Array, shards: VocabularyShards) -> jax.Array:
    """Return the first of the likeliest tokens of each row, int32 [B]."""
    tokens_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
    if shards.axis is None:
        return tokens_B
    # The least id among the devices that hold a largest logit; a NaN is equal to none of them.
    width = logits_BxV.shape[-1]
    V = shards.total(width)
    largest_B = logits_BxV.max(-1)
    is_largest_B = largest_B == shards.max(largest_B)
    first_B = shards.min(jnp.where(is_largest_B, shards.start(width) + tokens_B, V))
    return jnp.minimum(first_B, V - 1)


def token_logprob(
    logits_BxV: jax.Array,
    tokens_B: jax.Array,
    sums_B: jax.Array | None = None,
    shards: VocabularyShards = WHOLE,
    largest_B: jax.Array | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Return log_softmax(logits / temperature)[token], float32 [B], without an array of them.

    `sums_B`, which `draw_tokens` returns, save one pass through the logits, the largest logits
    another.
    """
    index_B = tokens_B - shards.start(logits_BxV.shape[-1])
    drawn_B = shards.sum(_take_local(logits_BxV, index_B)) / temperature
    if sums_B is None:
        sums_B = shards.sum(_unnormalized_probs(logits_BxV / temperature, shards).sum(-1))
    if largest_B is None:
        largest_B = shards.max(logits_BxV.max(-1))
    return drawn_B - largest_B / temperature - jnp.log(sums_B)


def _take_local(x_BxNx: jax.Array, index_B: jax.Array) -> jax.Array:
    """Return x[b, index[b]] of each row; 0 where the index is another device's."""
    last = x_BxNx.shape[1] - 1
    is_local_B = (index_B >= 0) & (index_B <= last)
    expand = (slice(None),) + (None,) * (x_BxNx.ndim - 1)
    taken_Bx1x = jnp.take_along_axis(x_BxNx, jnp.clip(index_B, 0, last)[expand], axis=1)
    return jnp.where(is_local_B[expand], taken_Bx1x, 0)[:, 0]


def _take_tokens(
    logits_BxV: jax.Array, tokens_BxM: jax.Array, shards: VocabularyShards
) -> jax.Array:
    """Return the logits of tokens; -inf for those of other devices and past the vocabulary."""
    V = logits_BxV.shape[-1]
    index_BxM = tokens_BxM - shards.start(V)
    taken_BxM = jnp.take_along_axis(logits_BxV, jnp.clip(index_BxM, 0, V - 1), axis=1)
    return jnp.where((index_BxM >= 0) & (index_BxM < V), taken_BxM, -jnp.inf)


class _Filters(NamedTuple):
    """The filters of logits, see `sample_tokens`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def _sample_filtered(
    logits_BxV: jax.Array,
    uniforms_Bx2: jax.Array,
    filters: _Filters,
    shards: VocabularyShards,
    added_BxV: jax.Array | None,
) -> Draws:
    """Do what `sample_tokens` does with top-k or top-p."""
    # Not divided by the temperature, which would make one more array to write and to read.
    preferred_BxV = logits_BxV if added_BxV is None else logits_BxV + added_BxV
    tokens_B, largest_B, sums_B = _draw_filtered(preferred_BxV, uniforms_Bx2, filters, shards)
    logprob = functools.partial(
        token_logprob, tokens_B=tokens_B, shards=shards, temperature=filters.temperature
    )
    if added_BxV is None:
        return Draws(tokens_B, logprob(logits_BxV, sums_B=sums_B, largest_B=largest_B))
    return Draws(tokens_B, logprob(logits_BxV))


def _draw_filtered(
    logits_BxV: jax.Array, uniforms_Bx2: jax.Array, filters: _Filters, shards: VocabularyShards
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw one token per row among those that the filters keep.

    All logits are read twice: for the largest of each block of tokens, and for the sum of their
    weights. The tokens that are kept are in the heaviest blocks, which alone are read again, but
    for rows whose distributions are flat.

    Returns:
      (the tokens; the largest logit of each row; the sum of the weights of all its tokens).
    """
    B, width = logits_BxV.shape
    V = shards.total(width)

    def weigh(logits_RxM: jax.Array, largest_R: jax.Array) -> jax.Array:
        scaled_RxM = logits_RxM / filters.temperature
        return jnp.exp(scaled_RxM - (largest_R / filters.temperature)[:, None])

    def read_all(
        logits_RxV: jax.Array, uniforms_Rx2: jax.Array, largest_R: jax.Array, sums_R: jax.Array
    ) -> jax.Array:
        weights_RxV = weigh(logits_RxV, largest_R)
        kept_RxV, _, _ = _keep(logits_RxV, weights_RxV, sums_R, filters, shards)
        return draw_tokens(kept_RxV, uniforms_Rx2, shards)[0]

    # Of the k likeliest tokens each is in one of the k + 1 heaviest blocks. No other block has a
    # token that is likelier than the heaviest of the last of these.
    count = 1 + (filters.top_k if 0 < filters.top_k < V else _TOP_P_BLOCKS)
    if width < 64 * count:  # not worth a sort
        largest_B = shards.max(logits_BxV.max(-1))
        sums_B = shards.sum(weigh(logits_BxV, largest_B).sum(-1))
        return read_all(logits_BxV, uniforms_Bx2, largest_B, sums_B), largest_B, sums_B

    # There are about as many blocks as tokens in those that are read again.
    size = 1 << (width // count).bit_length() // 2
    first, logits_BxNxW = _split_into_blocks(logits_BxV, shards.start(width), size, -jnp.inf)
    heaviest_BxC, blocks_BxC = jax.lax.top_k(logits_BxNxW.max(-1), count)
    largest_B = shards.max(heaviest_BxC.max(-1))
    sums_B = shards.sum(weigh(logits_BxV, largest_B).sum(-1))
    firsts_BxC = (first + jnp.sort(blocks_BxC)) * size
    tokens_BxCxW = firsts_BxC[:, :, None] + jnp.arange(size)
    top_BxM = _take_tokens(logits_BxV, tokens_BxCxW.reshape(B, -1), shards)
    weights_BxM = weigh(top_BxM, largest_B)
    kept_BxM, least_B, read_B = _keep(top_BxM, weights_BxM, sums_B, filters, shards)
    # The same draw as by `draw_tokens`: first by the running sum over blocks, of all devices.
    kept_BxC = shards.gather(kept_BxM.reshape(tokens_BxCxW.shape).sum(-1))
    chosen_B, _ = _invert_cdf(kept_BxC, uniforms_Bx2[:, 0])
    first_B = shards.sum(_take_local(firsts_BxC, chosen_B - shards.start(count)))
    drawn_size = _draw_size(V)
    tokens_BxW = (first_B // drawn_size * drawn_size)[:, None] + jnp.arange(drawn_size)
    block_BxW = _take_tokens(logits_BxV, tokens_BxW, shards)
    is_kept_BxW = block_BxW >= least_B[:, None]
    weights_BxW = shards.sum(jnp.where(is_kept_BxW, weigh(block_BxW, largest_B), 0))
    within_B, _ = _invert_cdf(weights_BxW, uniforms_Bx2[:, 1])
    drawn_B = tokens_BxW[:, 0] + within_B

    # An eighth of the rows at a time reads everything. What is drawn for a row does not depend on
    # the others.
    def read_rows(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        drawn_B, is_left_B = state
        (rows_R,) = jnp.nonzero(is_left_B, size=-(-B // 8), fill_value=B)
        of_all = (logits_BxV, uniforms_Bx2, largest_B, sums_B)
        new_R = read_all(*(x.at[rows_R].get(mode="clip") for x in of_all))
        drawn_B = drawn_B.at[rows_R].set(new_R, mode="drop")
        return drawn_B, is_left_B.at[rows_R].set(False, mode="drop")

    is_left_B = shards.max(heaviest_BxC.min(-1)) >= read_B
    state = (drawn_B, is_left_B)
    drawn_B, _ = jax.lax.while_loop(lambda state: state[1].any(), read_rows, state)
    return drawn_B, largest_B, sums_B


def _keep(
    logits_BxM: jax.Array,
    weights_BxM: jax.Array,
    sums_B: jax.Array,
    filters: _Filters,
    shards: VocabularyShards,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return which of the M tokens of each row the filters keep.

    `sums_B` are the sums of the weights of the whole rows.

    Returns:
      (the weights of the tokens that are kept, 0 for others, [B, M]; the least logit of these, [B];
      the least logit on which the choice depends, [B]: the M tokens must include all from it on).
    """

    def least_logit(kept_BxM: jax.Array) -> jax.Array:
        return shards.min(jnp.where(kept_BxM > 0, logits_BxM, jnp.inf).min(-1))

    top_BxM = keep_top_k(weights_BxM, filters.top_k, shards)
    if top_BxM is not weights_BxM:
        sums_B = shards.sum(top_BxM.sum(-1))
    kept_BxM = keep_top_p(top_BxM, filters.top_p, shards, sums_B)
    kept_BxM = keep_min_p(kept_BxM, filters.min_p)
    least_B = least_logit(kept_BxM)
    # Top-p adds up all that top-k left, those equal to the k-th included.
    is_summed = top_BxM is not weights_BxM and filters.top_p < 1
    return kept_BxM, least_B, least_logit(top_BxM) if is_summed else least_B


def keep_top_k(weights_BxM: jax.Array, k: int, shards: VocabularyShards = WHOLE) -> jax.Array:
    """Replace all weights by 0 but the k largest and those equal to the k-th.

    Weights are relative to the largest, as `_unnormalized_probs` returns them.
    """
    if not 0 < k < shards.total(weights_BxM.shape[-1]):
        return weights_BxM
    # Each token measures 1, so that k of them are kept.
    return _keep_heaviest(weights_BxM, jnp.ones_like(weights_BxM), k, shards)


def keep_top_p(
    weights_BxM: jax.Array,
    p: float,
    shards: VocabularyShards = WHOLE,
    sums_B: jax.Array | None = None,
) -> jax.Array:
    """Replace all weights by 0 but the largest, as few as together hold a share p of the sum.

    Those equal to the last one kept are kept, too. `sums_B` are the sums if there are weights
    besides these.
    """
    if p >= 1:
        return weights_BxM
    if sums_B is None:
        sums_B = shards.sum(weights_BxM.sum(-1))
    # Tokens measure their own weight.
    return _keep_heaviest(weights_BxM, weights_BxM, p * sums_B, shards)


def keep_min_p(weights_BxV: jax.Array, p: float) -> jax.Array:
    """Replace the weights of tokens less than p times as likely as the likeliest by 0.

    Nguyen et al. 2024, "Turning up the heat: min-p sampling", arXiv:2407.01082.
    """
    # Weights are relative to the largest one.
    return weights_BxV if p <= 0 else jnp.where(weights_BxV >= p, weights_BxV, 0)


def _keep_heaviest(
    weights_BxM: jax.Array,
    measures_BxM: jax.Array,
    needed_B: jax.Array | int,
    shards: VocabularyShards,
) -> jax.Array:
    """Replace all weights by 0 but the heaviest, as few as measure `needed` together.

    Those equal to the least of them are kept, too, and all if all together measure less. The least
    is found by bisection: non-negative floats have the order of their bits, so 30 sums over the row
    find it exactly.
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
    # The bits of 1, the largest weight, plus one: less than 2^30.
    high_B = low_B + 0x3F800001
    least_B, _ = jax.lax.fori_loop(0, 30, halve, (low_B, high_B))
    return jnp.where(bits_BxM >= least_B[:, None], weights_BxM, 0)


def draw_tokens(
    weights_BxV: jax.Array, uniforms_Bx2: jax.Array, shards: VocabularyShards = WHOLE
) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row with probability weight / sum by inverting the distribution function.

    In two steps, because a running sum over a large vocabulary is slow and coarse: the first
    uniform picks one of N blocks of W tokens (W about sqrt(V)), the second a token in it. A token
    of weight 0 is never drawn, be it filtered or padding of the last block.

    Blocks divide the whole vocabulary, however many devices split it, so that the draw is the
    same up to the rounding of a block that two devices share.

    Returns:
      (tokens, int32 [B]; the sum of each row, float32 [B]).
    """
    width = weights_BxV.shape[-1]
    V = shards.total(width)
    size = _draw_size(V)
    first, weights_BxMxW = _split_into_blocks(weights_BxV, shards.start(width), size)
    # First a block by its total weight, then a token within the block.
    sums_BxN = shards.sum(_place_blocks(weights_BxMxW.sum(-1), first, -(-V // size)))
    block_B, sums_B = _invert_cdf(sums_BxN, uniforms_Bx2[:, 0])
    block_BxW = shards.sum(_take_local(weights_BxMxW, block_B - first))
    within_B, _ = _invert_cdf(block_BxW, uniforms_Bx2[:, 1])
    return block_B * size + within_B, sums_B


def _draw_size(V: int) -> int:
    """Return a power of two near the square root of V, so that both steps of a draw are short."""
    return 1 << ((V - 1).bit_length() + 1) // 2


def _split_into_blocks(
    weights_BxV: jax.Array, start: jax.Array | int, size: int, fill: float = 0
) -> tuple[jax.Array | int, jax.Array]:
    """Return this device's weights in blocks of W = `size` tokens of the whole vocabulary.

    Where it has none they are `fill`. `start`, the first token's id, is an int if the vocabulary is
    not split.

    Returns:
      (index of the first block; weights, [B, M, W]).
    """
    B, V = weights_BxV.shape
    if isinstance(start, int):
        padded_BxMW = jnp.pad(weights_BxV, ((0, 0), (0, -V % size)), constant_values=fill)
        return 0, padded_BxMW.reshape(B, -1, size)
    # As many blocks as V tokens overlap, wherever in a block the first one is.
    room = (-(-(V - 1) // size) + 1) * size
    empty_BxMW = jnp.full((B, room), fill, weights_BxV.dtype)
    padded_BxMW = jax.lax.dynamic_update_slice_in_dim(empty_BxMW, weights_BxV, start % size, axis=1)
    return start // size, padded_BxMW.reshape(B, -1, size)


def _place_blocks(sums_BxM: jax.Array, first: jax.Array | int, count: int) -> jax.Array:
    """Return the sums of M blocks from `first` on in their places among `count`, 0 elsewhere."""
    if isinstance(first, int):
        return sums_BxM
    # Room for M more: a slice past the end would be moved back inside.
    B, M = sums_BxM.shape
    empty = jnp.zeros((B, count + M), sums_BxM.dtype)
    return jax.lax.dynamic_update_slice_in_dim(empty, sums_BxM, first, axis=1)[:, :count]


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


def _unnormalized_probs(logits_BxV: jax.Array, shards: VocabularyShards = WHOLE) -> jax.Array:
    """Return softmax without its division: in [0, 1], the largest is 1."""
    return jnp.exp(logits_BxV - shards.max(logits_BxV.max(-1))[:, None])
