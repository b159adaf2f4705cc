"""Partial rollouts: responses that continue, under newer weights, where they stopped.

A call draws up to `partial_length` tokens of each response that has not ended. It runs the tokens
drawn before again, as part of the prompts; their log-probs stay those under the weights that drew
them. Between two calls the host decides which samples leave; shapes never change.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.compiled_programs import CompiledProgram
from jax_ppo.runtime.parallelism.rows import split_rows
from jax_ppo.runtime.sharding import drop_padded_rows, num_padded_rows
from jax_ppo.sampler import text_search
from jax_ppo.sampler.decode_loop import decode_queue
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.slots import DecodeJob, initial_state, pad_queue
from jax_ppo.types import Params, Prompts, Rollout


class DrawStates(NamedTuple):
    """The inputs of the next draw of N samples, besides their tokens."""

    keys: jax.Array  # uint32 [N, ...], the data of the samples' random keys
    stop_states: jax.Array  # int32 [N], how far each response has got towards a stop string


def begin_responses(prompts: Prompts, longest: int) -> Rollout:
    """Return empty responses to prompts [N, P], with room for `longest` tokens each."""
    shape = (len(prompts.lengths), longest)
    return Rollout(
        prompts=prompts,
        responses=np.zeros(shape, np.int32),
        lengths=np.zeros(shape[0], np.int32),
        logprobs=np.zeros(shape, np.float32),
        truncated=np.ones(shape[0], bool),
        action_mask=np.zeros(shape, bool),
        versions=np.zeros(shape, np.int32),
    )


def begin_draws(keys: jax.Array) -> DrawStates:
    """Return the states before the first draw, of samples with these keys; pure."""
    return DrawStates(jax.random.key_data(keys), jnp.full(len(keys), text_search.START, jnp.int32))


def has_ended(rollout: Rollout) -> jax.Array:
    """Return which responses are complete, bool [N]: all that cannot continue."""
    return ~rollout.truncated | (rollout.lengths == rollout.responses.shape[1])


def continue_responses(
    model: Transformer,
    options: SamplingOptions,
    params: Params,
    rollout: Rollout,
    draws: DrawStates,
    version: jax.Array,
    any_shard: Callable[[jax.Array], jax.Array] = lambda holds: holds,
) -> tuple[Rollout, DrawStates, jax.Array]:
    """Draw up to `options.partial_length` tokens of each response that has not ended. Pure.

    With unchanged weights the tokens are those of `generate_responses`, up to rounding. Arguments
    are as there and in `DecodeJob`; `options.n` has no effect: each sample has its own prompt.
    `rollout` has versions if weights may differ; `version` is the step that began with `params`.
    Return responses and states afterwards, and int32 [1], as `Rollout.slot_steps`.
    """
    assert not options.returns_routed_experts and options.environment is None
    options = dataclasses.replace(options, n=1)
    T = options.max_response_length
    started_N, ended_N = rollout.lengths, has_ended(rollout)
    # Those that have not ended come first, in their order.
    order_N = jnp.argsort(ended_N, stable=True)
    extended = append_responses(rollout.prompts, rollout.responses, started_N, T - 1)
    queue = jax.tree.map(lambda x: x[order_N], extended)
    job = DecodeJob(
        model=model,
        options=options,
        params=params,
        prompts=pad_queue(options, queue, len(order_N)),
        keys_N=jax.random.wrap_key_data(draws.keys)[order_N],
        count=(~ended_N).sum(),
        any_shard=any_shard,
        start=started_N[order_N],
        limit=jnp.minimum(started_N + (options.partial_length or T), T)[order_N],
    )
    results = {
        "responses": rollout.responses,
        "logprobs": rollout.logprobs,
        "lengths": started_N,
        "finished": ended_N,
        "stop_states": draws.stop_states,
    }
    state = initial_state(job)._replace(**{name: x[order_N] for name, x in results.items()})
    state = decode_queue(job, state)
    place_N = jnp.argsort(order_N)  # in the order of the samples again
    state = state._replace(**{name: getattr(state, name)[place_N] for name in results})
    columns = jnp.arange(T)
    is_drawn_NxT = columns < state.lengths[:, None]
    versions = rollout.versions
    if versions is not None:
        is_new_NxT = is_drawn_NxT & (columns >= started_N[:, None])
        versions = jnp.where(is_new_NxT, version, versions)
    continued = dataclasses.replace(
        rollout,
        responses=state.responses,
        lengths=state.lengths,
        logprobs=state.logprobs,
        # The loop counts samples as finished that had already reached T tokens.
        truncated=jnp.where(ended_N, rollout.truncated, ~state.finished),
        action_mask=is_drawn_NxT,
        versions=versions,
    )
    return continued, DrawStates(draws.keys, state.stop_states), state.slot_steps[None]


def append_responses(
    prompts: Prompts, responses_NxT: jax.Array, lengths_N: jax.Array, longest: int
) -> Prompts:
    """Return prompts [N, P + longest] that end with the responses' first `lengths_N` tokens."""
    P = prompts.tokens.shape[1]
    prompt_lengths = prompts.lengths[:, None]
    columns = jnp.arange(P + longest)
    from_prompt = jnp.pad(prompts.tokens, ((0, 0), (0, longest)))
    # Clipped indices belong to columns that hold the prompt, or that nothing reads.
    index = jnp.clip(columns - prompt_lengths, 0, longest - 1)
    from_response = jnp.take_along_axis(responses_NxT[:, :longest], index, axis=1)
    return Prompts(
        tokens=jnp.where(columns < prompt_lengths, from_prompt, from_response),
        lengths=prompts.lengths + lengths_N,
    )


def continuation_program(model: Transformer, options: SamplingOptions) -> Any:
    """Return the jitted `continue_responses`, of which each row shard has a separate queue."""

    def resume(
        params: Params, rollout: Rollout, draws: DrawStates, version: jax.Array
    ) -> tuple[Rollout, DrawStates, jax.Array]:
        program = split_rows(functools.partial(continue_responses, model, options))
        count = len(rollout.lengths)
        padded = num_padded_rows(count)
        if padded == count:
            return program(params, rollout, draws, version)
        # A padding row counts as ended, with no token, so it is not decoded.
        rows = jnp.minimum(jnp.arange(padded), count - 1)
        rollout, draws = jax.tree.map(lambda x: x[rows], (rollout, draws))
        is_sample = jnp.arange(padded) < count
        rollout = dataclasses.replace(
            rollout,
            truncated=rollout.truncated & is_sample,
            lengths=jnp.where(is_sample, rollout.lengths, 0),
        )
        rollout, draws, slot_steps = program(params, rollout, draws, version)
        return *jax.tree.map(lambda x: drop_padded_rows(x, count), (rollout, draws)), slot_steps

    return CompiledProgram(resume, "sample")
