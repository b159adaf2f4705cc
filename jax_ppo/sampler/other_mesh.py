"""A rollout engine on another mesh than the training's, over the same devices or over others.

Training splits parameters to fit in memory (`fsdp`), decoding reads every weight per token and may
be faster with tensor parallelism (`model`). Weights are laid out for the engine's mesh once per
step; prompts and responses, which are small, move in each call.
"""

import concurrent.futures
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.compiled_programs import runs_on_shapes
from jax_ppo.runtime.parallelism.vocabulary import embedding_layouts
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.continuation import DrawStates, begin_responses
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.types import Params, Prompts, Rollout

T = TypeVar("T")


class OtherMeshEngine(RolloutEngine):
    """`RolloutEngine` that runs another engine with that engine's mesh in the context."""

    def __init__(self, engine: RolloutEngine, mesh: Mesh, run_mesh: Mesh) -> None:
        """Wrap an engine that was made for `mesh`; arguments and rollouts are on `run_mesh`.

        The meshes have the same devices in the same order, or none in common (`SeparateEngine`).
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
        arguments = self.send(prompts, key)
        with jax.set_mesh(self._mesh):
            rollout = self._engine.generate(*arguments, options, first_sample_index)
        moved = _move_rows(dataclasses.replace(rollout, slot_steps=None), self._run_mesh)
        # One entry per decoder queue, of which the run's mesh may have more or fewer.
        slot_steps = _move(rollout.slot_steps, sharding.replicated(self._run_mesh))
        return dataclasses.replace(moved, slot_steps=slot_steps)

    def continue_responses(
        self, rollout: Rollout, draws: DrawStates, version: jax.Array, options: SamplingOptions
    ) -> tuple[Rollout, DrawStates, jax.Array]:
        """Decode on the other mesh. See `BuiltInEngine.continue_responses`."""
        moved, version = self.send((rollout, draws), version)
        with jax.set_mesh(self._mesh):
            assert isinstance(self._engine, BuiltInEngine), "the options require it"
            continued = self._engine.continue_responses(*moved, version, options)
        rollout, draws = _move_rows(continued[:2], self._run_mesh)
        return rollout, draws, _move(continued[2], sharding.replicated(self._run_mesh))

    def release_weights(self) -> None:
        """Free the engine's weights."""
        self._engine.release_weights()

    def stop(self) -> None:
        """Stop the engine."""
        self._engine.stop()

    def _move_embeddings(self, params: Params) -> Params:
        layouts = embedding_layouts(self._mesh, params)
        return jax.tree.map(
            lambda x, layout: x if layout is None else _move(x, layout), params, layouts
        )

    def send(self, per_row: T, whole: jax.Array) -> tuple[T, jax.Array]:
        """Copy arguments to the devices that decode."""
        return _move_rows(per_row, self._mesh), _move(whole, sharding.replicated(self._mesh))


class SeparateEngine(OtherMeshEngine):
    """`OtherMeshEngine` on devices that only decode, while the others learn."""

    def __init__(self, engine: BuiltInEngine, mesh: Mesh, run_mesh: Mesh) -> None:
        """Take the arguments of `OtherMeshEngine`; no device is in both meshes."""
        super().__init__(engine, mesh, run_mesh)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "decoding")
        self._ahead: concurrent.futures.Future[Any] | None = None
        # JAX runs a process's programs for several CPUs one after another. If another process began
        # theirs in another order, both would wait forever.
        self._waits = (
            mesh.devices.flat[0].platform == "cpu"
            and mesh.is_multi_process
            and min(len(mesh.local_devices), len(run_mesh.local_devices)) > 1
        )

    def update_weights(self, params: Params) -> None:
        """Wait for what is decoded ahead; copy the weights, and wait for the copy."""
        if self._ahead is not None:
            concurrent.futures.wait([self._ahead])
        self._engine.release_weights()  # these devices need not have room for two copies
        super().update_weights(params)

    def decode_ahead(self, decode: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Call `decode`, which calls this engine, in a thread, and return its future result.

        GPUs and CPUs dispatch a loop by running it: without a thread the caller could not dispatch
        an update meanwhile. `decode` must run programs on this engine's devices only, so give it
        what `send` returns: programs on the run's mesh would wait for that update, or start in
        another order than in another process.
        """
        if runs_on_shapes():
            shapes: concurrent.futures.Future[T] = concurrent.futures.Future()
            shapes.set_result(decode())
            return shapes
        self._ahead = self._thread.submit(lambda: jax.block_until_ready(decode()))
        if self._waits:
            concurrent.futures.wait([self._ahead])
        return self._ahead

    def release_weights(self) -> None:
        """Keep the weights: nothing else needs the memory, and decoding may be reading them."""

    def stop(self) -> None:
        """Wait for what is decoded ahead, and drop the weights."""
        self._thread.shutdown()
        super().stop()

    def _move_embeddings(self, params: Params) -> Params:
        return params  # the programs of `WeightPreparation` run on the mesh of the parameters


def _move_rows(per_row: T, mesh: Mesh) -> T:
    rows = jax.tree.leaves(per_row)[0].shape[0]
    return _move(per_row, sharding.batch_rows(mesh, rows))


def _move(tree: Any, layout: NamedSharding) -> Any:
    return jax.tree.map(lambda x: placement.copy_rows(x, layout), tree)


# Engines whose responses continue from step to step.
ContinuingEngine = BuiltInEngine | OtherMeshEngine


def engine_on_shapes(engine: RolloutEngine, mesh: Mesh) -> RolloutEngine:
    """Return an engine that takes shapes: with the same programs if it runs compiled ones."""
    if not isinstance(engine, ContinuingEngine):
        return _RolloutShapes(mesh)
    engine = copy.copy(engine)  # the other one keeps its weights
    if isinstance(engine, OtherMeshEngine):
        engine._engine = engine_on_shapes(engine._engine, engine._mesh)
    return engine


class _RolloutShapes(RolloutEngine):
    """Stands in for an engine that compiles nothing: returns the shapes of its rollouts."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def update_weights(self, params: Params) -> None:
        """Do nothing: the shapes of rollouts do not depend on the weights."""

    def generate(
        self,
        prompts: Prompts,
        key: jax.Array,
        options: SamplingOptions,
        first_sample_index: int | None = None,
    ) -> Rollout:
        rows, P = prompts.tokens.shape
        B = rows * options.n
        empty = Prompts(tokens=np.zeros((B, P), np.int32), lengths=np.zeros(B, np.int32))
        rollout = begin_responses(empty, options.max_response_length)
        layout = sharding.batch_rows(self._mesh, B)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
            dataclasses.replace(rollout, versions=None),
        )
