"""Drafts: responses drawn with older weights, kept as far as the newest would draw the same.

One forward pass computes the logits before each token of a draft, and the addressed random numbers
draw from these what the newest weights would have drawn there. A draft is kept up to the first
token that differs; from there the response continues (`continuation.py`). It is the response that
the newest weights alone would have given, up to the rounding of logits, whatever the draft is.
Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) draws anew whether to accept a token:
its responses have the same distribution, but differ from those without drafts.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo.models.transformer import Transformer, TransformerOutput
from jax_ppo.sampler.continuation import DrawStates, begin_draws, continue_responses, run_on_rows
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.next_token import advance_stop_search, draw_next_tokens, finishes_responses
from jax_ppo.sampler.slots import PREFILL_TOKENS
from jax_ppo.sampler.stages import append_responses, stage_limits
from jax_ppo.types import Params, Rollout


def complete_drafts(
    model: Transformer,
    options: SamplingOptions,
    params: Params,
    drafts: Rollout,
    keys_N: jax.Array,
    version: jax.Array,
    any_shard: Callable[[jax.Array], jax.Array] = lambda holds: holds,
) -> tuple[Rollout, jax.Array]:
    """Return the responses that `generate_responses` would return, from drafts of them. Pure.

    Takes its other arguments; `options.n` has no effect, since each draft has its own prompt here.
    `drafts` are N responses of 1 to `max_response_length` tokens, `keys_N` the data of their random
    keys, uint32 [N, ...]. `version`: see `continue_responses`.

    Returns:
      (the responses; int32 [N], the tokens of each that its draft had).
    """
    draws = begin_draws(jax.random.wrap_key_data(keys_N))
    accepted, draws = accept_drafts(model, options, params, drafts, draws)
    options = continuation_options(options, drafts.prompts.tokens.shape[1])
    completed, _ = continue_responses(model, options, params, accepted, draws, version, any_shard)
    return completed, accepted.lengths


def continuation_options(options: SamplingOptions, prompt_length: int) -> SamplingOptions:
    """Return how drafts continue: at once to their ends, in the memory of the slots that drew them.

    `options` say how the drafts were sampled, to prompts [N, P = `prompt_length`].
    """
    T = options.max_response_length
    slots = options.slots
    if slots is not None:
        slots = max(1, slots * (prompt_length + stage_limits(options)[0]) // (prompt_length + T))
    return dataclasses.replace(options, n=1, slots=slots, stage_length=T)


def accept_drafts(
    model: Transformer, options: SamplingOptions, params: Params, drafts: Rollout, draws: DrawStates
) -> tuple[Rollout, DrawStates]:
    """Cut drafts before the first token that these weights would not draw there. Pure.

    Takes arguments of `complete_drafts`, and the states of the draws before the first token.

    Returns:
      (the drafts' first tokens, with log-probs under these weights; the states of the draws after
      these).
    """
    T = options.max_response_length
    N = len(drafts.lengths)
    # The last token is drawn, but not read.
    read = append_responses(
        drafts.prompts, drafts.responses, jnp.maximum(drafts.lengths - 1, 0), T - 1
    )
    searched = search_tokens(options, drafts.responses, draws)
    group = max(1, min(PREFILL_TOKENS // read.tokens.shape[1], N))

    def draw_group(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        tokens_GxS, lengths_G, prompt_lengths_G, keys_G = rows
        columns_GxS = jnp.broadcast_to(jnp.arange(tokens_GxS.shape[1]), tokens_GxS.shape)
        is_token_GxS = (columns_GxS < lengths_G[:, None]).astype(jnp.int32)
        output: TransformerOutput = model.apply(  # type: ignore[assignment]
            {"params": params}, tokens_GxS, columns_GxS, is_token_GxS
        )
        before_GxT = jnp.maximum(prompt_lengths_G - 1, 0)[:, None] + jnp.arange(T)
        hidden_GxTxD = jnp.take_along_axis(output.hidden, before_GxT[..., None], axis=1)
        drawn_GxT = jnp.broadcast_to(jnp.arange(T), before_GxT.shape)
        keys_GxT = jnp.broadcast_to(keys_G[:, None], (*before_GxT.shape, *keys_G.shape[1:]))

        def draw(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            hidden, keys, drawn = rows
            keys = jax.random.wrap_key_data(keys)
            draws = draw_next_tokens(model.architecture, options, params, hidden, keys, drawn)
            return draws.tokens, draws.logprobs

        each = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]), (hidden_GxTxD, keys_GxT, drawn_GxT)
        )
        # At a time, compute the logits of as many tokens as slots draw at once.
        tokens, logprobs = _map_parts(draw, each, min(options.slots or N, N))
        return tokens.reshape(before_GxT.shape), logprobs.reshape(before_GxT.shape)

    rows = (read.tokens, read.lengths, drafts.prompts.lengths, draws.keys)
    tokens_NxT, logprobs_NxT = _map_parts(draw_group, rows, group)
    return _cut_drafts(drafts, tokens_NxT, logprobs_NxT, draws.keys, searched)


def search_tokens(
    options: SamplingOptions, responses_NxT: jax.Array, draws: DrawStates
) -> tuple[jax.Array, jax.Array]:
    """Return the state of the search before each token, and whether it finishes the response.

    `draws` are the states before the first token. Each result is [N, T].
    """

    def advance(stop_N: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        tokens_N, position = drawn
        after_N = advance_stop_search(options, stop_N, tokens_N, position + 1)
        return after_N, (stop_N, finishes_responses(options, tokens_N, after_N))

    tokens = (responses_NxT.T, jnp.arange(responses_NxT.shape[1]))
    _, (stop_TxN, finishes_TxN) = jax.lax.scan(advance, draws.stop_states, tokens)
    return stop_TxN.T, finishes_TxN.T


def replace_tokens(
    options: SamplingOptions, rollout: Rollout, tokens_NxT: jax.Array, draws: DrawStates
) -> tuple[Rollout, DrawStates, jax.Array]:
    """End each response with its first token that was drawn differently, if there is one. Pure.

    `tokens_NxT` are the tokens drawn again, `draws` the states before the first token.

    Returns:
      (the responses; those that changed may continue; the states of the draws after them; how many
      responses changed).
    """
    differs_NxT = rollout.action_mask & (tokens_NxT != rollout.responses)
    differs_N = differs_NxT.any(1)
    lengths_N = jnp.where(differs_N, differs_NxT.argmax(1).astype(jnp.int32) + 1, rollout.lengths)
    replaced = dataclasses.replace(rollout, responses=tokens_NxT, lengths=lengths_N)
    searched = search_tokens(options, tokens_NxT, draws)
    cut, draws = _cut_drafts(replaced, tokens_NxT, rollout.logprobs, draws.keys, searched)
    return cut, draws, differs_N.sum()


def _cut_drafts(
    drafts: Rollout,
    tokens_NxT: jax.Array,
    logprobs_NxT: jax.Array,
    keys: jax.Array,
    searched: tuple[jax.Array, jax.Array],
) -> tuple[Rollout, DrawStates]:
    """Return what `accept_drafts` does, from the tokens that the newest weights draw.

    `searched` is what `search_tokens` returned for the drafts.
    """
    T = drafts.responses.shape[1]
    stop_NxT, finishes_NxT = searched
    is_drawn_NxT = jnp.arange(T) < drafts.lengths[:, None]
    agrees_NxT = is_drawn_NxT & (tokens_NxT == drafts.responses)
    # All tokens before an accepted one are accepted, and none of them finishes the response.
    goes_on_NxT = jnp.cumprod(agrees_NxT & ~finishes_NxT, axis=1).astype(bool)
    is_accepted_NxT = (
        agrees_NxT & jnp.pad(goes_on_NxT, ((0, 0), (1, 0)), constant_values=True)[:, :T]
    )
    accepted_N = is_accepted_NxT.sum(1, dtype=jnp.int32)
    is_finished_N = (is_accepted_NxT & finishes_NxT).any(1)
    accepted = dataclasses.replace(
        drafts,
        responses=jnp.where(is_accepted_NxT, drafts.responses, 0),
        lengths=accepted_N,
        logprobs=jnp.where(is_accepted_NxT, logprobs_NxT, 0.0),
        # Rows without a token are padding (`run_on_rows`), which does not continue.
        truncated=~is_finished_N & (drafts.lengths > 0),
        action_mask=is_accepted_NxT,
    )
    next_Nx1 = jnp.minimum(accepted_N, T - 1)[:, None]
    return accepted, DrawStates(keys, jnp.take_along_axis(stop_NxT, next_Nx1, axis=1)[:, 0])


def _map_parts(function: Callable[[Any], Any], rows: Any, size: int) -> Any:
    """Apply a function to `size` rows at a time; the last ones are padded with zeros.

    It must return arrays with a row for each row of its argument.
    """
    count = len(jax.tree.leaves(rows)[0])

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -count % size), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, size, *x.shape[1:])

    parts = jax.lax.map(function, jax.tree.map(split, rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], parts)


def draft_program(
    model: Transformer,
    options: SamplingOptions,
    split_rows: Callable[[Callable], Callable] = lambda function: function,
) -> Any:
    """Return the jitted `complete_drafts`; takes the arguments of `sampler_program`."""

    def complete(params: Params, drafts: Rollout, keys_N: jax.Array) -> tuple[Rollout, jax.Array]:
        program = split_rows(functools.partial(complete_drafts, model, options))
        return run_on_rows(program, params, drafts, keys_N, jnp.int32(0))

    return jax.jit(complete)
