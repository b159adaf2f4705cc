"""Creation of the train state, from model checkpoints or from a checkpoint of the run."""

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
from jax_ppo.training.networks import Folders, Networks
from jax_ppo.training.roles import ModelRole, find_role, frozen_roles, trained_roles
from jax_ppo.training.state import TrainState, assemble_state
from jax_ppo.training.state_shapes import param_dtype, role_optimizer, state_shapes
from jax_ppo.types import Params

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
    frozen = {
        role.name: _load_role(
            role,
            role.model(nets),
            role.starts_from(config, folders),
            getattr(shardings, role.name),
            head=role.loaded_head(config, folders),
            dtype=jnp.dtype(config.model.dtype),
            seed=config.seed,
            progress=progress,
        )
        for role in frozen_roles()
        if role.is_present(config, nets)
    }
    return assemble_state(
        trained, step=placement.place(np.int32(step), sharding.replicated(mesh)), frozen=frozen
    )


def create_policy_state(
    config: Config, nets: Networks, folders: Folders, mesh: Mesh, progress: LoadingProgress
) -> TrainState:
    """Return a state to sample and score with: no critic, no optimizers.

    The arguments are those of `create_state`.
    """
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(config, nets, mesh))
    role = find_role("actor")
    actor = _load_role(
        role,
        nets.actor,
        role.starts_from(config, folders),
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
    params = {}
    optimizers = {}
    for role in trained_roles():
        if not role.is_present(config, nets):
            continue
        options = role.options(config)
        params[role.name] = _load_role(
            role,
            role.model(nets),
            role.starts_from(config, folders),
            getattr(shardings, role.name),
            head=role.loaded_head(config, folders),
            dtype=param_dtype(options),
            seed=config.seed,
            progress=progress,
        )
        # Optimizer states are created in their shards: they may fit no single device.
        optimizers[role.name] = _create_optimizer_state(
            options, params[role.name], getattr(shardings, role.optimizer)
        )
    control = first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    return {
        **params,
        "optimizer": optimizers,
        "control": placement.place(jax.device_get(control), shardings.step),
    }


def _create_optimizer_state(options: Actor | Critic, params: Params, shardings: Any) -> Any:
    def init(params: Params) -> optax.OptState:
        return role_optimizer(options).init(placement.to_device(params))

    return jax.jit(init, out_shardings=shardings)(params)


def _load_role(
    role: ModelRole,
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
    if isinstance(net, Deberta) or net.lora is None or role.holds_base:
        assert folder is not None, f"the {role.title} has no checkpoint"
        # Where others have adapters, this is the base of them.
        name = role.title if getattr(net, "lora", None) is None else "base"
        return load_checkpoint(folder, net.architecture, shardings, dtype, head, progress(name))
    if folder is None:
        return _new_adapters(role, net.architecture, net.lora, shardings, head, dtype, seed)
    # With adapters the progress is named apart from that of the base.
    report = progress(f"{role.title}'s adapters")
    return load_adapters(folder, net.architecture, net.lora, shardings, dtype, head, report)


def _new_adapters(
    role: ModelRole,
    architecture: Architecture,
    lora: Lora,
    shardings: Params,
    head: str,
    dtype: jnp.dtype,
    seed: int,
) -> Params:
    stream = role.adapter_stream
    assert stream is not None, f"the {role.title} cannot start with new adapters"

    def init() -> Params:
        # A stream per role, so that the critic's adapters are not a copy of the actor's.
        key = jax.random.fold_in(jax.random.key(seed), stream)
        adapters = init_adapters(architecture, lora, key, head)
        return jax.tree.map(lambda x: x.astype(dtype), adapters)

    return jax.jit(init, out_shardings=shardings)()
