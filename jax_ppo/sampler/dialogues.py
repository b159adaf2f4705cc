"""Responses of several turns: the decode loop's state of each dialogue, and when it is answered.

A turn ends with an EOS, a stop string, after `max_turn_length` tokens, or when the response is
full. Its slot then waits while the others keep decoding. The turns that wait are answered together,
once as many wait as the loop refills at once, or all do. The observation becomes the next tokens of
the response, which its slot runs one per step like drawn tokens; the next turn follows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.models.cache import keep_states
from jax_ppo.runtime.parallelism.rows import call_host
from jax_ppo.sampler import text_search
from jax_ppo.sampler.engine import Answers, SamplingOptions, Turns
from jax_ppo.sampler.sampling import Draws
from jax_ppo.sampler.slots import Cache, DecodeJob, DecodeState, Dialogues, busy_slots, record_draws
from jax_ppo.types import NOTHING, Prompts, Rollout

# Position under which an environment's random key is derived from its sample's; no token has it.
_ENVIRONMENT_POSITION = 2**31 - 1


def start_dialogues(
    options: SamplingOptions, keys_N: jax.Array, prompts_N: Prompts, samples_N: jax.Array
) -> Dialogues:
    """Return the dialogues before their first turn; the prompts have their rows of the data."""
    assert options.environment is not None, "dialogues have an environment"
    assert prompts_N.rows is not None, "an environment is reset to the rows of the data"
    N = len(keys_N)
    T = options.max_response_length
    return Dialogues(
        rows=prompts_N.rows,
        samples=samples_N.astype(jnp.int32),
        seeds=dialogue_seeds(keys_N),
        figures=jnp.full((N, len(options.environment.metric_names)), NOTHING),
        turns=jnp.zeros(N, jnp.int32),
        turn_start=jnp.zeros(N, jnp.int32),
        waits=jnp.zeros(N, bool),
        is_action=jnp.zeros((N, T), bool),
        starts=jnp.zeros((N, T), bool),
        rewards=jnp.zeros((N, T)),
    )


def dialogue_seeds(keys_N: jax.Array) -> jax.Array:
    """Return the seeds of dialogues, uint32 [N]; `keys_N` are those their tokens are drawn with."""
    derive = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    return jax.vmap(jax.random.bits)(derive(keys_N, _ENVIRONMENT_POSITION))


def record_dialogues(options: SamplingOptions, rollout: Rollout, dialogues: Dialogues) -> Rollout:
    """Return the rollout with the results of its dialogues."""
    assert options.environment is not None, "dialogues have an environment"
    return dataclasses.replace(
        rollout,
        environment_metrics=dict(
            zip(options.environment.metric_names, dialogues.figures.T, strict=True)
        ),
        action_mask=dialogues.is_action,
        turn_rewards=dialogues.rewards,
        turn_starts=dialogues.starts,
    )


def waiting_slots(job: DecodeJob, state: DecodeState) -> jax.Array:
    """Return which slots hold a turn that is to be answered, bool [B]."""
    assert state.dialogues is not None
    # An idle slot's sample is N, past the end.
    sample_B = jnp.minimum(state.slots.sample, job.samples - 1)
    return state.dialogues.waits[sample_B] & busy_slots(job, state)


def record_turns(job: DecodeJob, state: DecodeState, draws: Draws, cache: Cache) -> DecodeState:
    """Record the tokens of a decode step, or observations in their place; let ended turns wait."""
    before, dialogues = state.slots, state.dialogues
    assert dialogues is not None
    N = job.samples
    sample_B = jnp.minimum(before.sample, N - 1)
    is_observed_B = before.drawn < dialogues.turn_start[sample_B]
    observed_B = state.responses[sample_B, before.drawn]
    draws = Draws(
        jnp.where(is_observed_B, observed_B, draws.tokens),
        jnp.where(is_observed_B, 0.0, draws.logprobs),
    )
    # A slot that waits writes nothing, and will run its last token again.
    waits_B = waiting_slots(job, state)
    written_B = jnp.where(waits_B, N, before.sample)
    cache = keep_states(cache, before.cache, waits_B)
    recorded, finishes_B = record_draws(job, state, written_B, draws, cache)
    slots = recorded.slots
    ended_B = finishes_B | (slots.drawn == job.options.max_response_length)
    if job.options.max_turn_length is not None:
        ended_B |= slots.drawn - dialogues.turn_start[sample_B] == job.options.max_turn_length
    # Strings are searched for in the policy's own turns only.
    searched_B = jnp.where(is_observed_B, written_B, N)
    return recorded._replace(
        # Whether the turn is finished, until it is answered.
        finished=recorded.finished.at[written_B].set(finishes_B & ~is_observed_B, mode="drop"),
        slots=slots._replace(
            drawn=jnp.where(waits_B, before.drawn, slots.drawn),
            token=jnp.where(waits_B, before.token, slots.token),
        ),
        stop_states=recorded.stop_states.at[searched_B].set(text_search.START, mode="drop"),
        dialogues=dialogues._replace(
            waits=dialogues.waits.at[written_B].set(ended_B & ~is_observed_B, mode="drop"),
            is_action=dialogues.is_action.at[written_B, before.drawn].set(
                ~is_observed_B, mode="drop"
            ),
            starts=dialogues.starts.at[written_B, before.drawn].set(
                before.drawn == dialogues.turn_start[sample_B], mode="drop"
            ),
        ),
    )


def should_answer(job: DecodeJob, state: DecodeState) -> jax.Array:
    """Return whether enough turns wait, or nothing else is being decoded, bool scalar."""
    waits_B = waiting_slots(job, state)
    count = waits_B.sum()
    none_decodes = busy_slots(job, state).sum() == count
    return job.any_shard((count > 0) & ((count >= job.refill) | none_decodes))


def answer_turns(job: DecodeJob, state: DecodeState) -> DecodeState:
    """Answer all turns that wait: insert observations, or end the dialogues."""
    options = job.options
    slots = state.slots
    dialogues = state.dialogues
    assert dialogues is not None
    N, T = state.responses.shape
    waits_B = waiting_slots(job, state)
    sample_B = jnp.minimum(slots.sample, N - 1)
    answers = _ask_environment(job, state, sample_B, waits_B)
    answered_B = dialogues.turns[sample_B] + 1
    observed_B = slots.drawn + answers.lengths
    # An observation is only inserted where the policy has room for a token after it.
    continues_B = waits_B & ~answers.done & (observed_B < T)
    if options.max_turns is not None:
        continues_B &= answered_B < options.max_turns

    # Writes to sample N, which does not exist, are dropped.
    written_B = jnp.where(waits_B, slots.sample, N)
    observation_O = jnp.arange(answers.observations.shape[1])
    is_observed_BxO = continues_B[:, None] & (observation_O < answers.lengths[:, None])
    columns_BxO = jnp.where(is_observed_BxO, slots.drawn[:, None] + observation_O, T)

    def put(x_N: jax.Array, new_B: jax.Array | int | bool) -> jax.Array:
        return x_N.at[written_B].set(new_B, mode="drop")

    return state._replace(
        slots=slots._replace(sample=jnp.where(waits_B & ~continues_B, N, slots.sample)),
        responses=state.responses.at[written_B[:, None], columns_BxO].set(
            answers.observations, mode="drop"
        ),
        # A dialogue is cut off by the number of turns, for want of room, or within its last turn.
        finished=put(state.finished, answers.done & (state.finished[sample_B] | (slots.drawn < T))),
        # Strings are searched for within a turn.
        stop_states=put(state.stop_states, text_search.START),
        dialogues=dialogues._replace(
            figures=put(
                dialogues.figures,
                jnp.where(answers.figures == NOTHING, dialogues.figures[sample_B], answers.figures),
            ),
            turns=put(dialogues.turns, answered_B),
            turn_start=put(dialogues.turn_start, observed_B),
            waits=put(dialogues.waits, False),
            rewards=dialogues.rewards.at[written_B, slots.drawn - 1].set(
                answers.rewards, mode="drop"
            ),
        ),
    )


def _ask_environment(
    job: DecodeJob, state: DecodeState, sample_B: jax.Array, waits_B: jax.Array
) -> Any:
    """Return the `Answers` to the turns that wait, as arrays on the device."""
    options, dialogues = job.options, state.dialogues
    environment = options.environment
    assert dialogues is not None and environment is not None
    B, T = len(sample_B), state.responses.shape[1]
    U = min(options.max_turn_length or T, T)
    start_B = dialogues.turn_start[sample_B]
    lengths_B = jnp.where(waits_B, state.slots.drawn - start_B, 0)
    columns_BxU = start_B[:, None] + jnp.arange(U)
    tokens_BxU = state.responses[sample_B[:, None], jnp.minimum(columns_BxU, T - 1)]
    tokens_BxU = jnp.where(jnp.arange(U) < lengths_B[:, None], tokens_BxU, 0)

    def answer(*turns: jax.Array) -> tuple[np.ndarray, ...]:
        return tuple(environment.answer(Turns(*map(np.asarray, turns))))

    shapes = (
        jax.ShapeDtypeStruct((B, environment.observation_length), jnp.int32),
        jax.ShapeDtypeStruct((B,), jnp.int32),
        jax.ShapeDtypeStruct((B,), jnp.float32),
        jax.ShapeDtypeStruct((B,), jnp.bool_),
        jax.ShapeDtypeStruct((B, len(environment.metric_names)), jnp.float32),
    )
    addresses = (dialogues.rows, dialogues.samples, dialogues.seeds, dialogues.turns)
    turns = (*(x[sample_B] for x in addresses), tokens_BxU, lengths_B)
    return Answers(*call_host(answer, shapes, *turns))
