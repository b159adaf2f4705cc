"""Sample a step from a pool of prompts whose responses continue from step to step.

With `rollout.max_staleness` above 1, a pool holds twice the prompts of a step. A step decodes all
responses, a few tokens at a time, until those to enough prompts are complete; these leave, the
others continue in the next step under its weights, and new prompts enter. Long responses no longer
hold up a step (partial rollouts: Kimi k1.5, arXiv 2501.12599, section 2.6.2; AReaL, Fu et al. 2025,
arXiv 2505.24298).

A prompt that entered S = `max_staleness` steps ago must leave, so no token is older than S updates.
The oldest leave first and at most one batch enters per step: they fit, and none is dropped.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_ppo.data.prompt_batches import PromptBatch, PromptBatches, make_batch
from jax_ppo.ppo.samples.on_policy import newest_weights
from jax_ppo.ppo.samples.selected import rows_of_groups, take_on_mesh
from jax_ppo.ppo.samples.source import (
    BATCHES_IN_POOL,
    POOL,
    SampledBatch,
    SampleSource,
    are_rows,
    lay_out,
    read_rollout,
    rollout_arrays,
)
from jax_ppo.ppo.step_parts import StepObserver, StepParts
from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.compiled_programs import CompiledProgram, program, run_on_shapes
from jax_ppo.sampler.continuation import DrawStates, begin_draws, begin_responses, has_ended
from jax_ppo.sampler.engine import RolloutEngine
from jax_ppo.sampler.other_mesh import ContinuingEngine, SeparateEngine
from jax_ppo.sampler.sampling import sample_keys
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import former_values
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import TrainState
from jax_ppo.types import Prompts, Rollout

EMPTY = (0, -1, 0)  # in `ResponsePool.prompts`, where a prompt has left


class ResponsePool(NamedTuple):
    """Prompts whose responses continue from step to step."""

    rollout: Rollout  # the responses so far to all prompts, n to each, on the mesh
    draws: DrawStates  # the states of their draws
    # int [prompts, 3]: the row of the data, the number of the batch that the prompt came with, -1
    # if it has left the pool, and its first sample's index in that batch.
    prompts: np.ndarray

    @property
    def batches(self) -> np.ndarray:
        """Return the number of the batch that each prompt came with, -1 where it has left."""
        return self.prompts[:, 1]


def choose_prompts(
    ended: np.ndarray, batches: np.ndarray, step: int, count: int, max_staleness: int
) -> np.ndarray | None:
    """Return the places in the pool of the `count` prompts that leave it, the oldest first.

    `None` if a prompt that must leave, `max_staleness` steps after it entered, is not complete, or
    if fewer than `count` are. `ended`, bool [prompts, n], says which responses are complete,
    `batches`, int [prompts], with which batch each prompt came; `step` counts from 0.
    """
    complete = np.asarray(ended.all(1))
    # The first two batches enter in step 0, then one in each.
    entry_steps = np.maximum(batches - (BATCHES_IN_POOL - 1), 0)
    must_leave = entry_steps <= step - max_staleness
    oldest = np.argsort(batches, kind="stable")
    places = oldest[complete[oldest]][:count]
    return places if len(places) == count and complete[must_leave].all() else None


class ContinuedSource(SampleSource):
    """Continues a pool's responses, takes the prompts with complete ones and leaves the others."""

    tree_name = POOL

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Continue the pool until a step's responses are complete. See `SampleSource.take`."""
        parts, n = self._parts, self._parts.config.rollout.n
        pool = None
        if self._await_left is not None:
            with observer.phase("rollout"):
                pool = self._await_left()
        pool = _fill(parts, pool, self._batches, step)
        version = placement.place(np.int32(step), sharding.replicated(parts.mesh))
        drawn_before = placement.to_host(pool.rollout.action_mask).sum()
        with newest_weights(parts, state, observer) as engine:
            pool, places, slot_steps = self._complete(engine, pool, version, step)
            drawn = placement.to_host(pool.rollout.action_mask).sum() - drawn_before
            rows = rows_of_groups(places, n)
            selected = take_on_mesh(parts.mesh, ({"rollout": pool.rollout},), rows)
            left = pool.prompts.copy()
            left[places] = EMPTY
            self._continue_others(engine, pool._replace(prompts=left), version)
        leaving = pool.prompts[places]
        note = ""
        if step + 1 == parts.total_steps:
            note = (
                f"responses to {(left[:, 1] >= 0).sum()} prompts were unfinished after the last "
                "step; they trained nothing"
            )
        return SampledBatch(
            batch=make_batch(
                parts.training, leaving[:, 0], len(places), parts.training.max_prompt_length
            ),
            rollout=selected["rollout"],
            position=self._batches.position,
            metrics={"rollout/slot_use": drawn / slot_steps},
            addresses={
                "step": np.repeat(leaving[:, 1], n),
                "sample": np.repeat(leaving[:, 2], n) + np.arange(len(rows)) % n,
            },
            note=note,
        )

    def _complete(
        self, engine: RolloutEngine, pool: ResponsePool, version: jax.Array, step: int
    ) -> tuple[ResponsePool, np.ndarray, int]:
        """Continue the pool until a step's prompts may leave it.

        Returns the pool, their places in it, and how many tokens the slots could have drawn.
        """
        config, slot_steps = self._parts.config, 0
        while True:
            pool, taken = _continue_pool(engine, pool, version, self._parts)
            slot_steps += int(placement.to_host(taken).sum())
            ended = placement.to_host(_has_ended(pool.rollout)).reshape(-1, config.rollout.n)
            places = choose_prompts(
                ended,
                pool.batches,
                step,
                config.data.train_batch_size,
                config.rollout.max_staleness,
            )
            if places is not None:
                return pool, places, slot_steps

    def _continue_others(
        self, engine: RolloutEngine, pool: ResponsePool, version: jax.Array
    ) -> None:
        """Continue what stays: the host computes rewards meanwhile, and does not wait."""
        parts = self._parts
        if isinstance(engine, SeparateEngine):
            (rollout, draws), version = engine.send((pool.rollout, pool.draws), version)
            pool = ResponsePool(rollout, draws, pool.prompts)
            self._await_left = engine.decode_ahead(
                lambda: _continue_pool(engine, pool, version, parts)[0]
            ).result
        else:
            others = _continue_pool(engine, pool, version, parts)[0]
            self._await_left = lambda: others

    def as_tree(self, left: ResponsePool) -> dict[str, Any]:
        """Return the pool that the next step continues."""
        replicated = sharding.replicated(self._parts.mesh)
        prompts = placement.place(left.prompts.astype(np.int32), replicated)
        return _pool_rows(left.rollout, left.draws) | {"prompts": prompts}

    def read_tree(
        self, saved: dict[str, Any], checkpoints: Checkpointer, step: int
    ) -> ResponsePool | None:
        """Return the unfinished responses of a checkpoint. See `SampleSource.read_tree`."""
        parts, options = self._parts, self._parts.config.rollout
        samples = BATCHES_IN_POOL * parts.samples
        read_rollout(saved["rollout"], step)  # raises if another version wrote it
        first = np.arange(parts.config.data.train_batch_size)
        with run_on_shapes(lambda name, lowered, arguments: lowered.out_info):
            begun = _begin(parts, make_batch(parts.training, first, len(first)), 0)[:2]
        rows = saved["rollout"]["responses"].shape[0]
        fits = saved["prompts"].shape[0] * options.n == samples == rows
        fits &= _row_shapes(saved) == _row_shapes(jax.eval_shape(_pool_rows, *begun))
        former = former_values(checkpoints.restore(step, {}).meta["config"])
        # The states of the search for other strings would have another meaning.
        fits &= former["rollout.stop"] == options.stop
        if not fits:
            return None
        shapes = lay_out(saved, parts.mesh, samples, replicated="prompts")
        arrays = checkpoints.restore(step, {POOL: shapes}).arrays[POOL]
        rollout = read_rollout(arrays["rollout"], step)
        prompts = placement.to_host(arrays["prompts"])
        entered = np.where(prompts[:, 1] < 0, -1, prompts[:, 0])
        if not are_rows(rollout.prompts, np.repeat(entered, options.n), parts.training):
            return None
        return ResponsePool(rollout, DrawStates(**arrays["draws"]), prompts)


def _continue_pool(
    engine: RolloutEngine, pool: ResponsePool, version: jax.Array, parts: StepParts
) -> tuple[ResponsePool, jax.Array]:
    """Return the pool with more tokens, and how many the slots could have drawn."""
    assert isinstance(engine, ContinuingEngine), "the options require it"
    rollout, draws, taken = engine.continue_responses(
        pool.rollout, pool.draws, version, parts.sampling
    )
    return ResponsePool(rollout, draws, pool.prompts), taken


def _fill(
    parts: StepParts, pool: ResponsePool | None, batches: PromptBatches, step: int
) -> ResponsePool:
    count = parts.config.data.train_batch_size
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
        rows_of_groups(places, parts.config.rollout.n),
    )
    prompts = np.concatenate([x.prompts for x in pools])[places]
    return ResponsePool(arrays["rollout"], arrays["draws"], prompts)


def _begin(parts: StepParts, batch: PromptBatch, number: int) -> ResponsePool:
    n = parts.config.rollout.n
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


@program(static_argnames=("longest", "layout"))
def _begin_on_mesh(
    prompts: Prompts, key: jax.Array, longest: int, layout: NamedSharding
) -> tuple[Rollout, DrawStates]:
    draws = begin_draws(sample_keys(key, jnp.arange(len(prompts.lengths))))
    begun = begin_responses(prompts, longest), draws
    return jax.lax.with_sharding_constraint(begun, layout)


_has_ended = CompiledProgram(has_ended)


def _pool_rows(rollout: Rollout, draws: DrawStates) -> dict[str, Any]:
    return {"rollout": rollout_arrays(rollout), "draws": draws._asdict()}


def _row_shapes(tree: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(x.shape[1:])
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    return {name: shape for name, shape in shapes.items() if name != "prompts"}
