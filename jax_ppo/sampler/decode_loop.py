"""The decode loop: sample responses to prompts without leaving the device.

A slot whose response has ended takes the next sample of the queue (`slots.py`). Once the queue is
empty, the remaining samples move into three quarters, half and then a quarter of the slots, as soon
as they fit; each number of slots has its `while_loop`. (Short responses keep all slots, and so does
cuDNN.) With an environment a response may have several turns (`dialogues.py`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo.models.attention_kernels import program_for_length
from jax_ppo.models.transformer import Transformer, TransformerOutput
from jax_ppo.runtime.compiled_programs import CompiledProgram
from jax_ppo.runtime.parallelism.rows import split_rows
from jax_ppo.runtime.sharding import drop_padded_rows, num_padded_rows
from jax_ppo.sampler import dialogues, routing, sampling
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.slots import (
    DecodeJob,
    DecodeState,
    busy_slots,
    compact_slots,
    fill_slots,
    has_queue,
    initial_state,
    needs_prefill,
    pad_queue,
    record_draws,
    slot_widths,
)
from jax_ppo.types import Params, Prompts, Rollout

PADDING = -1  # the index of samples that only pad the queue, and are not decoded


def generate_responses(
    model: Transformer,
    options: SamplingOptions,
    params: Params,
    prompts: Prompts,
    indices_N: jax.Array,
    key: jax.Array,
    any_shard: Callable[[jax.Array], jax.Array] = lambda holds: holds,
) -> Rollout:
    """Sample n responses to each prompt. Pure; to be compiled with model and options static.

    Up to the rounding of logits, a sample's tokens depend only on the key, its prompt and its
    index: not on the slots, the other samples, their number, the prompt width P or the devices.
    All samples of a prompt share its prefill.

    Args:
      model: with `unrolled=True`.
      options: how to sample.
      params: the actor's, unrolled, in the type to compute in, laid out for decoding.
      prompts: [N / n, P]; sample i answers prompt i // n.
      indices_N: int32, the samples' addresses for random numbers. The last ones may be `PADDING`;
        the results of these samples are undefined.
      key: the base key of the step.
      any_shard: see `DecodeJob`.
    """
    model = model.clone(returns_routed_experts=options.returns_routed_experts)
    is_padding_N = indices_N == PADDING
    job = DecodeJob(
        model=model,
        options=options,
        params=params,
        prompts=pad_queue(options, prompts, len(indices_N)),
        keys_N=sampling.sample_keys(key, indices_N),
        count=(~is_padding_N).sum(),
        any_shard=any_shard,
    )
    prompts_N = jax.tree.map(lambda x: jnp.repeat(x, options.n, axis=0), prompts)
    state = initial_state(job)._replace(finished=is_padding_N)
    if options.environment is not None:
        started = dialogues.start_dialogues(options, job.keys_N, prompts_N, indices_N)
        state = state._replace(dialogues=started)
    state = decode_queue(job, state)
    rollout = Rollout(
        prompts=dataclasses.replace(prompts_N, rows=None),
        responses=state.responses,
        lengths=state.lengths,
        logprobs=state.logprobs,
        truncated=~state.finished,
        # Without an environment, every token up to the length was chosen by the policy.
        action_mask=jnp.arange(options.max_response_length) < state.lengths[:, None],
        slot_steps=state.slot_steps[None],
        routed_experts=None if state.routing is None else state.routing.sequences,
    )
    if state.dialogues is not None:
        return dialogues.record_dialogues(options, rollout, state.dialogues)
    return rollout


def decode_queue(job: DecodeJob, state: DecodeState) -> DecodeState:
    """Decode all samples of a job, each up to its limit if the job has limits."""
    tokens = job.options.max_response_length  # the most that a slot draws of a response
    if job.limit is not None:
        tokens = job.options.partial_length or tokens
    widths = slot_widths(job.model.decoding, job.width, tokens)
    # The first loop empties the queue; the narrower ones only finish the samples in the slots.
    for width, narrower in zip(widths, (*widths[1:], 0), strict=True):
        if width == job.width:
            step = functools.partial(refill_and_decode, job, narrower)
        else:
            state = compact_slots(job, state, width)
            step = functools.partial(decode_and_answer, job)
        state = jax.lax.while_loop(functools.partial(_needs_width, job, narrower), step, state)
    return state


def _needs_width(job: DecodeJob, narrower: int, state: DecodeState) -> jax.Array:
    """Return whether the queue has samples, or more than `narrower` slots are busy."""
    is_too_narrow = busy_slots(job, state).sum() > narrower
    return job.any_shard(has_queue(job, state) | is_too_narrow)


def refill_and_decode(job: DecodeJob, narrower: int, state: DecodeState) -> DecodeState:
    """Fill idle slots; decode until `job.refill` can be filled, or `narrower` slots suffice."""

    # Prefill when all samples of the prefilled prompts have entered slots.
    def should_prefill(state: DecodeState) -> jax.Array:
        return job.any_shard(needs_prefill(job, state))

    # Fill while a sample of a prefilled prompt waits and a slot is idle.
    def can_fill(state: DecodeState) -> jax.Array:
        ready = jnp.minimum(state.prefilled * job.options.n, job.count)
        return job.any_shard((state.entered < ready) & ~busy_slots(job, state).all())

    # Decode until enough slots are idle to refill them together, or fewer slots suffice.
    def can_decode(state: DecodeState) -> jax.Array:
        idle = (~busy_slots(job, state)).sum()
        can_refill = job.any_shard(has_queue(job, state) & (idle >= job.refill))
        return _needs_width(job, narrower, state) & ~can_refill

    # The first loop runs at most once. XLA would copy the state into the branches of a `cond`.
    state = jax.lax.while_loop(should_prefill, functools.partial(prefill_group, job), state)
    state = jax.lax.while_loop(can_fill, functools.partial(fill_slots, job), state)
    return jax.lax.while_loop(can_decode, functools.partial(decode_and_answer, job), state)


def prefill_group(job: DecodeJob, state: DecodeState) -> DecodeState:
    """Prefill the next G prompts into the buffer, unless samples in it still wait for slots."""
    tokens_GxP = jax.lax.dynamic_slice_in_dim(job.prompts.tokens, state.prefilled, job.group)
    lengths_G = jax.lax.dynamic_slice_in_dim(job.prompts.lengths, state.prefilled, job.group)
    columns_GxP = jnp.broadcast_to(jnp.arange(tokens_GxP.shape[1]), tokens_GxP.shape)
    is_prompt_GxP = (columns_GxP < lengths_G[:, None]).astype(jnp.int32)
    model = job.model.clone(attention=program_for_length(job.model.attention, tokens_GxP.shape[1]))
    output: TransformerOutput = model.apply(  # type: ignore[assignment]
        {"params": job.params},
        tokens_GxP,
        columns_GxP,
        is_prompt_GxP,
        # A prompt's last token is run by the first decode step of its samples.
        ends_B=lengths_G - 1,
    )
    # This shard may run the prefill only because another one needs it; it then keeps its buffer.
    is_needed = needs_prefill(job, state)
    buffer = jax.tree.map(
        lambda new, old: jnp.where(is_needed, new, old), output.cache, state.prefill_buffer
    )
    record = state.routing
    if record is not None:
        record = routing.record_prefill(
            record,
            job.model.architecture.num_experts,
            output.auxiliary["routed_experts"],
            is_prompt_GxP > 0,
            is_needed,
        )
    return state._replace(
        prefilled=state.prefilled + is_needed * job.group, prefill_buffer=buffer, routing=record
    )


def decode_and_answer(job: DecodeJob, state: DecodeState) -> DecodeState:
    """Decode one token per slot; then let the environment, if there is one, answer turns."""
    state = decode_step(job, state)
    if state.dialogues is None:
        return state
    # A loop instead of a `cond`, as in `refill_and_decode`; it runs at most once.
    return jax.lax.while_loop(
        functools.partial(dialogues.should_answer, job),
        functools.partial(dialogues.answer_turns, job),
        state,
    )


def decode_step(job: DecodeJob, state: DecodeState) -> DecodeState:
    """Run the last token of each slot's sample, then draw and record the next one."""
    slots = state.slots
    # Idle slots, whose sample is N, compute for the last sample; their results are dropped.
    sample_B = jnp.minimum(slots.sample, job.samples - 1)
    prompt_lengths_B = job.prompts.lengths[sample_B // job.options.n] - job.start_of(sample_B)
    positions_B = jnp.where(busy_slots(job, state), prompt_lengths_B + slots.drawn - 1, 0)
    decoded: TransformerOutput = job.model.apply(  # type: ignore[assignment]
        {"params": job.params}, slots.token[:, None], positions_B[:, None], cache=slots.cache
    )
    assert decoded.cache is not None
    draws = sampling.draw_next_tokens(
        job.model.architecture,
        job.options,
        job.params,
        decoded.hidden[:, 0],
        job.keys_N[sample_B],
        slots.drawn,
    )
    if state.routing is not None:
        routed = decoded.auxiliary["routed_experts"]
        record = routing.record_tokens(state.routing, routed, slots.sample, positions_B)
        state = state._replace(routing=record)
    if state.dialogues is not None:
        return dialogues.record_turns(job, state, draws, decoded.cache)
    state, finishes_B = record_draws(job, state, slots.sample, draws, decoded.cache)
    # A response that reaches the limit ends without being finished.
    ended_B = finishes_B | (state.slots.drawn == job.limit_of(sample_B))
    # An ended sample leaves its slot at once; N, `job.samples`, marks the slot as idle.
    return state._replace(
        slots=state.slots._replace(sample=jnp.where(ended_B, job.samples, slots.sample)),
        finished=state.finished.at[slots.sample].set(finishes_B, mode="drop"),
    )


def sampler_program(model: Transformer, options: SamplingOptions) -> Any:
    """Return `generate_responses` compiled, a function (params, prompts, key, first sample index).

    `model` is unrolled. Each row shard of the mesh has separate slots and a separate queue.
    """

    def generate_from(
        params: Params, prompts: Prompts, key: jax.Array, first_sample_index: jax.Array | int = 0
    ) -> Rollout:
        count = len(prompts.lengths)
        missing = num_padded_rows(count) - count
        # A sample's random numbers depend on its index, not on where it is decoded.
        indices_N = first_sample_index + jnp.arange(count * options.n)
        generate = functools.partial(generate_responses, model, options)
        # Prompts are padded to a multiple of the devices; the padding gets no responses.
        prompts = Prompts(
            tokens=jnp.pad(prompts.tokens, ((0, missing), (0, 0))),
            lengths=jnp.pad(prompts.lengths, (0, missing), constant_values=1),
            rows=None if prompts.rows is None else jnp.pad(prompts.rows, (0, missing)),
        )
        indices_N = jnp.pad(indices_N, (0, missing * options.n), constant_values=PADDING)
        rollout = split_rows(generate)(params, prompts, indices_N, key)
        # `slot_steps` has one entry per queue of prompts, not per sample.
        samples = dataclasses.replace(rollout, slot_steps=None)
        samples = jax.tree.map(lambda x: drop_padded_rows(x, count * options.n), samples)
        return dataclasses.replace(samples, slot_steps=rollout.slot_steps)

    return CompiledProgram(generate_from, "sample")
