"""The draw of the next token of each response, and what the token means for the response."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.runtime.parallelism.vocabulary import split_vocabulary
from jax_ppo.sampler import sampling, text_search
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.vocabulary_shards import VocabularyShards
from jax_ppo.types import Params


def draw_next_tokens(
    architecture: Architecture,
    options: SamplingOptions,
    params: Params,
    hidden_BxD: jax.Array,
    keys_B: jax.Array,
    drawn_B: jax.Array,
) -> sampling.Draws:
    """Draw the next token of each response; logits stay split over devices.

    `hidden_BxD` are the hidden states of the tokens before; `drawn_B` counts the tokens of each
    response so far.
    """
    # Only one token per row, so these are logits [B, V], never [B, T, V].
    logits_BxV = heads.compute_logits(architecture, params, hidden_BxD)
    uniforms_Bx2 = sampling.token_uniforms(keys_B, drawn_B)

    def sample(
        logits_BxV: jax.Array, uniforms_Bx2: jax.Array, *forbidden_BxV: jax.Array, axis: str | None
    ) -> sampling.Draws:
        shards = VocabularyShards(axis)
        return sampling.sample_tokens(
            logits_BxV, uniforms_Bx2, options.filters, shards, *forbidden_BxV
        )

    forbidden_BxV = forbidden_ends(options, logits_BxV.shape[1], drawn_B)
    others = () if forbidden_BxV is None else (forbidden_BxV,)
    return split_vocabulary(sample)(logits_BxV, uniforms_Bx2, *others)


def forbidden_ends(
    options: SamplingOptions, vocab_size: int, drawn_B: jax.Array
) -> jax.Array | None:
    """Return the EOS tokens that would end a response too early, bool [B, V]; `None` for none.

    `drawn_B` counts the tokens of each response so far.
    """
    if not options.min_new_tokens:
        return None
    is_end_V = np.isin(np.arange(vocab_size), options.eos_ids)
    return (drawn_B < options.min_new_tokens)[:, None] & is_end_V


def advance_stop_search(
    options: SamplingOptions, stop_B: jax.Array, tokens_B: jax.Array, drawn_B: jax.Array
) -> jax.Array:
    """Return the states of the search for stop strings after one more token each, int32 [B].

    `drawn_B`, a scalar or [B], counts the tokens of each response, these included.
    """
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
