"""The rollout engine of a run and the options that it samples with."""

from collections.abc import Callable, Iterable

from jax.sharding import Mesh

from jax_ppo.config.schema import Config, Sampling
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.sampler.other_mesh import OtherMeshEngine
from jax_ppo.training.networks import Networks
from jax_ppo.training.state import policy_params, state_shapes


def make_engine(
    engine_class: Callable[..., RolloutEngine],
    config: Config,
    nets: Networks,
    mesh: Mesh,
    rollout_mesh: Mesh,
) -> RolloutEngine:
    """Return the engine that samples from the actor, on a mesh of its own if it has one.

    Args:
      engine_class: of the engine that `rollout.engine` names.
      config: all options.
      nets: each role's model.
      mesh: the run's mesh.
      rollout_mesh: the mesh to decode on.
    """
    # The engine gets shapes only; `update_weights` brings the weights at each step.
    params = policy_params(nets, state_shapes(config, nets, mesh))
    engine = engine_class(mesh=rollout_mesh, actor=nets.actor, params=params)
    if rollout_mesh != mesh:
        return OtherMeshEngine(engine, mesh=rollout_mesh, run_mesh=mesh)
    return engine


def sampling_options(
    config: Config, options: Sampling, eos_ids: Iterable[int | None]
) -> SamplingOptions:
    """Return the engine's options for `rollout` or `rollout.val_kwargs`.

    Args:
      config: all options.
      options: the section.
      eos_ids: ids that end a response; repeated ones and `None` are left out.
    """
    return SamplingOptions(
        max_response_length=config.data.max_response_length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        n=options.n,
        eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
        slots=config.rollout.max_num_seqs or None,
        stage_length=config.rollout.stage_length,
    )
