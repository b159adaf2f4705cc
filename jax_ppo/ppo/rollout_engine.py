"""The rollout engine of a run and the options that it samples with."""

from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import Mesh

from jax_ppo.config.parsing import parse_strings
from jax_ppo.config.rollout_options import Sampling
from jax_ppo.config.schema import RolloutOptions
from jax_ppo.data.tokenizer import token_bytes
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.engine import Environment, RolloutEngine, SamplingOptions
from jax_ppo.sampler.other_mesh import OtherMeshEngine, SeparateEngine
from jax_ppo.sampler.text_search import TextSearch, search_for
from jax_ppo.types import Params


def make_engine(
    engine_class: Callable[..., RolloutEngine],
    actor: Transformer,
    params: Params,
    mesh: Mesh,
    rollout_mesh: Mesh,
) -> RolloutEngine:
    """Return the engine that samples from the actor, on a separate mesh if it has one.

    `params` has the shapes of the parameters that it samples with, which `update_weights` brings;
    `mesh` is the run's, `rollout_mesh` the one to decode on.
    """
    if not meshes.shares_devices(mesh, rollout_mesh):
        built_in = BuiltInEngine(rollout_mesh, actor, params, trained_on=mesh)
        return SeparateEngine(built_in, mesh=rollout_mesh, run_mesh=mesh)
    engine = engine_class(mesh=rollout_mesh, actor=actor, params=params)
    if rollout_mesh == mesh:
        return engine
    return OtherMeshEngine(engine, mesh=rollout_mesh, run_mesh=mesh)


def make_stop_search(options: RolloutOptions, tokenizer: Any, vocab_size: int) -> TextSearch | None:
    """Return the search for `rollout.stop`, `None` if it is unset.

    Raise `UserError` if strings cannot be searched for with this tokenizer.
    """
    strings = parse_strings(options.stop)
    if not strings:
        return None
    tokens = token_bytes(tokenizer, f"config.rollout.stop={strings}")[:vocab_size]
    return search_for(strings, tokens, vocab_size)


def sampling_options(
    rollout: RolloutOptions,
    options: Sampling,
    max_response_length: int,
    eos_ids: Iterable[int | None],
    stop: TextSearch | None = None,
    environment: Environment | None = None,
) -> SamplingOptions:
    """Return the engine's options for `rollout` or `rollout.val_kwargs`.

    Of `eos_ids`, which end a response, repeated ones and `None` are left out; `stop` is the result
    of `make_stop_search`.
    """
    partial_length = None
    if rollout.max_staleness > 1:
        partial_length = rollout.partial_length or max(1, max_response_length // 8)
    return SamplingOptions(
        max_response_length=max_response_length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        n=options.n,
        eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
        slots=rollout.max_num_seqs or None,
        partial_length=partial_length,
        min_new_tokens=rollout.min_new_tokens,
        stop=stop,
        environment=environment,
        max_turns=rollout.multi_turn.max_assistant_turns,
        max_turn_length=rollout.multi_turn.max_turn_length,
    )
