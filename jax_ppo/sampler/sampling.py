"""From hidden states to tokens, as pure functions of rows; no row depends on another.

Where several devices split the vocabulary, they exchange a few numbers per row: the largest logit,
weights of blocks and of one block's tokens, one per bisection step of a filter; never the logits.

Randomness is addressed: the token at position t of sample b has the key fold_in(fold_in(step_key,
b), t), whichever row it is drawn in and whatever is drawn beside it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.runtime.parallelism.vocabulary import WHOLE, VocabularyShards, split_vocabulary
from jax_ppo.sampler import text_search
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.filters import (
    Filters,
    block_size,
    draw_tokens,
    invert_cdf,
    split_into_blocks,
    take_local,
)
from jax_ppo.types import Params

# Blocks in which top-p looks first: the likeliest 256 tokens are in them, and most that follow.
_TOP_P_BLOCKS = 256


class Draws(NamedTuple):
    """The tokens drawn for B rows."""

    tokens: jax.Array  # int32 [B]
    # float32 [B]: of softmax(logits / temperature), of all tokens; greedy: of softmax(logits).
    logprobs: jax.Array


class _Normalizer(NamedTuple):
    """The terms that turn a logit into a log-prob, for B rows."""

    largest: jax.Array  # float32 [B], the largest logit
    sums: jax.Array  # float32 [B], the sum of the weights of all tokens


def sample_keys(step_key: jax.Array, samples_B: jax.Array) -> jax.Array:
    """Return one key per sample; `samples_B` are their indices in the step's batch."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, samples_B)


def token_uniforms(keys_B: jax.Array, positions: jax.Array | int) -> jax.Array:
    """Return float32 [B, 2] in [0, 1) for the tokens at `positions`, [] or [B], of responses."""
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, jnp.broadcast_to(positions, keys_B.shape[:1]))
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys_B)


def draw_next_tokens(
    architecture: Architecture,
    options: SamplingOptions,
    params: Params,
    hidden_BxD: jax.Array,
    keys_B: jax.Array,
    drawn_B: jax.Array,
) -> Draws:
    """Draw the token after each hidden state; `drawn_B` counts the tokens drawn before."""
    # Only one token per row, so these are logits [B, V], never [B, T, V].
    logits_BxV = heads.compute_logits(architecture, params, hidden_BxD)
    uniforms_Bx2 = token_uniforms(keys_B, drawn_B)
    forbidden_BxV = forbidden_ends(options, logits_BxV.shape[1], drawn_B)
    others = () if forbidden_BxV is None else (forbidden_BxV,)
    sample = functools.partial(sample_tokens, filters=options.filters)
    return split_vocabulary(sample)(logits_BxV, uniforms_Bx2, *others)


def forbidden_ends(
    options: SamplingOptions, vocab_size: int, drawn_B: jax.Array
) -> jax.Array | None:
    """Return the EOS tokens that are too early after `drawn_B` tokens, bool [B, V] or `None`."""
    if not options.min_new_tokens:
        return None
    is_end_V = np.isin(np.arange(vocab_size), options.eos_ids)
    return (drawn_B < options.min_new_tokens)[:, None] & is_end_V


def advance_stop_search(
    options: SamplingOptions, stop_B: jax.Array, tokens_B: jax.Array, drawn_B: jax.Array
) -> jax.Array:
    """Return the states of the stop search after one more token, the `drawn_B`-th, int32 [B]."""
    if options.stop is None:
        return stop_B
    stop_B = options.stop.advance(stop_B, tokens_B)
    return jnp.where(drawn_B <= options.min_new_tokens, text_search.START, stop_B)


def finishes_responses(
    options: SamplingOptions, tokens_B: jax.Array, stop_B: jax.Array
) -> jax.Array:
    """Return which responses an EOS, or a stop string found by `stop_B`, finishes, bool [B]."""
    finishes_B = (tokens_B[:, None] == jnp.array(options.eos_ids, jnp.int32)).any(-1)
    if options.stop is not None:
        finishes_B |= stop_B == options.stop.found_state
    return finishes_B


def sample_tokens(
    logits_BxV: jax.Array,
    uniforms_Bx2: jax.Array,
    forbidden_BxV: jax.Array | None = None,
    *,
    filters: Filters,
    shards: VocabularyShards = WHOLE,
) -> Draws:
    """Draw the next token of each row.

    Args:
      logits_BxV: float32; this device's part of them if the vocabulary is split.
      uniforms_Bx2: float32 in [0, 1).
      forbidden_BxV: bool, tokens that are not to be drawn, split as the logits are, or `None`.
      filters: static.
      shards: the devices that split the vocabulary.
    """
    assert logits_BxV.ndim == 2, logits_BxV.shape
    assert uniforms_Bx2.shape == (logits_BxV.shape[0], 2), (logits_BxV.shape, uniforms_Bx2.shape)
    if filters.temperature > 0 and not filters.has_top(shards.total(logits_BxV.shape[-1])):
        # Top-k and top-p would write and read the scaled logits as one more array.
        logits_BxV, filters = logits_BxV / filters.temperature, filters._replace(temperature=1.0)
    allowed_BxV = logits_BxV
    if forbidden_BxV is not None:
        allowed_BxV = jnp.where(forbidden_BxV, -jnp.inf, logits_BxV)
    if filters.temperature == 0:
        tokens_B = _likeliest_tokens(allowed_BxV, shards)  # no division by 0, and no random numbers
        return Draws(tokens_B, _token_logprobs(logits_BxV, tokens_B, Filters(), shards))
    tokens_B, normalizer = _draw_filtered(allowed_BxV, uniforms_Bx2, filters, shards)
    # The recorded log-prob is the policy's, including tokens that must not be drawn.
    known = normalizer if forbidden_BxV is None else None
    return Draws(tokens_B, _token_logprobs(logits_BxV, tokens_B, filters, shards, known))


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


def _token_logprobs(
    logits_BxV: jax.Array,
    tokens_B: jax.Array,
    filters: Filters,
    shards: VocabularyShards,
    normalizer: _Normalizer | None = None,
) -> jax.Array:
    """Return log_softmax(logits / temperature)[token], float32 [B], without an array of them."""
    if normalizer is None:
        largest_B = shards.max(logits_BxV.max(-1))
        normalizer = _Normalizer(
            largest_B, shards.sum(filters.weigh(logits_BxV, largest_B).sum(-1))
        )
    index_B = tokens_B - shards.start(logits_BxV.shape[-1])
    drawn_B = shards.sum(take_local(logits_BxV, index_B)) / filters.temperature
    return drawn_B - normalizer.largest / filters.temperature - jnp.log(normalizer.sums)


def _draw_filtered(
    logits_BxV: jax.Array, uniforms_Bx2: jax.Array, filters: Filters, shards: VocabularyShards
) -> tuple[jax.Array, _Normalizer]:
    """Draw one token per row among those that the filters keep."""
    width = logits_BxV.shape[-1]
    V = shards.total(width)
    if filters.has_top(V):
        # Of the k likeliest tokens each is in one of the k + 1 heaviest blocks. No other block has
        # a token that is likelier than the heaviest of the last of these.
        count = 1 + (filters.top_k if 0 < filters.top_k < V else _TOP_P_BLOCKS)
        if width >= 64 * count:  # worth a sort
            return _draw_from_heaviest_blocks(logits_BxV, uniforms_Bx2, filters, shards, count)
    largest_B = shards.max(logits_BxV.max(-1))
    weights_BxV = filters.weigh(logits_BxV, largest_B)
    if not filters.has_top(V) and filters.min_p <= 0:
        # The draw has summed the weights.
        tokens_B, sums_B = draw_tokens(weights_BxV, uniforms_Bx2, shards)
        return tokens_B, _Normalizer(largest_B, sums_B)
    normalizer = _Normalizer(largest_B, shards.sum(weights_BxV.sum(-1)))
    return _draw_from_all(logits_BxV, uniforms_Bx2, normalizer, filters, shards), normalizer


def _draw_from_all(
    logits_BxV: jax.Array,
    uniforms_Bx2: jax.Array,
    normalizer: _Normalizer,
    filters: Filters,
    shards: VocabularyShards,
) -> jax.Array:
    """Draw among the tokens that filters keep, of which all are read, int32 [B]."""
    weights_BxV = filters.weigh(logits_BxV, normalizer.largest)
    kept = filters.keep(logits_BxV, weights_BxV, normalizer.sums, shards)
    return draw_tokens(kept.weights, uniforms_Bx2, shards)[0]


def _draw_from_heaviest_blocks(
    logits_BxV: jax.Array,
    uniforms_Bx2: jax.Array,
    filters: Filters,
    shards: VocabularyShards,
    count: int,
) -> tuple[jax.Array, _Normalizer]:
    """Do what `_draw_from_all` does, but read most tokens only twice.

    All logits are read for the largest of each block of tokens, and for the sum of their weights.
    The C = `count` heaviest blocks alone are read again, but for rows whose distributions are flat.
    """
    B, width = logits_BxV.shape
    # There are about as many blocks as tokens in those that are read again.
    size = 1 << (width // count).bit_length() // 2
    first, logits_BxNxW = split_into_blocks(logits_BxV, shards.start(width), size, -jnp.inf)
    heaviest_BxC, blocks_BxC = jax.lax.top_k(logits_BxNxW.max(-1), count)
    largest_B = shards.max(heaviest_BxC.max(-1))
    sums_B = shards.sum(filters.weigh(logits_BxV, largest_B).sum(-1))
    normalizer = _Normalizer(largest_B, sums_B)
    firsts_BxC = (first + jnp.sort(blocks_BxC)) * size
    tokens_BxCxW = firsts_BxC[:, :, None] + jnp.arange(size)
    top_BxM = _take_tokens(logits_BxV, tokens_BxCxW.reshape(B, -1), shards)
    kept = filters.keep(top_BxM, filters.weigh(top_BxM, largest_B), sums_B, shards)

    # The same draw as by `draw_tokens`: first by the running sum over blocks, of all devices.
    kept_BxC = shards.gather(kept.weights.reshape(tokens_BxCxW.shape).sum(-1))
    chosen_B, _ = invert_cdf(kept_BxC, uniforms_Bx2[:, 0])
    first_B = shards.sum(take_local(firsts_BxC, chosen_B - shards.start(count)))
    drawn_size = block_size(shards.total(width))
    tokens_BxW = (first_B // drawn_size * drawn_size)[:, None] + jnp.arange(drawn_size)
    block_BxW = _take_tokens(logits_BxV, tokens_BxW, shards)
    is_kept_BxW = block_BxW >= kept.least[:, None]
    weights_BxW = shards.sum(jnp.where(is_kept_BxW, filters.weigh(block_BxW, largest_B), 0))
    within_B, _ = invert_cdf(weights_BxW, uniforms_Bx2[:, 1])
    tokens_B = tokens_BxW[:, 0] + within_B

    # An eighth of the rows at a time reads everything; no row's draw depends on the others.
    def read_rows(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens_B, is_left_B = state
        (rows_R,) = jnp.nonzero(is_left_B, size=-(-B // 8), fill_value=B)
        logits_RxV, uniforms_Rx2, of_rows = jax.tree.map(
            lambda x: x.at[rows_R].get(mode="clip"), (logits_BxV, uniforms_Bx2, normalizer)
        )
        new_R = _draw_from_all(logits_RxV, uniforms_Rx2, of_rows, filters, shards)
        tokens_B = tokens_B.at[rows_R].set(new_R, mode="drop")
        return tokens_B, is_left_B.at[rows_R].set(False, mode="drop")

    is_left_B = shards.max(heaviest_BxC.min(-1)) >= kept.read
    tokens_B, _ = jax.lax.while_loop(lambda state: state[1].any(), read_rows, (tokens_B, is_left_B))
    return tokens_B, normalizer


def _take_tokens(
    logits_BxV: jax.Array, tokens_BxM: jax.Array, shards: VocabularyShards
) -> jax.Array:
    """Return the logits of tokens; -inf for tokens of other devices or past the vocabulary."""
    V = logits_BxV.shape[-1]
    index_BxM = tokens_BxM - shards.start(V)
    taken_BxM = jnp.take_along_axis(logits_BxV, jnp.clip(index_BxM, 0, V - 1), axis=1)
    return jnp.where((index_BxM >= 0) & (index_BxM < V), taken_BxM, -jnp.inf)
