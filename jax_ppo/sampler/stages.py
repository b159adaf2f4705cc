"""Stages of decoding: few slots with much room continue what many slots with little room began.

A cache with room for the longest possible response in each slot is mostly unused if most responses
are short, and accelerators read all of it for each token. In stages, all responses are decoded up
to L tokens first, with room for no more. Those that have not ended are continued up to 2 L tokens,
then 4 L, ..., in the same memory: with twice the room there are half as many slots. A stage runs
the tokens drawn before again, as part of the prompts; a stage that no sample reaches costs no step.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ppo.models.cache import RecurrentState
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes
from jax_ppo.sampler.dialogues import extend_contexts
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.slots import Cache, DecodeJob, DecodeState, build_job, initial_state
from jax_ppo.types import Prompts

# The fields of `DecodeState` with a row per sample, apart from dialogues and routed experts.
_RESULTS = "responses logprobs lengths finished stop_states kept".split()


class Stage(NamedTuple):
    """A stage that continues the samples that have not ended."""

    job: DecodeJob  # the stage's inputs
    state: DecodeState  # its initial state
    # int32, the sample at each place of the job's queue: those that have not ended come first, in
    # their order.
    order_N: jax.Array


def stage_limits(options: SamplingOptions) -> tuple[int, ...]:
    """Return the tokens of a response at which each stage ends; the last is T."""
    longest = options.max_response_length
    limit = options.stage_length or longest
    limits = []
    while limit < longest:
        limits.append(limit)
        limit *= 2
    return (*limits, longest)


def build_next_stage(
    first: DecodeJob,
    prompts: Prompts,
    state: DecodeState,
    start: int | jax.Array,
    limit: int | jax.Array,
) -> Stage:
    """Return the stage that continues the samples that have not ended.

    Args:
      first: the job of the first stage.
      prompts: [N, P], the prompt of each sample.
      state: the state at the end of the previous stage, with the results in the samples' order.
      start: the limit of the previous stage; int32 [N] where samples continue (`continuation.py`),
        at most T - 1 for those that have not ended.
      limit: the limit of this stage, at most T; int32 [N] where samples continue.
    """
    longest = first.options.max_response_length
    drawn = start if isinstance(start, int) else longest - 1
    room = limit if isinstance(limit, int) else longest
    is_over_N = state.finished
    if state.dialogues is not None:
        is_over_N |= state.dialogues.closed
    order_N = jnp.argsort(is_over_N, stable=True)
    P = prompts.tokens.shape[1]
    dialogues = state.dialogues
    if dialogues is not None and dialogues.contexts is not None:
        extended, dialogues = extend_contexts(prompts, state, drawn)
    else:
        extended = append_responses(prompts, state.responses, start, drawn)
    # All slots together have as much room as in the first stage.
    width = max(1, first.width * first.columns // (P + room))
    job = build_job(
        first.model,
        dataclasses.replace(first.options, n=1, slots=width),
        first.params,
        jax.tree.map(lambda x: x[order_N], extended),
        first.keys_N[order_N],
        first.any_shard,
        start=start if isinstance(start, int) else start[order_N],
        limit=limit if isinstance(limit, int) else limit[order_N],
        count=(~is_over_N).sum(),
        originals=jax.tree.map(lambda x: x[order_N], prompts),
    )
    results = {name: getattr(state, name) for name in _RESULTS}
    begun = initial_state(job)._replace(**results, slot_steps=state.slot_steps, dialogues=dialogues)
    if begun.routing is not None and state.routing is not None:
        # The stage has room for longer prompts.
        routing = begun.routing._replace(sequences=state.routing.sequences)
        begun = begun._replace(routing=routing)
    return Stage(job, reorder_results(begun, order_N), order_N)


def reorder_results(state: DecodeState, order_N: jax.Array) -> DecodeState:
    """Return a state that holds the results of the samples `order_N`."""
    routing = state.routing
    if routing is not None:
        routing = routing._replace(sequences=routing.sequences[order_N])
    results = {name: x[order_N] for name in _RESULTS if (x := getattr(state, name)) is not None}
    dialogues = jax.tree.map(lambda x: x[order_N], state.dialogues)
    return state._replace(routing=routing, dialogues=dialogues, **results)


def cache_shapes(
    model: Transformer, options: SamplingOptions, prompts: Prompts
) -> list[tuple[Cache, Cache]]:
    """Return the shapes of the caches of slots and prompts, for each stage of one queue.

    `prompts` has the shapes of the prompts that share the queue.
    """
    limits = stage_limits(options)

    def all_caches(prompts: Prompts) -> list[tuple[Cache, Cache]]:
        keys_N = jnp.zeros(len(prompts.lengths) * options.n)
        first = build_job(model, options, {}, prompts, keys_N, limit=limits[0])
        state = initial_state(first)
        caches = [(state.slots.cache, state.prefill_buffer)]
        prompts_N = jax.tree.map(lambda x: jnp.repeat(x, options.n, axis=0), prompts)
        for start, limit in itertools.pairwise(limits):
            state = build_next_stage(first, prompts_N, state, start, limit).state
            caches.append((state.slots.cache, state.prefill_buffer))
        return caches

    return jax.eval_shape(all_caches, prompts)


def cache_bytes_per_device(stage: tuple[Cache, Cache], mesh: Mesh) -> int:
    """Return the bytes per device of the caches of a stage, as `cache_shapes` returns them.

    Heads are split over `model`, and the slots' columns perhaps further.
    """

    def count_bytes(caches: Cache) -> int:
        return sum(int(x.size) * int(x.dtype.itemsize) for x in jax.tree.leaves(caches))

    states = [layer for layer in sum(stage, ()) if isinstance(layer, RecurrentState)]
    slots, prompts = (
        count_bytes(tuple(layer for layer in cache if not isinstance(layer, RecurrentState)))
        for cache in stage
    )
    columns = slots // meshes.cache_parts(mesh) + prompts
    return (columns + count_bytes(tuple(states))) // int(mesh.shape["model"])


def append_responses(
    prompts: Prompts, responses_NxT: jax.Array, start: int | jax.Array, longest: int
) -> Prompts:
    """Return prompts [N, P + longest] that end with the first `start` tokens of the responses."""
    P = prompts.tokens.shape[1]
    lengths = prompts.lengths[:, None]
    columns = jnp.arange(P + longest)
    from_prompt = jnp.pad(prompts.tokens, ((0, 0), (0, longest)))
    # Clipped indices belong to columns that hold the prompt, or that nothing reads.
    index = jnp.clip(columns - lengths, 0, longest - 1)
    from_response = jnp.take_along_axis(responses_NxT[:, :longest], index, axis=1)
    return Prompts(
        tokens=jnp.where(columns < lengths, from_prompt, from_response),
        lengths=prompts.lengths + start,
    )
