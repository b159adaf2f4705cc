"""The slots that decode together, the queue that refills them, and the arrays of both.

All prompts of a step wait in a queue on the device. B slots decode together, one token per step and
slot; a slot whose response has ended takes the next sample. Prompts are prefilled in groups into a
prefill buffer, from where each of their n samples copies keys and values into its slot.

The cache has S = P + T columns per slot, and the token at position i of a sequence is in column i.
When a slot is filled, its prompt's last token is still to be run: the decode step that runs it
draws the first token of the response. The prefill has run it too, but recurrent states do not
include it: a token must not change them twice. Where responses continue (`continuation.py`) the
prompt includes the tokens that were drawn before.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.models.cache import empty_cache, empty_state, write_rows
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.parallelism.heads import num_split_kv_heads
from jax_ppo.sampler import text_search
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.routing import RoutingRecord, empty_record, record_entries
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
    # One entry per layer, with B rows and S columns; it may keep the rows of slots that no longer
    # exist (see `compact_slots`).
    cache: Cache


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
    # int32 scalar, tokens that the slots could have drawn so far: steps times slots.
    slot_steps: jax.Array
    dialogues: Dialogues | None = None  # the dialogues' state; `None` without an environment
    # The experts that tokens have passed through; `None` unless they are asked for.
    routing: RoutingRecord | None = None


@dataclasses.dataclass(frozen=True)
class DecodeJob:
    """Inputs that stay the same throughout the decode loop."""

    model: Transformer  # the actor's model, with `unrolled=True`
    options: SamplingOptions  # how to sample
    params: Params  # the actor's weights, laid out for decoding
    # [N / n, P], padded to a multiple of `group` with prompts of length 1, which are not answered.
    # Where responses continue, they include their tokens.
    prompts: Prompts
    originals: Prompts  # [N / n, P or less], the prompts without tokens of the responses
    keys_N: jax.Array  # one random key per sample
    group: int  # G, prompts prefilled together
    width: int  # B, the number of slots at first
    # Tokens of each response that have been drawn and are part of its prompt: one number, or int32
    # [N] where responses continue.
    start: int | jax.Array
    # Tokens of a response at which a sample leaves its slot, even if it has not ended: one number,
    # or int32 [N].
    limit: int | jax.Array
    span: int  # the most tokens that a slot draws of a response
    columns: int  # columns of a slot's cache
    count: int | jax.Array  # how many of the samples, from the first on, are decoded
    # Maps a bool to whether it holds on any of the row shards whose loops run in step with this
    # one's.
    any_shard: Callable[[jax.Array], jax.Array]

    @property
    def samples(self) -> int:
        """Return N, the number of samples."""
        return len(self.keys_N)

    def start_of(self, samples: jax.Array) -> int | jax.Array:
        """Return `start` of these samples."""
        return self.start if isinstance(self.start, int) else self.start[samples]

    def limit_of(self, samples: jax.Array) -> int | jax.Array:
        """Return `limit` of these samples."""
        return self.limit if isinstance(self.limit, int) else self.limit[samples]

    @property
    def refill(self) -> int:
        """Return the number of slots that are filled together, once as many are idle."""
        return max(1, self.width // 64)


def build_job(
    model: Transformer,
    options: SamplingOptions,
    params: Params,
    prompts: Prompts,
    keys_N: jax.Array,
    any_shard: Callable[[jax.Array], jax.Array] = lambda holds: holds,
    *,
    start: int | jax.Array = 0,
    limit: jax.Array | None = None,
    count: int | jax.Array | None = None,
    originals: Prompts | None = None,
) -> DecodeJob:
    """Choose the numbers of slots and of prompts per prefill, and pad the queue to whole groups.

    See `DecodeJob` for the arguments. Without a `limit` it is T, without a `count` all samples,
    without `originals` the prompts.
    """
    rows, P = prompts.tokens.shape
    # More slots than samples would never be used.
    width = min(options.slots or len(keys_N), len(keys_N))
    # As many prompts as the slots take at once, within the budget of a prefill.
    group = max(1, min(PREFILL_TOKENS // P, rows, -(-width // options.n)))
    # Padding may be anything, an id outside the vocabulary too: it is replaced by zeros.
    tokens = jnp.where(jnp.arange(P) < prompts.lengths[:, None], prompts.tokens, 0)
    queue = Prompts(
        tokens=jnp.pad(tokens, ((0, -rows % group), (0, 0))),
        lengths=jnp.pad(prompts.lengths, (0, -rows % group), constant_values=1),
    )
    longest = options.max_response_length
    # Where responses continue, the prompts have columns for all tokens but the last.
    span, columns = longest, P + longest
    if limit is not None:
        span, columns = options.partial_length or longest, P + 1
    return DecodeJob(
        model=model,
        options=options,
        params=params,
        prompts=queue,
        originals=queue if originals is None else originals,
        keys_N=keys_N,
        group=group,
        width=width,
        start=start,
        limit=longest if limit is None else limit,
        span=span,
        columns=columns,
        count=len(keys_N) if count is None else count,
        any_shard=any_shard,
    )


def initial_state(job: DecodeJob) -> DecodeState:
    """Return the state in which all slots are idle and nothing is prefilled."""
    architecture = job.model.architecture
    T = job.options.max_response_length
    P = job.prompts.tokens.shape[1]
    N = job.samples
    B = job.width

    def cache(rows: int, columns: int) -> Cache:
        return tuple(
            empty_state(architecture, rows, job.model.dtype)
            if heads is None
            else empty_cache(
                job.model.decoding,
                rows,
                columns,
                num_split_kv_heads(heads[0]),
                heads[1],
                job.model.dtype,
            )
            for heads in architecture.cache_heads
        )

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
            cache=cache(B, job.columns),
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


def slot_widths(width: int, tokens: int) -> tuple[int, ...]:
    """Return the numbers of slots that the loop passes through, widest first.

    They are `width`, three quarters, half and a quarter of it; only the first may be below
    `MIN_SLOTS`. It is the only one if a slot draws few `tokens` of a response.
    """
    if tokens < MIN_NARROWED_TOKENS:
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
    # Pair up to g = `job.refill` idle slots with the next samples of the queue; B is no slot.
    slot_g = jnp.nonzero(~busy_slots(job, state), size=job.refill, fill_value=B)[0]
    sample_g = state.entered + jnp.arange(job.refill)
    enters_g = (slot_g < B) & (sample_g < jnp.minimum(state.prefilled * n, job.count))
    # Writes to slot B, which does not exist, are dropped.
    slot_g = jnp.where(enters_g, slot_g, B)
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

    On accelerators the cache keeps its rows: a narrower copy would need memory beside it while it
    is filled. On a CPU it is cut, because a CPU would copy the part of the array that each step
    reads.
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
    cache = moved.cache
    if job.model.decoding == "cpu":
        cache = jax.tree.map(lambda x: x[:width], cache)
    compacted = Slots(
        sample=moved.sample[:width],
        drawn=moved.drawn[:width],
        token=moved.token[:width],
        cache=cache,
    )
    return state._replace(slots=compacted)
