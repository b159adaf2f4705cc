"""A rollout engine on a mesh of another shape than the training's, over the same devices.

Training splits parameters to fit in memory (`fsdp`), decoding reads every weight per token and may
be faster with tensor parallelism (`model`). The engine lays the weights out for its own mesh once
per step; prompts and responses, which are small, move between the meshes in each call.
"""

import dataclasses
from collections.abc import Generator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jax_ppo.runtime import sharding
from jax_ppo.runtime.parallelism.vocabulary import embedding_layouts
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.types import Params, Prompts, Rollout


class OtherMeshEngine:
    """`RolloutEngine` that runs another engine with that engine's mesh in the context."""

    def __init__(self, engine: RolloutEngine, mesh: Mesh, run_mesh: Mesh) -> None:
        """Wrap an engine that was made for `mesh`.

        Arguments come from `run_mesh`, which has the same devices in the same order, and rollouts
        return to it.
        """
        self._engine = engine
        self._mesh = mesh
        self._run_mesh = run_mesh

    def start(self) -> None:
        """Start the engine."""
        self._engine.start()

    def update_weights(self, params: Params) -> None:
        """Lay the weights out for the other mesh. See `RolloutEngine.update_weights`."""
        with jax.set_mesh(self._mesh):
            self._engine.update_weights(self._move_embeddings(params))

    def generate(
        self,
        prompts: Prompts,
        key: jax.Array,
        options: SamplingOptions,
        first_sample_index: int | None = None,
    ) -> Rollout:
        """Decode on the other mesh. See `RolloutEngine.generate`."""
        arguments = self._to_mesh(prompts, key)
        with jax.set_mesh(self._mesh):
            rollout = self._engine.generate(*arguments, options, first_sample_index)
        return self._to_run_mesh(rollout)

    def release_weights(self) -> None:
        """Free the engine's weights."""
        self._engine.release_weights()

    def stop(self) -> None:
        """Stop the engine."""
        self._engine.stop()

    def precompile(
        self, params: Params, prompts: Prompts, key: jax.Array, options: SamplingOptions
    ) -> Generator[str, None, Rollout]:
        """Compile on the other mesh. See `RolloutEngine.precompile`."""
        params = self._move_embeddings(params)
        programs = self._engine.precompile(params, *self._to_mesh(prompts, key), options)
        while True:
            # Not around the yield: the caller's code between two programs has its own mesh.
            with jax.set_mesh(self._mesh):
                try:
                    name = next(programs)
                except StopIteration as end:
                    rollout: Rollout = end.value
                    break
            yield name
        return self._to_run_mesh(rollout)

    def _move_embeddings(self, params: Params) -> Params:
        layouts = embedding_layouts(self._mesh, params)
        return jax.tree.map(
            lambda x, layout: x if layout is None else _move(x, layout), params, layouts
        )

    def _to_mesh(self, prompts: Prompts, key: jax.Array) -> tuple[Prompts, jax.Array]:
        return (
            _move(prompts, sharding.batch_rows(self._mesh, prompts.lengths.shape[0])),
            _move(key, sharding.replicated(self._mesh)),
        )

    def _to_run_mesh(self, rollout: Rollout) -> Rollout:
        rows = sharding.batch_rows(self._run_mesh, rollout.lengths.shape[0])
        moved = _move(dataclasses.replace(rollout, slot_steps=None), rows)
        # One entry per decoder queue, of which the run's mesh may have more or fewer.
        slot_steps = _move(rollout.slot_steps, sharding.replicated(self._run_mesh))
        return dataclasses.replace(moved, slot_steps=slot_steps)


def _move(tree: Any, layout: NamedSharding) -> Any:
    """Return arrays laid out anew, or shapes with the new layout."""

    def move(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
        return jax.device_put(x, layout)

    return jax.tree.map(move, tree)
