"""The slots that decode together, the queue that refills them, and the arrays of both.

All prompts of a step wait in a queue on the device. B slots decode together, one token per step and
slot; a slot whose response has ended takes the next sample. Prompts are prefilled in groups into a
prefill buffer, from where each of their n samples copies keys and values into its slot.

The cache has S = P + T columns per slot, and the token at position i of a sequence is in column i.
When a slot is filled, its prompt's last token is still to be run, which draws the first token of
the response. (The prefill leaves it out of recurrent states, which must not change twice.) Where
responses continue (`continuation.py`) the prompt includes the tokens that were drawn before.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.models.cache import empty_cache, write_rows
from jax_ppo.models.transformer import Transformer
from jax_ppo.sampler import text_search
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.routing import RoutingRecord, empty_record, record_entries
from jax_ppo.sampler.sampling import Draws, advance_stop_search, finishes_responses
from jax_ppo.types import Params, Prompts

PREFILL_TOKENS = 8192  # prompt tokens that one prefill runs
MIN_SLOTS = 8  # the slots are not narrowed below this: each width is one more loop to compile
# Slots are not narrowed for shorter responses: that would save less time than it takes to compile.
MIN_NARROWED_TOKENS = 64

Cache = tuple[Any, ...]  # one entry per layer (models/cache.py)


class Slots(NamedTuple):
    """The samples that are decoded together."""

    # int32 [B], index of the slot's sample; N, the number of samples, if the slot is idle.
    sample: jax.Array
    drawn: jax.Array  # int32 [B], tokens of its response so far
    token: jax.Array  # int32 [B], the last token of its sequence, which has not been run yet
    cache: Cache  # one entry per layer, with S columns and B rows, or more (see `compact_slots`)


class Dialogues(NamedTuple):
    """The dialogues of N samples."""

    rows: jax.Array  # int32 [N], the row of the data that each prompt is from
    samples: jax.Array  # int32 [N], see `Turns`
    seeds: jax.Array  # uint32 [N], the seed of each dialogue's randomness
    figures: jax.Array  # float32 [N, M], the last value of each metric; `NOTHING` before the first
    turns: jax.Array  # int32 [N], turns of the policy that have been answered
    turn_start: jax.Array  # int32 [N], the column of the response in which the current turn starts
    waits: jax.Array  # bool [N], whether the turn has ended and is not answered yet
    is_action: jax.Array  # bool [N, T], the response tokens that the policy chose
    starts: jax.Array  # bool [N, T], the first token of each turn
    rewards: jax.Array  # float32 [N, T], rewards of turns, each at the last token of its turn


class DecodeState(NamedTuple):
    """State that the decode loop carries."""

    slots: Slots  # the samples being decoded
    entered: jax.Array  # int32 scalar, samples that have left the queue, in its order
    prefilled: jax.Array  # int32 scalar, prompts prefilled; the last G of them are in the buffer
    # Keys and values of each layer, as in the cache but with P columns and G rows.
    prefill_buffer: Cache
    responses: jax.Array  # int32 [N, T], tokens drawn; 0 past the length
    logprobs: jax.Array  # float32 [N, T], their log-probabilities; 0 past the length
    lengths: jax.Array  # int32 [N], tokens of each response so far
    # bool [N], whether an EOS ended the response, or the environment the dialogue.
    finished: jax.Array
    stop_states: jax.Array  # int32 [N], how far each response has got towards a stop string
    slot_steps: jax.Array  # int32 scalar, tokens that the slots could have drawn so far
    dialogues: Dialogues | None = None  # `None` without an environment
    routing: RoutingRecord | None = None  # `None` unless the options ask for it


@dataclasses.dataclass(frozen=True)
class DecodeJob:
    """Inputs that stay the same throughout the decode loop."""

    model: Transformer  # the actor's model, with `unrolled=True`
    options: SamplingOptions  # how to sample
    params: Params  # the actor's weights, laid out for decoding
    # [N / n, P], from `pad_queue`. Where responses continue, they include their tokens.
    prompts: Prompts
    keys_N: jax.Array  # one random key per sample
    count: int | jax.Array  # how many of the samples, from the first on, are decoded
    # Maps a bool to whether it holds on any row shard whose loops run in step with this one's.
    any_shard: Callable[[jax.Array], jax.Array] = lambda holds: holds
    # Drawn tokens of each response in its prompt: one number, or int32 [N] where they continue.
    start: int | jax.Array = 0
    # int32 [N] where responses continue: tokens at which a sample leaves its slot; `None`: T.
    limit: jax.Array | None = None

    @property
    def samples(self) -> int:
        """Return N, the number of samples."""
        return len(self.keys_N)

    def start_of(self, samples: jax.Array) -> int | jax.Array:
        """Return `start` of these samples."""
        return self.start if isinstance(self.start, int) else self.start[samples]

    def limit_of(self, samples: jax.Array) -> int | jax.Array:
        """Return the tokens at which these samples leave their slots."""
        return self.options.max_response_length if self.limit is None else self.limit[samples]

    @property
    def width(self) -> int:
        """Return B, the number of slots at first."""
        return num_slots(self.options, self.samples)

    @property
    def group(self) -> int:
        """Return G, the number of prompts that are prefilled together."""
        return prefill_group_size(self.options, self.prompts, self.samples)

    @property
    def refill(self) -> int:
        """Return the number of slots that are filled together, once as many are idle."""
        return max(1, self.width // 64)


def num_slots(options: SamplingOptions, samples: int) -> int:
    """Return the number of slots of a queue: more than its samples would never be used."""
    return min(options.slots or samples, samples)


def prefill_group_size(options: SamplingOptions, prompts: Prompts, samples: int) -> int:
    """Return as many prompts as slots take at once, within the budget of a prefill."""
    rows, P = prompts.tokens.shape
    return max(1, min(PREFILL_TOKENS // P, rows, -(-num_slots(options, samples) // options.n)))


def pad_queue(options: SamplingOptions, prompts: Prompts, samples: int) -> Prompts:
    """Return a queue's prompts, padded to whole groups with prompts that are not answered."""
    rows, P = prompts.tokens.shape
    missing = -rows % prefill_group_size(options, prompts, samples)
    # Padding may be anything, an id outside the vocabulary too: it is replaced by zeros.
    tokens = jnp.where(jnp.arange(P) < prompts.lengths[:, None], prompts.tokens, 0)
    return Prompts(
        tokens=jnp.pad(tokens, ((0, missing), (0, 0))),
        lengths=jnp.pad(prompts.lengths, (0, missing), constant_values=1),
    )


def initial_state(job: DecodeJob) -> DecodeState:
    """Return the state in which all slots are idle and nothing is prefilled."""
    architecture = job.model.architecture
    T = job.options.max_response_length
    P = job.prompts.tokens.shape[1]
    N = job.samples
    B = job.width
    # Where responses continue, the prompts have columns for all tokens but the last.
    columns = P + (T if job.limit is None else 1)

    cache = functools.partial(empty_cache, architecture, job.model.decoding, dtype=job.model.dtype)
    routing = None
    if job.options.returns_routed_experts:
        routing = empty_record(
            architecture, prompts=job.group, prompt_length=P, samples=N, length=P + T
        )
    return DecodeState(
        slots=Slots(
            sample=jnp.full(B, N, jnp.int32),
            drawn=jnp.zeros(B, jnp.int32),
            token=jnp.zeros(B, jnp.int32),
            cache=cache(B, columns),
        ),
        entered=jnp.int32(0),
        prefilled=jnp.int32(0),
        prefill_buffer=cache(job.group, P),
        responses=jnp.zeros((N, T), jnp.int32),
        logprobs=jnp.zeros((N, T)),
        lengths=jnp.zeros(N, jnp.int32),
        finished=jnp.zeros(N, bool),
        stop_states=jnp.full(N, text_search.START, jnp.int32),
        slot_steps=jnp.int32(0),
        routing=routing,
    )


def slot_widths(program: str, width: int, tokens: int) -> tuple[int, ...]:
    """Return the numbers of slots that the loop passes through, widest first.

    They are `width`, three quarters, half and a quarter of it, these not below `MIN_SLOTS`; only
    the first if a slot draws few `tokens` of a response, or if `program` (cache.py) is cuDNN's: it
    reads one column of an idle slot, and a step reads the weights for any number of slots.
    """
    if tokens < MIN_NARROWED_TOKENS or program == "cudnn":
        return (width,)
    narrower = (width * 3 // 4, width // 2, width // 4)
    return width, *(part for part in narrower if part >= MIN_SLOTS)


def has_queue(job: DecodeJob, state: DecodeState) -> jax.Array:
    """Return whether samples wait in the queue, bool scalar."""
    return state.entered < job.count


def busy_slots(job: DecodeJob, state: DecodeState) -> jax.Array:
    """Return which slots hold a sample, bool [B]."""
    return state.slots.sample < job.samples


def needs_prefill(job: DecodeJob, state: DecodeState) -> jax.Array:
    """Return whether samples wait, but none of a prefilled prompt, bool scalar."""
    return has_queue(job, state) & (state.entered == state.prefilled * job.options.n)


def fill_slots(job: DecodeJob, state: DecodeState) -> DecodeState:
    """Give up to `job.refill` idle slots the next samples whose prompts are prefilled."""
    n = job.options.n
    slots = state.slots
    B = len(slots.sample)
    # Pair up to g = `job.refill` idle slots with the next samples of the queue; B means none.
    slot_g = jnp.nonzero(~busy_slots(job, state), size=job.refill, fill_value=B)[0]
    sample_g = state.entered + jnp.arange(job.refill)
    enters_g = (slot_g < B) & (sample_g < jnp.minimum(state.prefilled * n, job.count))
    slot_g = jnp.where(enters_g, slot_g, B)  # writes to slot B, which does not exist, are dropped
    # The n samples of a prompt enter one after the other and copy the same row of the buffer.
    prompt_g = jnp.minimum(sample_g // n, state.prefilled - 1)
    buffer_g = prompt_g - (state.prefilled - job.group)

    def put(slots_B: jax.Array, new_g: jax.Array | int) -> jax.Array:
        return slots_B.at[slot_g].set(new_g, mode="drop")

    entering = jax.tree.map(lambda x: x[buffer_g], state.prefill_buffer)
    cache = tuple(
        write_rows(job.model.decoding, layer, slot_g, new)
        for layer, new in zip(slots.cache, entering, strict=True)
    )
    # The decode step runs the last prompt token again, to draw the first response token.
    last_g = job.prompts.tokens[prompt_g, job.prompts.lengths[prompt_g] - 1]
    filled = Slots(
        sample=put(slots.sample, sample_g),
        drawn=put(slots.drawn, job.start_of(sample_g)),
        token=put(slots.token, last_g),
        cache=cache,
    )
    routing = state.routing
    if routing is not None:
        routing = record_entries(routing, jnp.where(enters_g, sample_g, job.samples), buffer_g)
    return state._replace(
        slots=filled, entered=state.entered + enters_g.sum(dtype=jnp.int32), routing=routing
    )


def compact_slots(job: DecodeJob, state: DecodeState, width: int) -> DecodeState:
    """Move the busy slots, of which there are at most `width`, into the first `width` slots.

    On accelerators the cache keeps its rows: a narrower copy would need memory beside it. On a CPU
    it is cut, because a CPU would copy the part of the array that each step reads.
    """
    busy_B = busy_slots(job, state)
    B = len(busy_B)
    # Up to m = B - width busy slots beyond the new width move into idle slots below it.
    source_m = width + jnp.nonzero(busy_B[width:], size=B - width, fill_value=B)[0]
    target_m = jnp.nonzero(~busy_B[:width], size=B - width)[0]
    # Writes to slot job.width, which does not exist, are dropped.
    target_m = jnp.where(source_m < B, target_m, job.width)

    def move(x: jax.Array) -> jax.Array:
        return x.at[target_m].set(x[source_m], mode="drop")

    moved = jax.tree.map(move, state.slots)
    narrow = jax.tree.map(lambda x: x[:width], moved)
    if job.model.decoding != "cpu":
        narrow = narrow._replace(cache=moved.cache)
    return state._replace(slots=narrow)


def record_draws(
    job: DecodeJob, state: DecodeState, written_B: jax.Array, draws: Draws, cache: Cache
) -> tuple[DecodeState, jax.Array]:
    """Record the next token of each slot's sample, and the cache of the step that drew it.

    `written_B` are the samples to write to, N for none. Also return, bool [B], whether an EOS or a
    stop string finishes the response or turn.
    """
    slots = state.slots
    drawn_B = slots.drawn + 1
    sample_B = jnp.minimum(slots.sample, job.samples - 1)
    stop_B = advance_stop_search(job.options, state.stop_states[sample_B], draws.tokens, drawn_B)
    recorded = state._replace(
        slots=Slots(sample=slots.sample, drawn=drawn_B, token=draws.tokens, cache=cache),
        responses=state.responses.at[written_B, slots.drawn].set(draws.tokens, mode="drop"),
        logprobs=state.logprobs.at[written_B, slots.drawn].set(draws.logprobs, mode="drop"),
        lengths=state.lengths.at[written_B].set(drawn_B, mode="drop"),
        stop_states=state.stop_states.at[written_B].set(stop_B, mode="drop"),
        slot_steps=state.slot_steps + len(drawn_B),
    )
    return recorded, finishes_responses(job.options, draws.tokens, stop_B)
