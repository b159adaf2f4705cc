"""Responses to prompts, on the device from first to last: one `while_loop` whose slots never wait for the longest response.

All prompts of a step wait in a queue on the device. B slots decode together, one token a step and slot; a slot whose
response has ended takes the next sample. Prompts are prefilled in groups into a stage, from where each of their n samples
copies keys and values into its slot. Once the queue is empty and a quarter of the slots idle, the others move into fewer.
A small model has two such loops side by side on a CPU, each with half of the prompts and slots.

The cache has S = P + T columns a slot, and the token at position i of a sequence stands in column i. A slot enters with
its prompt's last token still to be run: the step that runs it draws the first token of the response.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.models import heads
from jax_ppo.models.cache import empty_cache, write_rows
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import dispatch
from jax_ppo.sampler import sampling
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.types import Prompts, Rollout

PREFILL_TOKENS = 8192  # prompt tokens that a loop prefills at once
LEAST_SLOTS = 8  # no narrower: each width is a loop more to compile
SHARED_WEIGHTS = (
    2**25
)  # bytes, the most of which several programs read side by side: more does not stay in a CPU's cache


class Slots(NamedTuple):
    """The samples that are decoded together.

    Fields:
      sample: int32 [B], index of the slot's sample; N, the number of samples, where the slot is idle.
      drawn: int32 [B], tokens of its response so far.
      token: int32 [B], the last token of its sequence, which has not been run.
      cache: of each layer (models/cache.py), B rows and S columns; maybe with rows behind, that slots have left (see `narrow`).
    """

    sample: Any
    drawn: Any
    token: Any
    cache: Any


class State(NamedTuple):
    """What the loop carries.

    Fields:
      slots: Slots.
      entered: int32, samples that have left the queue, in their order.
      staged: int32, prompts prefilled; the last G of them are on the stage.
      stage: keys and values of each layer, as in the cache with P for S.
      responses: int32 [N, T]; logprobs: float32 [N, T]; lengths: int32 [N]: of what was drawn, 0 past the length.
      finished: bool [N], an EOS ended the response.
      slot_steps: int32, tokens that the slots could have drawn so far: steps times slots.
    """

    slots: Slots
    entered: Any
    staged: Any
    stage: Any
    responses: Any
    logprobs: Any
    lengths: Any
    finished: Any
    slot_steps: Any


@dataclasses.dataclass(frozen=True)
class Job:
    """What stays the same throughout.

    Attributes:
      prompts: [N / n, P] and some of length 1 behind, which nobody answers, to a multiple of `group`.
      keys_N: one a sample.
      group: G, prompts prefilled together.
      width: B, slots at first.
      any_shard: whether a bool holds on any shard of rows that runs the loops in step with this one.
    """

    model: Transformer
    options: SamplingOptions
    params: Any
    prompts: Prompts
    keys_N: Any
    group: int
    width: int
    any_shard: Callable

    @property
    def samples(self) -> int:
        return len(self.keys_N)

    @property
    def refill(self) -> int:
        """Slots that take a sample at once, and as many must be idle before decoding stops for them."""
        return max(1, self.width // 64)


def sample(
    model: Transformer,
    options: SamplingOptions,
    params,
    prompts: Prompts,
    indices_N,
    key,
    any_shard=lambda x: x,
) -> Rollout:
    """Samples n responses to each prompt. Pure; to be compiled with model and options static.

    A sample's tokens depend on key, its prompt and its index alone, up to the rounding of logits: not on the slots, the
    samples beside it, their number, the bucket P or the devices. All samples of a prompt share its prefill.

    Args:
      model: with unrolled=True.
      params: the actor's as `models.transformer.unroll` gives them, in the type to compute in, laid out for decoding.
      prompts: [N / n, P]; sample i answers prompt i // n.
      indices_N: int32, the samples' addresses.
      key: the step's.
      any_shard: see Job.
    """
    assert model.unrolled, (
        "the sampler needs Transformer(unrolled=True), which returns keys and values"
    )
    job = plan(model, options, params, prompts, sampling.sample_keys(key, indices_N), any_shard)
    state = start(job)
    widths = narrowing(job.width)
    for width, narrower in zip(widths, (*widths[1:], 0), strict=True):
        if width < job.width:
            state = narrow(job, state, width)
        step = (
            functools.partial(refill_and_decode, job, narrower)
            if width == job.width
            else functools.partial(decode, job)
        )
        state = jax.lax.while_loop(
            lambda s, n=narrower: any_shard(queued(job, s) | (busy(job, s).sum() > n)), step, state
        )
    prompts = jax.tree.map(lambda x: jnp.repeat(x, options.n, axis=0), prompts)
    return Rollout(
        prompts=prompts,
        responses=state.responses,
        lengths=state.lengths,
        logprobs=state.logprobs,
        truncated=~state.finished,
        action_mask=jnp.arange(options.max_response_length) < state.lengths[:, None],
        slot_steps=state.slot_steps[None],
    )


def plan(model, options, params, prompts: Prompts, keys_N, any_shard=lambda x: x) -> Job:
    """Chooses B and G and fills the queue up to a multiple of G."""
    count, P = prompts.tokens.shape
    width = min(options.slots or len(keys_N), len(keys_N))
    group = max(1, min(PREFILL_TOKENS // P, count, -(-width // options.n)))
    # Whatever stands behind a prompt, an id outside the vocabulary too, nothing but zeros goes in.
    tokens = jnp.where(jnp.arange(P) < prompts.lengths[:, None], prompts.tokens, 0)
    queue = Prompts(
        jnp.pad(tokens, ((0, -count % group), (0, 0))),
        jnp.pad(prompts.lengths, (0, -count % group), constant_values=1),
    )
    return Job(model, options, params, queue, keys_N, group, width, any_shard)


def start(job: Job) -> State:
    """All slots idle, nothing staged."""
    a, T, P = job.model.architecture, job.options.max_response_length, job.prompts.tokens.shape[1]

    def cache(rows, columns):
        return tuple(
            empty_cache(
                job.model.decoding, rows, columns, a.num_kv_heads, a.head_dim, job.model.dtype
            )
            for _ in range(a.num_layers)
        )

    N, B, none = job.samples, job.width, jnp.int32(0)
    slots = Slots(
        jnp.full(B, N, jnp.int32), jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.int32), cache(B, P + T)
    )
    return State(
        slots,
        none,
        none,
        cache(job.group, P),
        jnp.zeros((N, T), jnp.int32),
        jnp.zeros((N, T)),
        jnp.zeros(N, jnp.int32),
        jnp.zeros(N, bool),
        none,
    )


def narrowing(width: int) -> tuple[int, ...]:
    """The widths that the slots pass through: all, three quarters, half and a quarter, none below LEAST_SLOTS but the first."""
    return (
        width,
        *(part for part in (width * 3 // 4, width // 2, width // 4) if part >= LEAST_SLOTS),
    )


def queued(job: Job, state: State):
    return state.entered < job.samples


def busy(job: Job, state: State):
    return state.slots.sample < job.samples


def refill_and_decode(job: Job, narrower: int, state: State) -> State:
    """Fills idle slots from the queue, then decodes until some can be filled again, or all but `narrower` are idle."""

    def can_stage(state):
        return job.any_shard(stage_is_used_up(job, state))

    def can_enter(state):
        staged = jnp.minimum(state.staged * job.options.n, job.samples)
        return job.any_shard((state.entered < staged) & ~busy(job, state).all())

    def goes_on(state):
        busy_B, waiting = busy(job, state), queued(job, state)
        can_refill = job.any_shard(waiting & ((~busy_B).sum() >= job.refill))
        return job.any_shard(waiting | (busy_B.sum() > narrower)) & ~can_refill

    # Loops of one turn or none, not conditionals: XLA copies nothing on their way.
    state = jax.lax.while_loop(can_stage, functools.partial(prefill, job), state)
    state = jax.lax.while_loop(can_enter, functools.partial(enter, job), state)
    return jax.lax.while_loop(goes_on, functools.partial(decode, job), state)


def stage_is_used_up(job: Job, state: State):
    return queued(job, state) & (state.entered == state.staged * job.options.n)


def prefill(job: Job, state: State) -> State:
    """Puts the keys and values of the next group of prompts on the stage, if the one before has left it."""
    tokens_GxP, lengths_G = (
        jax.lax.dynamic_slice_in_dim(x, state.staged, job.group)
        for x in (job.prompts.tokens, job.prompts.lengths)
    )
    columns_GxP = jnp.broadcast_to(jnp.arange(tokens_GxP.shape[1]), tokens_GxP.shape)
    is_prompt_GxP = (columns_GxP < lengths_G[:, None]).astype(jnp.int32)
    stage = job.model.apply({"params": job.params}, tokens_GxP, columns_GxP, is_prompt_GxP).cache
    used_up = stage_is_used_up(job, state)  # on another shard, if not on this
    stage = jax.tree.map(lambda new, old: jnp.where(used_up, new, old), stage, state.stage)
    return state._replace(staged=state.staged + used_up * job.group, stage=stage)


def enter(job: Job, state: State) -> State:
    """Gives `job.refill` idle slots, or as many as there are, the next samples whose prompts are on the stage."""
    n, slots = job.options.n, state.slots
    B = len(slots.sample)
    slot_g = jnp.nonzero(~busy(job, state), size=job.refill, fill_value=B)[0]
    sample_g = state.entered + jnp.arange(job.refill)
    enters_g = (slot_g < B) & (sample_g < jnp.minimum(state.staged * n, job.samples))
    slot_g = jnp.where(enters_g, slot_g, B)  # B: dropped
    prompt_g = jnp.minimum(sample_g // n, state.staged - 1)
    staged_g = prompt_g - (state.staged - job.group)

    def put(slots_B, new_g):
        return slots_B.at[slot_g].set(new_g, mode="drop")

    entering = jax.tree.map(lambda x: x[staged_g], state.stage)
    cache = tuple(
        write_rows(job.model.decoding, layer, slot_g, new)
        for layer, new in zip(slots.cache, entering, strict=True)
    )
    last_g = job.prompts.tokens[prompt_g, job.prompts.lengths[prompt_g] - 1]
    slots = Slots(put(slots.sample, sample_g), put(slots.drawn, 0), put(slots.token, last_g), cache)
    return state._replace(slots=slots, entered=state.entered + enters_g.sum())


def decode(job: Job, state: State) -> State:
    """One step: runs each slot's last token, draws the next and writes it down. What idle slots draw is dropped."""
    options, slots, busy_B = job.options, state.slots, busy(job, state)
    some_B = jnp.minimum(slots.sample, job.samples - 1)
    positions_B = jnp.where(busy_B, job.prompts.lengths[some_B // options.n] + slots.drawn - 1, 0)
    hidden_Bx1xD, cache, _ = job.model.apply(
        {"params": job.params}, slots.token[:, None], positions_B[:, None], cache=slots.cache
    )
    uniforms_Bx2 = sampling.uniforms(job.keys_N[some_B], slots.drawn)
    logits_BxV = heads.compute_logits(job.model.architecture, job.params, hidden_Bx1xD[:, 0])
    tokens_B, logprobs_B = sampling.choose(
        logits_BxV, uniforms_Bx2, options.temperature, options.top_k, options.top_p
    )
    is_eos_B = (tokens_B[:, None] == jnp.array(options.eos_ids, jnp.int32)).any(-1)
    drawn_B = slots.drawn + 1
    over_B = is_eos_B | (drawn_B == options.max_response_length)
    return state._replace(
        slots=Slots(jnp.where(over_B, job.samples, slots.sample), drawn_B, tokens_B, cache),
        responses=state.responses.at[slots.sample, slots.drawn].set(tokens_B, mode="drop"),
        logprobs=state.logprobs.at[slots.sample, slots.drawn].set(logprobs_B, mode="drop"),
        lengths=state.lengths.at[slots.sample].set(drawn_B, mode="drop"),
        finished=state.finished.at[slots.sample].set(is_eos_B, mode="drop"),
        slot_steps=state.slot_steps + len(busy_B),
    )


def narrow(job: Job, state: State, width: int) -> State:
    """Moves what is in the busy slots, `width` at most, into the first so many.

    The cache stays as wide: a narrower one would stand beside it while it is filled. But for a CPU, which would copy
    the part of an array that it reads, in each step.
    """
    busy_B = busy(job, state)
    B = len(busy_B)
    source_m = width + jnp.nonzero(busy_B[width:], size=B - width, fill_value=B)[0]
    target_m = jnp.nonzero(~busy_B[:width], size=B - width)[0]
    target_m = jnp.where(source_m < B, target_m, job.width)  # dropped

    def move(x):
        return x.at[target_m].set(x[source_m], mode="drop")

    sample, drawn, token, cache = jax.tree.map(move, state.slots)
    if job.model.decoding == "cpu":
        cache = jax.tree.map(lambda x: x[:width], cache)
    return state._replace(slots=Slots(sample[:width], drawn[:width], token[:width], cache))


class Sampler:
    """`sample`, compiled once for each prompt bucket P and number of prompts.

    Where programs run side by side (dispatch.py) and the model is small, prompts and slots are shared out among several, each
    with a queue of its own, if both can be in equal parts.
    """

    def __init__(
        self, model: Transformer, options: SamplingOptions, split_rows=lambda function: function
    ):
        """`split_rows`: wraps a function of (params, prompts, indices, key, any_shard) so that each device that rows are
        split over runs it for its own: it refills its slots from its own queue."""
        self.options = options

        def with_indices(params, prompts, key, first_sample_index=0, slots=options.slots):
            indices_N = first_sample_index + jnp.arange(len(prompts.lengths) * options.n)
            run = functools.partial(sample, model, dataclasses.replace(options, slots=slots))
            return split_rows(run)(params, prompts, indices_N, key)

        self.program = jax.jit(with_indices, static_argnames="slots")

    def __call__(self, params, prompts: Prompts, key, first_sample_index=None) -> Rollout:
        """See `sample`. An index left out is a constant of the program: nothing travels from the host for it."""
        parts = dispatch.together(self.programs(params, prompts, key, first_sample_index))
        return concatenate(parts) if len(parts) > 1 else parts[0]

    def programs(
        self, params, prompts: Prompts, key, first_sample_index=None
    ) -> list[dispatch.Program]:
        """What a call runs. Sharing out is itself run here: where there are lanes, prompts must be arrays."""
        n, lanes = self.options.n, dispatch.lanes()
        slots = self.options.slots and min(self.options.slots, len(prompts.lengths) * n)
        weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        if (
            lanes == 1
            or weights > SHARED_WEIGHTS
            or len(prompts.lengths) % lanes
            or (slots and slots % lanes)
        ):
            offset = () if first_sample_index is None else (first_sample_index,)
            return [(self.program, (params, prompts, key, *offset))]
        parts = share_out(prompts, first_sample_index, lanes, n)
        return [
            (self.program, (params, part, key, first, slots and slots // lanes))
            for part, first in parts
        ]

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return self.program._cache_size()


@functools.partial(jax.jit, static_argnames=("lanes", "n"))
def share_out(
    prompts: Prompts, first_sample_index, lanes: int, n: int
) -> list[tuple[Prompts, jax.Array]]:
    """The prompts in `lanes` equal parts, each with the index of its first sample."""
    count, first = (
        len(prompts.lengths) // lanes,
        jnp.int32(0 if first_sample_index is None else first_sample_index),
    )
    return [
        (
            jax.tree.map(lambda x, i=i: x[i * count : (i + 1) * count], prompts),
            first + i * count * n,
        )
        for i in range(lanes)
    ]


@jax.jit
def concatenate(parts: list[Rollout]) -> Rollout:
    """The rollout of all parts' prompts, in their order."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
