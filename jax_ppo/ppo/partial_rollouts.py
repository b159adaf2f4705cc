"""Sample a step from a pool of prompts whose responses continue from step to step.

With `rollout.max_staleness` above 1, a pool holds twice the prompts of a step. A step decodes all
its responses, a few tokens at a time, until those to enough prompts are complete; these prompts
leave, the others continue in the next step under its weights, and new prompts enter. Long responses
no longer hold up a step (partial rollouts: Kimi k1.5, arXiv 2501.12599, section 2.6.2; AReaL, Fu et
al. 2025, arXiv 2505.24298).

A prompt that entered S = `max_staleness` steps ago must leave, so no token is older than S updates.
The oldest leave first and at most one batch enters per step, so these prompts fit into a step, and
no response is ever dropped.
"""

import functools
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_ppo.data.prompt_batches import PromptBatch, make_batch
from jax_ppo.ppo.response_sampling import newest_weights, rows_of_groups, take_on_mesh, take_rows
from jax_ppo.ppo.step_parts import (
    ProgramInputs,
    ResponsePool,
    SampledBatch,
    StepObserver,
    StepParts,
    TrainingBatches,
)
from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.compilation import compile_ahead
from jax_ppo.sampler.continuation import (
    DrawStates,
    begin_draws,
    begin_responses,
    has_ended,
)
from jax_ppo.sampler.other_mesh import ContinuingEngine, SeparateEngine
from jax_ppo.sampler.sampling import sample_keys
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import TrainState
from jax_ppo.types import Params, Prompts, Rollout

BATCHES_IN_POOL = 2  # of prompts
EMPTY = (0, -1, 0)  # in `ResponsePool.prompts`, where a prompt has left


def choose_prompts(
    ended: np.ndarray, batches: np.ndarray, step: int, count: int, max_staleness: int
) -> np.ndarray | None:
    """Return the places in the pool of the G = `count` prompts that leave it, the oldest first.

    `None` if those that must leave, `max_staleness` steps after they entered, are not complete, or
    not enough others are.

    Args:
      ended: bool [prompts, n], which responses are complete.
      batches: int [prompts], the number of the batch that each came with, see `entry_steps`.
      step: the step, from 0.
      count: G.
      max_staleness: see above.
    """
    complete = np.asarray(ended.all(1))
    must_leave = entry_steps(batches) <= step - max_staleness
    oldest = np.argsort(batches, kind="stable")
    places = oldest[complete[oldest]][:count]
    return places if len(places) == count and complete[must_leave].all() else None


def entry_steps(batches: np.ndarray) -> np.ndarray:
    """Return the step in which prompts entered: the first two batches in step 0, then one each."""
    return np.maximum(batches - (BATCHES_IN_POOL - 1), 0)


def sample_partial_batch(
    parts: StepParts,
    state: TrainState,
    batches: TrainingBatches,
    step: int,
    observer: StepObserver,
    pool: ResponsePool | None,
) -> SampledBatch:
    """Continue the responses of the pool until a step's are complete; return these.

    `pool` is what the previous step left; `None` fills a new one.
    """
    options = parts.step_options
    n, count = options.rollout.n, options.prompts_per_step
    pool = _fill(parts, pool, batches, step)
    version = placement.place(np.int32(step), sharding.replicated(parts.mesh))
    rollout, draws = pool.rollout, pool.draws
    drawn_before = placement.to_host(rollout.action_mask).sum()
    slot_steps = 0
    with newest_weights(parts, state, observer) as engine:
        assert isinstance(engine, ContinuingEngine), "the options require it"
        while True:
            rollout, draws, taken = engine.continue_responses(
                rollout, draws, version, parts.sampling
            )
            slot_steps += int(placement.to_host(taken).sum())
            ended = placement.to_host(_has_ended(rollout)).reshape(-1, n)
            max_staleness = options.rollout.max_staleness
            places = choose_prompts(ended, pool.batches, step, count, max_staleness)
            if places is not None:
                break
        drawn = placement.to_host(rollout.action_mask).sum() - drawn_before
        rows = rows_of_groups(places, n)
        selected = take_on_mesh(parts.mesh, ({"rollout": rollout},), rows)
        left = pool.prompts.copy()
        left[places] = EMPTY

        def continue_others() -> ResponsePool:
            continued = engine.continue_responses(rollout, draws, version, parts.sampling)
            return ResponsePool(*continued[:2], left)

        # The host does not wait for this stage: rewards are computed while the others draw it.
        others: ResponsePool | Future[ResponsePool]
        if isinstance(engine, SeparateEngine):
            (rollout, draws), version = engine.send((rollout, draws), version)
            others = engine.decode_ahead(continue_others)
        else:
            others = continue_others()
    leaving = pool.prompts[places]
    offsets = np.arange(len(rows)) % n
    return SampledBatch(
        batch=make_batch(parts.training, leaving[:, 0], count, parts.training.max_prompt_length),
        rollout=selected["rollout"],
        position=batches.position,
        metrics={"rollout/slot_use": drawn / slot_steps},
        addresses={
            "step": np.repeat(leaving[:, 1], n),
            "sample": np.repeat(leaving[:, 2], n) + offsets,
        },
        pool=others,
    )


def _fill(
    parts: StepParts, pool: ResponsePool | None, batches: TrainingBatches, step: int
) -> ResponsePool:
    """Return the pool with new prompts in its empty places."""
    count = parts.step_options.prompts_per_step
    places = np.arange(BATCHES_IN_POOL * count)
    empty = (places if pool is None else np.flatnonzero(pool.batches < 0)).reshape(-1, count)
    # The batches' numbers address their random numbers, as the steps' numbers do otherwise.
    first = step + BATCHES_IN_POOL - len(empty)
    pools = [_begin(parts, next(batches), first + i) for i in range(len(empty))]
    if pool is not None:
        places[empty] = len(places) + np.arange(count)
        pools.insert(0, pool)
    arrays = take_on_mesh(
        parts.mesh,
        tuple({"rollout": x.rollout, "draws": x.draws} for x in pools),
        rows_of_groups(places, parts.step_options.rollout.n),
    )
    prompts = np.concatenate([x.prompts for x in pools])[places]
    return ResponsePool(arrays["rollout"], arrays["draws"], prompts)


def _begin(parts: StepParts, batch: PromptBatch, number: int) -> ResponsePool:
    """Return a batch of prompts without a token of a response, on the mesh."""
    n = parts.step_options.rollout.n
    layout = sharding.batch_rows(parts.mesh, len(batch.indices) * n)
    # One width for all batches: the pool's shapes never change.
    missing = parts.training.max_prompt_length - batch.prompts.tokens.shape[1]
    prompts = Prompts(
        tokens=np.repeat(np.pad(batch.prompts.tokens, ((0, 0), (0, missing))), n, axis=0),
        lengths=np.repeat(batch.prompts.lengths, n),
    )
    rollout, draws = _begin_on_mesh(
        placement.place(prompts, layout),
        parts.sample_keys(Stream.TRAINING, number),
        parts.sampling.max_response_length,
        layout,
    )
    first = np.arange(len(batch.indices)) * n
    return ResponsePool(
        rollout=rollout,
        draws=draws,
        prompts=np.stack([batch.indices, np.full_like(first, number), first], axis=1),
    )


@functools.partial(jax.jit, static_argnames=("longest", "layout"))
def _begin_on_mesh(
    prompts: Prompts, key: jax.Array, longest: int, layout: NamedSharding
) -> tuple[Rollout, DrawStates]:
    """Return responses without a token, and the states before their first draws."""
    draws = begin_draws(sample_keys(key, jnp.arange(len(prompts.lengths))))
    begun = begin_responses(prompts, longest), draws
    return jax.lax.with_sharding_constraint(begun, layout)


_has_ended = jax.jit(has_ended)


def compile_begin(step: ProgramInputs, key: jax.Array) -> tuple[Rollout, DrawStates]:
    """Compile what begins the responses to a batch; return the shapes of these and their states."""
    layout = sharding.batch_rows(step.mesh, step.samples)
    width = step.step_options.sequence_length - step.sampling.max_response_length
    prompts = Prompts(
        tokens=np.zeros((step.samples, width), np.int32), lengths=np.ones(step.samples, np.int32)
    )
    shapes: tuple[Rollout, DrawStates] = compile_ahead(
        _begin_on_mesh,
        placement.abstract(prompts, layout),
        key,
        step.sampling.max_response_length,
        layout,
    )
    return shapes


def compile_partial_sampling(
    step: ProgramInputs, params: Params, key: jax.Array
) -> Generator[str, None, Rollout]:
    """Compile what `sample_partial_batch` runs, as `RolloutEngine.precompile` does."""
    engine, mesh = step.engine, step.mesh
    assert isinstance(engine, ContinuingEngine), "the options require it"
    batch = step.samples
    begun = dict(zip(("rollout", "draws"), compile_begin(step, key), strict=True))

    def take(pools: tuple[dict[str, Any], ...], count: int) -> dict[str, Any]:
        rows = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=sharding.replicated(mesh))
        taken: dict[str, Any] = compile_ahead(
            take_rows, pools, rows, sharding.batch_rows(mesh, count)
        )
        return taken

    pool = take((begun,) * BATCHES_IN_POOL, BATCHES_IN_POOL * batch)
    take((pool, begun), BATCHES_IN_POOL * batch)
    rollout = yield from engine.precompile_continuation(
        params, pool["rollout"], pool["draws"], step.sampling
    )
    compile_ahead(_has_ended, rollout)
    selected: Rollout = take(({"rollout": rollout},), batch)["rollout"]
    return selected
