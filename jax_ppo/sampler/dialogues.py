"""Responses of several turns: the decode loop's state of each dialogue, and when it is answered.

A turn ends with an EOS, a stop string, after `max_turn_length` tokens, or when the response is
full. Its slot then waits until the environment has answered, while the other slots keep decoding.
The turns that wait are answered together, once as many wait as the loop refills at once, or all do.
The observation becomes the next tokens of the response. Its slot runs them one per step, like
drawn tokens, into the slot's own cache; the policy's next turn follows. If it replaces the context,
its first token is run at position 0 of the cache, and no later token reads what was run before. If
it continues a former context, the slot first runs the tokens of that one again, from position 0.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_ppo.sampler import text_search
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.environment import (
    NEW_CONTEXT,
    SAME_CONTEXT,
    Answers,
    address_dialogues,
    validate_contexts,
)
from jax_ppo.sampler.slots import (
    Contexts,
    DecodeJob,
    DecodeState,
    Dialogues,
    Slots,
    busy_slots,
)
from jax_ppo.types import Prompts, Rollout


def start_dialogues(
    options: SamplingOptions, keys_N: jax.Array, prompts_N: Prompts, samples_N: jax.Array
) -> Dialogues:
    """Return the dialogues before their first turn; the prompts have their rows of the data."""
    assert options.environment is not None, "dialogues have an environment"
    rows_N = prompts_N.rows
    assert rows_N is not None, "an environment is reset to the rows of the data"
    N = len(keys_N)
    T = options.max_response_length
    zeros_N = jnp.zeros(N, jnp.int32)
    contexts = None
    if options.max_contexts > 1:
        contexts = Contexts(
            numbers=jnp.zeros((N, T), jnp.int32),
            current=zeros_N,
            opened=zeros_N + 1,
            position=prompts_N.lengths - 1,
            again=zeros_N,
        )
    return Dialogues(
        environment=options.environment.reset(address_dialogues(keys_N, rows_N, samples_N)),
        turns=jnp.zeros(N, jnp.int32),
        turn_start=jnp.zeros(N, jnp.int32),
        waits=jnp.zeros(N, bool),
        closed=jnp.zeros(N, bool),
        is_action=jnp.zeros((N, T), bool),
        starts=jnp.zeros((N, T), bool),
        rewards=jnp.zeros((N, T)),
        contexts=contexts,
    )


def record_dialogues(options: SamplingOptions, rollout: Rollout, dialogues: Dialogues) -> Rollout:
    """Return the rollout with what its dialogues have so far."""
    assert options.environment is not None, "dialogues have an environment"
    contexts = dialogues.contexts
    return dataclasses.replace(
        rollout,
        environment_metrics=options.environment.metrics(dialogues.environment) or None,
        action_mask=dialogues.is_action,
        turn_rewards=dialogues.rewards,
        turn_starts=dialogues.starts,
        contexts=None if contexts is None else contexts.numbers,
    )


def extend_contexts(
    prompts: Prompts, state: DecodeState, longest: int
) -> tuple[Prompts, Dialogues]:
    """Return the current context of each dialogue, which a later stage prefills.

    Takes the prompt of each sample, [N, P], and the state at the end of a stage, of responses of at
    most `longest` tokens.

    Returns:
      (the contexts, [N, P + longest], one token of no meaning where a context has none yet; the
      dialogues where slots run the last tokens of these contexts next).
    """
    assert state.dialogues is not None and state.dialogues.contexts is not None
    contexts = state.dialogues.contexts
    current_Nx1 = contexts.current[:, None]
    in_prompt = (current_Nx1 == 0) & (
        jnp.arange(prompts.tokens.shape[1]) < prompts.lengths[:, None]
    )
    in_response = (contexts.numbers[:, :longest] == current_Nx1) & (
        jnp.arange(longest) < state.lengths[:, None]
    )
    is_context_NxS = jnp.concatenate([in_prompt, in_response], axis=1)
    tokens_NxS = jnp.concatenate([prompts.tokens, state.responses[:, :longest]], axis=1)
    order_NxS = jnp.argsort(~is_context_NxS, axis=1, stable=True)
    lengths_N = is_context_NxS.sum(1)
    extended = Prompts(
        tokens=jnp.take_along_axis(tokens_NxS, order_NxS, axis=1),
        lengths=jnp.maximum(lengths_N, 1),
    )
    contexts = contexts._replace(position=lengths_N - 1)
    return extended, state.dialogues._replace(contexts=contexts)


def waiting_slots(job: DecodeJob, state: DecodeState) -> jax.Array:
    """Return which slots hold a turn that is to be answered, bool [B]."""
    assert state.dialogues is not None
    # An idle slot's sample is N, past the end.
    sample_B = jnp.minimum(state.slots.sample, job.samples - 1)
    return state.dialogues.waits[sample_B] & busy_slots(job, state)


def runs_observation(state: DecodeState, sample_B: jax.Array) -> jax.Array:
    """Return which slots take the next token of an observation instead of drawing one, bool [B]."""
    assert state.dialogues is not None
    return state.slots.drawn < state.dialogues.turn_start[sample_B]


def number_tokens(job: DecodeJob, state: DecodeState) -> DecodeState:
    """Record the contexts of the tokens that a decode step will add.

    Before they are read: XLA would copy them if it could not tell which comes first.
    """
    dialogues = state.dialogues
    assert dialogues is not None and dialogues.contexts is not None
    contexts = dialogues.contexts
    current_B = contexts.current[jnp.minimum(state.slots.sample, job.samples - 1)]
    written_B = jnp.where(held_slots(job, state), job.samples, state.slots.sample)
    numbers = contexts.numbers.at[written_B, state.slots.drawn].set(current_B, mode="drop")
    return state._replace(dialogues=dialogues._replace(contexts=contexts._replace(numbers=numbers)))


def next_tokens(
    job: DecodeJob, state: DecodeState, sample_B: jax.Array, indices_B: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return what slots run next: the last tokens of their sequences, or some again.

    `indices_B` are the columns of these last tokens in the whole sequences.

    Returns:
      Int32 [B] each: the tokens, their positions in their contexts, and their columns in the whole
      sequences, past the end where a token is run to no effect. Then bool [B], whether a token of a
      former context is run again.
    """
    assert state.dialogues is not None and state.dialogues.contexts is not None
    contexts = state.dialogues.contexts
    position_B, current_B = contexts.position[sample_B], contexts.current[sample_B]
    prompt_B = sample_B // job.options.n
    prompts = job.originals
    prompt_lengths_B = prompts.lengths[prompt_B]
    read_B = jnp.maximum(position_B, 0)
    is_again_B = (position_B >= 0) & (position_B < contexts.again[sample_B])
    # Before a new context's first token, the old one's last token is run to no effect.
    past_B = jnp.where(position_B < 0, jnp.iinfo(jnp.int32).max, indices_B)

    def look_up() -> tuple[jax.Array, jax.Array]:
        # The token of the context at this position: of the prompt, or the k-th one in the response.
        in_prompt_B = (current_B == 0) & (read_B < prompt_lengths_B)
        k_B = read_B - jnp.where(current_B == 0, prompt_lengths_B, 0)
        counts_BxT = jnp.cumsum(_in_context(state, sample_B, current_B), axis=1)
        columns_B = (counts_BxT <= k_B[:, None]).sum(1)
        columns_B = jnp.minimum(columns_B, state.responses.shape[1] - 1)
        tokens_B = jnp.where(
            in_prompt_B,
            prompts.tokens[prompt_B, jnp.minimum(read_B, prompts.tokens.shape[1] - 1)],
            state.responses[sample_B, columns_B],
        )
        again_B = jnp.where(in_prompt_B, read_B, prompt_lengths_B + columns_B)
        return (
            jnp.where(is_again_B, tokens_B, state.slots.token),
            jnp.where(is_again_B, again_B, past_B),
        )

    # This reads whole responses, which few steps need. Out of a loop XLA would hoist it.
    tokens_B, columns_B = jax.lax.cond(
        is_again_B.any(), look_up, lambda: (state.slots.token, past_B)
    )
    return tokens_B, read_B, columns_B, is_again_B


def _in_context(state: DecodeState, sample_B: jax.Array, current_B: jax.Array) -> jax.Array:
    """Return which tokens of the slots' responses are of these contexts, bool [B, T]."""
    assert state.dialogues is not None and state.dialogues.contexts is not None
    is_drawn_BxT = jnp.arange(state.responses.shape[1]) < state.slots.drawn[:, None]
    numbers_BxT = state.dialogues.contexts.numbers[sample_B]
    return is_drawn_BxT & (numbers_BxT == current_B[:, None])


def held_slots(job: DecodeJob, state: DecodeState) -> jax.Array:
    """Return which slots add no token in a decode step, bool [B].

    They hold a turn that is to be answered, or run tokens of a former context again.
    """
    held_B = waiting_slots(job, state)
    assert state.dialogues is not None
    if state.dialogues.contexts is not None:
        contexts = state.dialogues.contexts
        sample_B = jnp.minimum(state.slots.sample, job.samples - 1)
        held_B |= contexts.position[sample_B] + 1 < contexts.again[sample_B]
    return held_B


def end_turns(
    job: DecodeJob,
    before: Slots,
    recorded: DecodeState,
    is_observed_B: jax.Array,
    finishes_B: jax.Array,
) -> DecodeState:
    """Record who chose the tokens of a decode step, and let the turns that they end wait.

    `before` are the slots before the step, `recorded` is the state after it. `is_observed_B` says
    which tokens belong to an observation, `finishes_B` which would end a turn, by an EOS or a stop
    string.
    """
    slots = recorded.slots
    dialogues = recorded.dialogues
    assert dialogues is not None
    N = job.samples
    sample_B = jnp.minimum(before.sample, N - 1)
    # A slot that waits runs its last token once more: nothing of it has changed.
    held_B = held_slots(job, recorded)
    written_B = jnp.where(held_B, N, before.sample)
    ended_B = finishes_B | (slots.drawn == job.options.max_response_length)
    if job.options.max_turn_length is not None:
        ended_B |= slots.drawn - dialogues.turn_start[sample_B] == job.options.max_turn_length
    contexts = dialogues.contexts
    if contexts is not None:
        run_B = jnp.where(waiting_slots(job, recorded), N, before.sample)
        contexts = contexts._replace(position=contexts.position.at[run_B].add(1, mode="drop"))
    # Strings are searched for in the policy's own turns only.
    observed_B = jnp.where(is_observed_B, written_B, N)
    return recorded._replace(
        # Whether the turn is finished, until it is answered.
        finished=recorded.finished.at[written_B].set(finishes_B & ~is_observed_B, mode="drop"),
        slots=slots._replace(
            drawn=jnp.where(held_B, before.drawn, slots.drawn),
            token=jnp.where(held_B, before.token, slots.token),
        ),
        stop_states=recorded.stop_states.at[observed_B].set(text_search.START, mode="drop"),
        dialogues=dialogues._replace(
            waits=dialogues.waits.at[written_B].set(ended_B & ~is_observed_B, mode="drop"),
            is_action=dialogues.is_action.at[written_B, before.drawn].set(
                ~is_observed_B, mode="drop"
            ),
            starts=dialogues.starts.at[written_B, before.drawn].set(
                before.drawn == dialogues.turn_start[sample_B], mode="drop"
            ),
            contexts=contexts,
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
    environment = options.environment
    assert dialogues is not None and environment is not None
    N, T = state.responses.shape
    waits_B = waiting_slots(job, state)
    sample_B = jnp.minimum(slots.sample, N - 1)
    turns_BxU, lengths_B = _current_turns(job, state, sample_B, waits_B)
    before = jax.tree.map(lambda x: x[sample_B], dialogues.environment)
    answers = environment.step(before, turns_BxU, lengths_B)

    answered_B = dialogues.turns[sample_B] + 1
    observed_B = slots.drawn + answers.lengths
    # An observation is only inserted where the policy has room for a token after it.
    continues_B = waits_B & ~answers.done & (observed_B < T)
    if options.max_turns is not None:
        continues_B &= answered_B < options.max_turns
    validate_contexts(answers, options.max_contexts)
    contexts = dialogues.contexts
    if contexts is not None:
        continues_B, contexts = _choose_contexts(job, state, answers, continues_B)

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
            environment=jax.tree.map(put, dialogues.environment, answers.state),
            turns=put(dialogues.turns, answered_B),
            turn_start=put(dialogues.turn_start, observed_B),
            waits=put(dialogues.waits, False),
            closed=put(dialogues.closed, ~continues_B),
            rewards=dialogues.rewards.at[written_B, slots.drawn - 1].set(
                answers.rewards, mode="drop"
            ),
            contexts=contexts,
        ),
    )


def leave_slots(job: DecodeJob, state: DecodeState) -> DecodeState:
    """Free the slots of dialogues that go on in a later call, perhaps within a turn."""
    if isinstance(job.limit, int) and job.limit == job.options.max_response_length:
        return state  # no later call: a turn that reaches the limit waits, and is the last
    slots = state.slots
    limit_B = job.limit_of(jnp.minimum(slots.sample, job.samples - 1))
    leaves_B = (slots.drawn == limit_B) & ~waiting_slots(job, state)
    return state._replace(
        slots=slots._replace(sample=jnp.where(leaves_B, job.samples, slots.sample))
    )


def _choose_contexts(
    job: DecodeJob, state: DecodeState, answers: Answers, continues_B: jax.Array
) -> tuple[jax.Array, Contexts]:
    """Return which of the dialogues that may continue do, and the contexts in which they do so."""
    assert state.dialogues is not None and state.dialogues.contexts is not None
    assert answers.contexts is not None
    before = state.dialogues.contexts
    N = job.samples
    sample_B = jnp.minimum(state.slots.sample, N - 1)
    contexts: Contexts = jax.tree.map(lambda x: x[sample_B], before)
    is_new_B = answers.contexts == NEW_CONTEXT
    current_B = jnp.where(answers.contexts == SAME_CONTEXT, contexts.current, answers.contexts)
    is_allowed_B = (contexts.opened < job.options.max_contexts) & (answers.lengths > 0)
    exists_B = (current_B >= 0) & (current_B < contexts.opened)
    continues_B &= jnp.where(is_new_B, is_allowed_B, exists_B)
    returns_B = ~is_new_B & (current_B != contexts.current)
    current_B = jnp.where(is_new_B, contexts.opened, current_B)
    again_B = _in_context(state, sample_B, current_B).sum(1)
    again_B += jnp.where(current_B == 0, job.originals.lengths[sample_B // job.options.n], 0)
    position_B = jnp.where(is_new_B, -1, jnp.where(returns_B, 0, contexts.position))
    written_B = jnp.where(continues_B, state.slots.sample, N)

    def put(x_N: jax.Array, new_B: jax.Array) -> jax.Array:
        return x_N.at[written_B].set(new_B, mode="drop")

    return continues_B, before._replace(
        current=put(before.current, current_B),
        opened=put(before.opened, contexts.opened + is_new_B),
        position=put(before.position, position_B),
        again=put(before.again, jnp.where(returns_B, again_B, 0)),
    )


def _current_turns(
    job: DecodeJob, state: DecodeState, sample_B: jax.Array, waits_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the tokens of the turns that wait, int32 [B, U], and their number; 0 elsewhere."""
    assert state.dialogues is not None
    T = state.responses.shape[1]
    U = min(job.options.max_turn_length or T, T)
    start_B = state.dialogues.turn_start[sample_B]
    lengths_B = jnp.where(waits_B, state.slots.drawn - start_B, 0)
    columns_BxU = start_B[:, None] + jnp.arange(U)
    tokens_BxU = state.responses[sample_B[:, None], jnp.minimum(columns_BxU, T - 1)]
    return jnp.where(jnp.arange(U) < lengths_B[:, None], tokens_BxU, 0), lengths_B
