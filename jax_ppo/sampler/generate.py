"""Responses to prompts: prefill, then one token a row and step in a `while_loop`, on the device from first to last.

The cache has S = P + T columns: prompt token i in column i, response token t in column P + t, at position length + t of
its sequence. A row reads its prompt's columns and those of the response so far, never the padding between.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.models import heads
from jax_ppo.models.transformer import Transformer
from jax_ppo.sampler import sampling
from jax_ppo.types import Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How to sample. Hashable: each is compiled for.

    Attributes:
      max_response_length: T, tokens, at least 1.
      temperature: 0 is greedy.
      top_k: draw among the k likeliest tokens; -1 among all.
      top_p: draw among the likeliest tokens that hold this probability, in (0, 1].
      n: responses a prompt.
      eos_ids: tokens that end a response; each stays in it.
    """

    max_response_length: int
    temperature: float
    top_k: int = -1
    top_p: float = 1.0
    n: int = 1
    eos_ids: tuple[int, ...] = ()


class State(NamedTuple):
    """What the decode loop carries.

    Fields:
      drawn: int32, tokens drawn so far in the rows that go on.
      responses: int32 [B, T]; logprobs: float32 [B, T]; lengths: int32 [B]: of what was drawn, 0 past the length.
      finished: bool [B], an EOS ended the row.
      cache: (keys, values) of each layer, each [B, kv heads, S, head_dim].
    """

    drawn: Any
    responses: Any
    logprobs: Any
    lengths: Any
    finished: Any
    cache: Any


def sample(model: Transformer, options: SamplingOptions, params, prompts: Prompts, key, first_sample_index=0,
           constrain=lambda rows: rows) -> Rollout:
    """Samples n responses to each prompt. Pure; to be compiled with model, options and constrain static.

    A sample's tokens depend on key, its prompt and its index alone, up to the rounding of logits: not on the rows
    beside it, their number, the bucket P or the devices. All samples of a prompt share its prefill.

    Args:
      model: with unrolled=True.
      params: the actor's as `models.transformer.unroll` gives them, in the type to compute in, laid out for decoding.
      prompts: [B / n, P]; sample b answers prompt b // n.
      key: the step's.
      first_sample_index: int32, the index of sample 0, for a batch that is cut up.
      constrain: applied to arrays whose first axis is rows, to say where rows live: [B], [B, T], [B, V] and the cache's
        [B, kv heads, S, head_dim], whose other axes it should leave as they are.
    """
    state, prompts = run(model, options, params, prompts, key, first_sample_index, constrain)
    return Rollout(prompts=prompts, responses=state.responses, lengths=state.lengths, logprobs=state.logprobs,
                   truncated=~state.finished)


def run(model, options, params, prompts, key, first_sample_index, constrain) -> tuple[State, Prompts]:
    """`sample`, giving the loop's last state (`drawn` tells when it ended) and the prompts, each repeated n times."""
    assert model.unrolled, "the sampler needs Transformer(unrolled=True), which returns keys and values"
    logits, cache = prefill(model, params, prompts, room=options.max_response_length)
    prompts, logits, cache = jax.tree.map(lambda x: jnp.repeat(x, options.n, axis=0), (prompts, logits, cache))
    B, P = prompts.tokens.shape
    T = options.max_response_length
    keys_B = sampling.sample_keys(key, first_sample_index + jnp.arange(B))

    def some_row_goes_on(state: State):
        return (state.drawn < T) & ~state.finished.all()

    def step(state: State) -> State:
        t = state.drawn - 1  # of the last token drawn: it enters the cache, and the next is drawn
        logits, cache = decode(model, params, prompts.lengths, state.cache, _column(state.responses, t), t, P)
        return draw_next(options, keys_B, state._replace(cache=cache), logits)

    empty = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, T)), jnp.zeros(B, jnp.int32), jnp.zeros(B, bool)
    prompts, logits, cache, empty = jax.tree.map(constrain, (prompts, logits, cache, empty))
    state = draw_next(options, keys_B, State(jnp.int32(0), *empty, cache), logits)
    return jax.lax.while_loop(some_row_goes_on, step, state), prompts


def prefill(model: Transformer, params, prompts: Prompts, room: int):
    """Logits after each prompt's last token, float32 [B, V], and the prompts' cache with `room` free columns behind."""
    P = prompts.tokens.shape[1]
    is_prompt_BxP = jnp.arange(P) < prompts.lengths[:, None]
    # Whatever stands behind a prompt, an id outside the vocabulary too, nothing but zeros goes in.
    tokens_BxP = jnp.where(is_prompt_BxP, prompts.tokens, 0)
    positions_BxP = jnp.broadcast_to(jnp.arange(P), tokens_BxP.shape)
    hidden_BxPxD, cache = model.apply({"params": params}, tokens_BxP, positions_BxP, is_prompt_BxP.astype(jnp.int32))
    last_BxD = jnp.take_along_axis(hidden_BxPxD, prompts.lengths[:, None, None] - 1, axis=1)[:, 0]
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, room), (0, 0))), cache)
    return heads.logits(params, last_BxD), cache


def decode(model: Transformer, params, prompt_lengths_B, cache, tokens_B, t, P: int):
    """Puts response token t of each row into the cache; logits of token t + 1, float32 [B, V], and the cache."""
    columns_S = jnp.arange(cache[0][0].shape[2])
    readable_BxS = (columns_S < prompt_lengths_B[:, None]) | ((columns_S >= P) & (columns_S <= P + t))
    positions_B = prompt_lengths_B + t
    hidden_Bx1xD, cache = model.apply({"params": params}, tokens_B[:, None], positions_B[:, None], cache=cache,
                                      column=P + t, readable_BxS=readable_BxS)
    return heads.logits(params, hidden_Bx1xD[:, 0]), cache


def draw_next(options: SamplingOptions, keys_B, state: State, logits_BxV) -> State:
    """Draws token number `drawn` of each row and writes it down where the row is not finished."""
    t, going_B = state.drawn, ~state.finished
    uniforms_Bx2 = sampling.uniforms(keys_B, t)
    tokens_B, logprobs_B = sampling.choose(logits_BxV, uniforms_Bx2, options.temperature, options.top_k, options.top_p)
    is_eos_B = (tokens_B[:, None] == jnp.array(options.eos_ids, jnp.int32)).any(-1)
    return state._replace(
        drawn=t + 1,
        responses=_write_column(state.responses, jnp.where(going_B, tokens_B, 0), t),
        logprobs=_write_column(state.logprobs, jnp.where(going_B, logprobs_B, 0.0), t),
        lengths=state.lengths + going_B,
        finished=state.finished | is_eos_B,
    )


def _column(x_BxT, t):
    return jax.lax.dynamic_index_in_dim(x_BxT, t, axis=1, keepdims=False)


def _write_column(x_BxT, new_B, t):
    return jax.lax.dynamic_update_index_in_dim(x_BxT, new_B, t, axis=1)


class Sampler:
    """`sample`, compiled once for each prompt bucket P and number of prompts."""

    def __init__(self, model: Transformer, options: SamplingOptions, constrain=lambda rows: rows):
        self.options = options
        self._sample = jax.jit(functools.partial(sample, model, options, constrain=constrain))

    def __call__(self, params, prompts: Prompts, key, first_sample_index=None) -> Rollout:
        """See `sample`. An index left out is a constant of the program: nothing travels from the host for it."""
        offset = () if first_sample_index is None else (first_sample_index,)
        return self._sample(params, prompts, key, *offset)

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return self._sample._cache_size()
