"""The built-in rollout engine: the decode loop of `decode_loop.py` on the run's own mesh."""

import threading
from collections.abc import Callable
from typing import Any

import jax

from jax_ppo.config import plugins
from jax_ppo.models.transformer import Transformer
from jax_ppo.registries import ROLLOUT_ENGINES
from jax_ppo.sampler.continuation import DrawStates, continuation_program
from jax_ppo.sampler.decode_loop import sampler_program
from jax_ppo.sampler.decoding_weights import WeightPreparation
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.types import Params, Prompts, Rollout


def resolve_engine(name: str) -> Callable[..., RolloutEngine]:
    """Return the class that `rollout.engine` names, to be called with mesh, actor and params.

    Raise `UserError` if a user-defined class cannot be imported or does not take these arguments.
    """
    if name in ROLLOUT_ENGINES:
        return ROLLOUT_ENGINES[name].function
    return plugins.load_plugin(name, "rollout.engine", ("mesh", "actor", "params"), by_name=True)


class BuiltInEngine(RolloutEngine):
    """`RolloutEngine` on the devices of the training mesh.

    The weights are unrolled, cast and laid out for decoding once per `update_weights`; all options
    sample from that one copy. Each `SamplingOptions` has one compiled program per prompt shape.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        actor: Transformer,
        params: Params,
        trained_on: jax.sharding.Mesh | None = None,
    ) -> None:
        """Prepare the programs; nothing is compiled yet.

        `actor` is the policy's model as it is trained, `params` the shapes that `update_weights`
        will get, and `trained_on` their mesh, if `mesh` has none of its devices.
        """
        self._mesh = mesh
        # The actor's model in the form that decodes: layers unrolled, with a cache.
        self._model = actor.clone(unrolled=True, remat=False)
        self._prepare_weights = WeightPreparation(mesh, actor, params, trained_on)
        self._programs: dict[tuple[Callable[..., Any], SamplingOptions], Any] = {}
        self._lock = threading.Lock()  # the programs are compiled ahead in a thread
        self._weights: Params | None = None

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
        # Without an index, 0 is a constant of the program: nothing is sent from the host.
        index = () if first_sample_index is None else (first_sample_index,)
        return self._program(sampler_program, options)(self._weights, prompts, key, *index)

    def continue_responses(
        self, rollout: Rollout, draws: DrawStates, version: jax.Array, options: SamplingOptions
    ) -> tuple[Rollout, DrawStates, jax.Array]:
        """Dispatch `continuation.continue_responses` with the weights of the last update.

        `rollout` and `draws` come from the call before, or `begin_responses` and `begin_draws`.
        Return responses and states afterwards, and int32 [queues], as `Rollout.slot_steps`.
        """
        program = self._program(continuation_program, options)
        return program(self._weights, rollout, draws, version)

    def release_weights(self) -> None:
        """Drop the decode copy of the weights; programs in flight keep it until they end."""
        self._weights = None

    stop = release_weights

    def _program(self, build: Callable[..., Any], options: SamplingOptions) -> Any:
        """Return what `build` makes for these options, the same program to every caller."""
        if self._weights is None:
            raise RuntimeError("update_weights comes before anything is sampled")
        with self._lock:
            if (build, options) not in self._programs:
                self._programs[build, options] = build(self._model, options)
            return self._programs[build, options]
