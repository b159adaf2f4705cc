"""The built-in rollout engine: the decode loop of `generate.py` on the run's own mesh."""

import dataclasses
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_ppo.config import plugins
from jax_ppo.models.transformer import Transformer
from jax_ppo.registries import ROLLOUT_ENGINES
from jax_ppo.runtime import compilation, sharding
from jax_ppo.runtime.parallelism.rows import split_rows
from jax_ppo.sampler.continuation import Continuation, DrawStates
from jax_ppo.sampler.decoding_weights import WeightPreparation
from jax_ppo.sampler.drafts import DraftCompletion
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.sampler.generate import Sampler
from jax_ppo.types import Params, Prompts, Rollout

_Kind = TypeVar("_Kind", Sampler, Continuation, DraftCompletion)


def resolve_engine(name: str) -> Callable[..., RolloutEngine]:
    """Return the class that `rollout.engine` names.

    It is called with `mesh`, `actor` and `params`; see `registries.RolloutEngineEntry`.

    Raises:
      UserError: a user-defined class cannot be imported or does not take these arguments.
    """
    if name in ROLLOUT_ENGINES:
        return ROLLOUT_ENGINES[name].function
    return plugins.load_plugin(name, "rollout.engine", ("mesh", "actor", "params"), by_name=True)


class BuiltInEngine:
    """`RolloutEngine` on the devices of the training mesh.

    The weights are unrolled, cast and laid out for decoding once per `update_weights`; all options
    sample from that one copy. Each `SamplingOptions` has one compiled program per prompt shape.
    """

    def __init__(self, mesh: jax.sharding.Mesh, actor: Transformer, params: Params) -> None:
        """Prepare the programs; nothing is compiled yet.

        Args:
          mesh: the run's mesh.
          actor: the policy's model, as it is trained.
          params: shapes of the tree that `update_weights` will get.
        """
        self._mesh = mesh
        # The actor's model in the form that decodes: layers unrolled, with a cache.
        self._model = Transformer(
            actor.architecture,
            actor.dtype,
            unrolled=True,
            decoding=actor.decoding,
            quantized=actor.quantized,
            lora=actor.lora,
        )
        self._prepare_weights = WeightPreparation(mesh, actor, params)
        self._programs: dict[tuple[type, SamplingOptions], Any] = {}
        self._lock = threading.Lock()  # the programs are compiled ahead in a thread
        self._weights: Params | None = None

    def start(self) -> None:
        """Do nothing: the engine runs on the mesh of the training."""

    def update_weights(self, params: Params) -> None:
        """Reshard the weights for decoding. See `RolloutEngine.update_weights`."""
        self._weights = self._prepare_weights(params)

    def generate(
        self,
        prompts: Prompts,
        key: jax.Array,
        options: SamplingOptions,
        first_sample_index: int | None = None,
    ) -> Rollout:
        """Dispatch the decode loop and return its rollout. See `RolloutEngine.generate`."""
        if self._weights is None:
            raise RuntimeError("generate was called before update_weights")
        return self._program(Sampler, options)(self._weights, prompts, key, first_sample_index)

    def continue_responses(
        self, rollout: Rollout, draws: DrawStates, version: jax.Array, options: SamplingOptions
    ) -> tuple[Rollout, DrawStates, jax.Array]:
        """Dispatch `continue_responses` with the weights of the last update.

        Args:
          rollout: the responses so far, as returned here or by `begin_responses`.
          draws: the states of their draws.
          version: int32, the step that began with these weights.
          options: how to sample.

        Returns:
          (responses and states afterwards; int32 [queues], as `Rollout.slot_steps`).
        """
        if self._weights is None:
            raise RuntimeError("continue_responses was called before update_weights")
        program = self._program(Continuation, options).program
        continued, draws = program(self._weights, rollout, draws, version)
        assert continued.slot_steps is not None
        return dataclasses.replace(continued, slot_steps=None), draws, continued.slot_steps

    def complete_drafts(
        self, drafts: Rollout, key: jax.Array, options: SamplingOptions
    ) -> tuple[Rollout, jax.Array]:
        """Dispatch `complete_drafts` with the weights of the last update.

        Args:
          drafts: what `generate` returned for the same key and options, with other weights.
          key: the base key of this batch's random numbers.
          options: how to sample.

        Returns:
          (what `generate` would return; int32 [B], the tokens of each that its draft had).
        """
        if self._weights is None:
            raise RuntimeError("complete_drafts was called before update_weights")
        drafts = dataclasses.replace(drafts, slot_steps=None)
        return self._program(DraftCompletion, options).program(self._weights, drafts, key)

    def release_weights(self) -> None:
        """Drop the decode copy of the weights; programs in flight keep it until they end."""
        self._weights = None

    def stop(self) -> None:
        """Drop the weights."""
        self.release_weights()

    def precompile(
        self, params: Params, prompts: Prompts, key: jax.Array, options: SamplingOptions
    ) -> Generator[str, None, Rollout]:
        """Compile the resharding and the decode loop. See `RolloutEngine.precompile`."""
        weights = self._prepare_weights.compile(params)
        yield "prepare_weights"
        program = self._program(Sampler, options).program
        rollout: Rollout = compilation.compile_ahead(program, weights, prompts, key)
        yield "sample"
        return rollout

    def precompile_continuation(
        self, params: Params, rollout: Rollout, draws: DrawStates, options: SamplingOptions
    ) -> Generator[str, None, Rollout]:
        """Compile the resharding and `continue_responses`, as `precompile` does."""
        weights = self._prepare_weights.compile(params)
        yield "prepare_weights"
        version = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(self._mesh))
        program = self._program(Continuation, options).program
        continued, _ = compilation.compile_ahead(program, weights, rollout, draws, version)
        yield "sample"
        return dataclasses.replace(continued, slot_steps=None)

    def precompile_drafts(
        self, params: Params, drafts: Rollout, key: jax.Array, options: SamplingOptions
    ) -> Rollout:
        """Compile `complete_drafts` for what `precompile` returned; return the rollout's shapes."""
        weights = self._prepare_weights.compile(params)
        drafts = dataclasses.replace(drafts, slot_steps=None)
        program = self._program(DraftCompletion, options).program
        rollout, _ = compilation.compile_ahead(program, weights, drafts, key)
        return rollout

    def _program(self, kind: type[_Kind], options: SamplingOptions) -> _Kind:
        """Return the program of this kind and these options, the same one to every caller."""
        with self._lock:
            if (kind, options) not in self._programs:
                self._programs[kind, options] = kind(self._model, options, split_rows)
            program: _Kind = self._programs[kind, options]
            return program
