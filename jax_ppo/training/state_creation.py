"""Creation of the train state, from model checkpoints or from a checkpoint of the run."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jax_ppo.config.schema import Actor, Config, Critic
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta.encoder import Deberta
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.peft import load_adapters
from jax_ppo.models.lora import Lora, init_adapters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.kl_schedule import first_control, resumed_control
from jax_ppo.training.networks import Folders, Networks, actor_head, critic_head
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import TrainState, assemble_state
from jax_ppo.training.state_shapes import param_dtype, role_optimizer, role_options, state_shapes
from jax_ppo.types import Params

# Of the random numbers of new adapters.
ADAPTER_STREAMS = {"actor": Stream.ACTOR_ADAPTERS, "critic": Stream.CRITIC_ADAPTERS}

# Returns, for the name of a tree, the callback (tensors read, tensors in all) of its loader.
LoadingProgress = Callable[[str], Callable[[int, int], None] | None]


def create_state(
    config: Config,
    nets: Networks,
    folders: Folders,
    mesh: Mesh,
    progress: LoadingProgress,
    trained: dict[str, Any] | None = None,
    step: int = 0,
) -> TrainState:
    """Return the state to start from, each tree read directly into its shards.

    Args:
      config: the options.
      nets: each role's model.
      folders: each role's checkpoint.
      mesh: the mesh that the state is placed on.
      progress: returns, for the name of a tree, the callback of its loader.
      trained: arrays from a checkpoint in the structure of `trained_shapes`; `None` reads the
        roles' folders.
      step: the number of completed steps, from the same checkpoint.
    """
    # Each loader reads only the parts of a tensor that its devices hold.
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(config, nets, mesh))
    if trained is None:
        trained = _create_trained(config, nets, folders, shardings, progress)
    else:
        control = resumed_control(config.algorithm.kl_ctrl, trained["control"])
        trained = {**trained, "control": control}
    frozen_dtype = jnp.dtype(config.model.dtype)
    reference = reward = None
    if config.keeps_reference:
        reference = load_checkpoint(
            folders.reference or folders.actor,
            nets.actor.architecture,
            shardings.reference,
            frozen_dtype,
            "lm",
            progress("base" if config.has_adapters else "reference"),
        )
    if nets.reward is not None:
        reward = _load_role(
            "reward model",
            nets.reward,
            folders.reward,
            shardings.reward,
            head="reward",
            dtype=frozen_dtype,
            seed=config.seed,
            progress=progress,
        )
    return assemble_state(
        trained,
        step=placement.place(np.int32(step), sharding.replicated(mesh)),
        reference=reference,
        reward=reward,
    )


def create_policy_state(
    config: Config, nets: Networks, folders: Folders, mesh: Mesh, progress: LoadingProgress
) -> TrainState:
    """Return a state to sample and score with: no critic, no optimizers.

    The arguments are those of `create_state`.
    """
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(config, nets, mesh))
    actor = _load_role(
        "actor",
        nets.actor,
        _actor_folder(config, folders),
        shardings.actor,
        head="lm",
        dtype=jnp.float32,
        seed=config.seed,
        progress=progress,
    )
    control = first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    trained = {
        "actor": actor,
        "optimizer": {"actor": None},
        "control": placement.place(jax.device_get(control), shardings.step),
    }
    return create_state(config, nets, folders, mesh, progress, trained=trained)


def _create_trained(
    config: Config,
    nets: Networks,
    folders: Folders,
    shardings: TrainState,
    progress: LoadingProgress,
) -> dict[str, Any]:
    """Return everything that training changes, for a run that starts at step 0."""
    load = functools.partial(_load_role, seed=config.seed, progress=progress)
    actor_folder = _actor_folder(config, folders)
    params = {
        "actor": load(
            "actor",
            nets.actor,
            actor_folder,
            shardings.actor,
            head=actor_head(config.shares_trunk),
            dtype=param_dtype(config, "actor"),
        )
    }
    if nets.critic:
        critic_folder = folders.critic
        if folders.critic_starts_as_actor:
            critic_folder = actor_folder
        params["critic"] = load(
            "critic",
            nets.critic,
            critic_folder,
            shardings.critic,
            head=critic_head(config.critic, folders.critic),
            dtype=param_dtype(config, "critic"),
        )
    optimizer_shardings = {
        "actor": shardings.actor_optimizer,
        "critic": shardings.critic_optimizer,
    }
    # Optimizer states are created in their shards: they may fit no single device.
    optimizers = {
        role: _create_optimizer_state(options, params[role], optimizer_shardings[role])
        for role, options in role_options(config).items()
        if role in params
    }
    control = first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    return {
        **params,
        "optimizer": optimizers,
        "control": placement.place(jax.device_get(control), shardings.step),
    }


def _actor_folder(config: Config, folders: Folders) -> Path | None:
    """Return the folder of what is trained of the actor; `None` for new adapters."""
    # With adapters `folders.actor` is their base.
    if config.has_adapters:
        return folders.adapters
    return folders.actor


def _create_optimizer_state(options: Actor | Critic, params: Params, shardings: Any) -> Any:
    def init(params: Params) -> optax.OptState:
        return role_optimizer(options).init(placement.to_device(params))

    return jax.jit(init, out_shardings=shardings)(params)


def _load_role(
    role: str,
    net: Transformer | Deberta,
    folder: Path | None,
    shardings: Params,
    *,
    head: str,
    dtype: jnp.dtype,
    seed: int,
    progress: LoadingProgress,
) -> Params:
    """Read a role's parameters or adapters, or create new adapters if there is no folder."""
    if isinstance(net, Deberta) or net.lora is None:
        assert folder is not None, f"the {role} has no checkpoint"
        return load_checkpoint(folder, net.architecture, shardings, dtype, head, progress(role))
    if folder is None:
        return _new_adapters(role, net.architecture, net.lora, shardings, head, dtype, seed)
    # With adapters the progress is named apart from that of the base.
    report = progress(f"{role}'s adapters")
    return load_adapters(folder, net.architecture, net.lora, shardings, dtype, head, report)


def _new_adapters(
    role: str,
    architecture: Architecture,
    lora: Lora,
    shardings: Params,
    head: str,
    dtype: jnp.dtype,
    seed: int,
) -> Params:
    def init() -> Params:
        # A stream per role, so that the critic's adapters are not a copy of the actor's.
        key = jax.random.fold_in(jax.random.key(seed), ADAPTER_STREAMS[role])
        adapters = init_adapters(architecture, lora, key, head)
        return jax.tree.map(lambda x: x.astype(dtype), adapters)

    return jax.jit(init, out_shardings=shardings)()
