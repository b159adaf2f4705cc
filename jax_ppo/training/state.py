"""The train state: every parameter tree on the mesh, with its optimizer state, and its creation."""

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
from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta.encoder import Deberta, init_deberta_params
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.peft import load_adapters
from jax_ppo.models.lora import Lora, init_adapters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.kl_schedule import first_control, resumed_control
from jax_ppo.training.networks import Folders, Networks, actor_head, full_parameters
from jax_ppo.training.optimizer import make_optimizer
from jax_ppo.types import Control, Params, pytree

# Streams of random numbers for new adapters. The sampler's streams have lower numbers.
ADAPTER_STREAMS = {"actor": 3, "critic": 4}

# Returns, for the name of a tree, the callback (tensors read, tensors in all) of its loader.
LoadingProgress = Callable[[str], Callable[[int, int], None] | None]


@pytree
class TrainState:
    """Everything on the mesh that outlives a step, as one pytree.

    Attributes:
      step: int32 scalar, the number of completed steps.
      actor: the policy's trained parameters, in `actor.optim.param_dtype`; with `model.lora`
        adapters (`models/lora.py`).
      critic: the critic's trained parameters, in `critic.optim.param_dtype`; with `model.lora`
        adapters and a head. `None` if advantages need no critic, or if it is a head of the actor's
        (`critic.shared_trunk`).
      reference: frozen copy of the first actor in the computation dtype; `None` if nothing needs
        it. With `model.lora` the bare base, the one copy that all adapters apply to.
      reward: the frozen reward model's parameters, or adapters on the same base; `None` without a
        reward model.
      actor_optimizer: optax state.
      critic_optimizer: optax state; `None` without a critic of its own.
      control: the KL coefficient and running moments for the coming step.
    """

    step: Any
    actor: Any
    critic: Any
    reference: Any
    reward: Any
    actor_optimizer: Any
    critic_optimizer: Any
    control: Control


def trained_shapes(config: Config, nets: Networks, mesh: Mesh) -> dict[str, Any]:
    """Return shapes and shardings of everything that training changes, as a checkpoint names it.

    Returns:
      Trees of `jax.ShapeDtypeStruct`, in the structure of `trained_trees`.
    """
    # Shapes come from tracing the initialization: nothing is allocated.
    params = {"actor": _init_shapes(nets.actor, actor_head(config.shares_trunk))}
    if nets.critic:
        params["critic"] = _init_shapes(nets.critic, "scalar")
    params = {
        role: _with_dtype(shapes, _param_dtype(config, role)) for role, shapes in params.items()
    }
    optimizers = {
        role: jax.eval_shape(_role_optimizer(options).init, params[role])
        for role, options in _role_options(config).items()
        if role in params
    }
    # The control is a few scalars, which every device has.
    control = jax.eval_shape(
        lambda: first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    )
    replicated = sharding.replicated(mesh)
    trained = _with_train_layout(params | {"optimizer": optimizers}, mesh)
    for role, options in _role_options(config).items():
        if role in params and options.optimizer_offload:
            trained["optimizer"][role] = _in_host_memory(trained["optimizer"][role], mesh)
    if "critic" in params and config.critic.param_offload:
        trained["critic"] = _in_host_memory(trained["critic"], mesh)
    return {
        **trained,
        "control": jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), control
        ),
    }


def _in_host_memory(shapes: Any, mesh: Mesh) -> Any:
    return placement.in_memory(shapes, placement.host_memory_kind(mesh))


def state_shapes(config: Config, nets: Networks, mesh: Mesh) -> TrainState:
    """Return shapes and shardings (`jax.ShapeDtypeStruct`) of what `create_state` returns."""
    trained = trained_shapes(config, nets, mesh)
    # Frozen models need no float32 master copy.
    frozen_dtype = jnp.dtype(config.model.dtype)

    def frozen(shapes: Params, rules: sharding.Rules = sharding.TRAIN_RULES) -> Params:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, frozen_dtype, sharding=x.sharding),
            _with_train_layout(shapes, mesh, rules),
        )

    reference = reward = None
    if config.keeps_reference:
        reference = frozen(_base_shapes(nets.actor, "lm"))
        if config.algorithm.reference_offload:
            reference = _in_host_memory(reference, mesh)
    if nets.reward is not None:
        is_encoder = isinstance(nets.reward, Deberta)
        rules = sharding.ENCODER_RULES if is_encoder else sharding.TRAIN_RULES
        reward = frozen(_init_shapes(nets.reward, "scalar"), rules)
        if config.reward.param_offload:
            reward = _in_host_memory(reward, mesh)
    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh)),
        actor=trained["actor"],
        critic=trained.get("critic"),
        reference=reference,
        reward=reward,
        actor_optimizer=trained["optimizer"]["actor"],
        critic_optimizer=trained["optimizer"].get("critic"),
        control=trained["control"],
    )


def policy_params(nets: Networks, state: TrainState) -> Params:
    """Return the actor's parameters, joined with their base, without a critic's head."""
    return heads.without_scalar_head(full_parameters(nets.actor, state.actor, state.reference))


def trained_trees(state: TrainState) -> dict[str, Any]:
    """Return everything in a state that training changes: the trees of a checkpoint, by name."""
    trees = {"actor": state.actor}
    optimizers = {"actor": state.actor_optimizer}
    if state.critic is not None:
        trees["critic"] = state.critic
        optimizers["critic"] = state.critic_optimizer
    return {**trees, "optimizer": optimizers, "control": state.control}


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
        control = resumed_control(config.algorithm.kl_ctrl, trained["control"], step)
        trained = {**trained, "control": control}
    frozen_dtype = jnp.dtype(config.model.dtype)
    reference = reward = None
    if config.keeps_reference:
        reference = load_checkpoint(
            folders.actor,
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
    return TrainState(
        step=placement.place(np.int32(step), sharding.replicated(mesh)),
        actor=trained["actor"],
        critic=trained.get("critic"),
        reference=reference,
        reward=reward,
        actor_optimizer=trained["optimizer"]["actor"],
        critic_optimizer=trained["optimizer"].get("critic"),
        control=trained["control"],
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
        folders.adapters if config.has_adapters else folders.actor,
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
    actor_folder = folders.adapters if config.has_adapters else folders.actor
    params = {
        "actor": load(
            "actor",
            nets.actor,
            actor_folder,
            shardings.actor,
            head=actor_head(config.shares_trunk),
            dtype=_param_dtype(config, "actor"),
        )
    }
    if nets.critic:
        # With adapters the actor's folder is the base: its adapters come from elsewhere.
        starts_as_actor = folders.critic_starts_as_actor
        params["critic"] = load(
            "critic",
            nets.critic,
            actor_folder if starts_as_actor else folders.critic,
            shardings.critic,
            head="reward" if config.critic.keep_head else "scalar",
            dtype=_param_dtype(config, "critic"),
        )
    optimizer_shardings = {
        "actor": shardings.actor_optimizer,
        "critic": shardings.critic_optimizer,
    }
    # Optimizer states are created in their shards: they may fit no single device.
    optimizers = {
        role: _create_optimizer_state(options, params[role], optimizer_shardings[role])
        for role, options in _role_options(config).items()
        if role in params
    }
    control = first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    return {
        **params,
        "optimizer": optimizers,
        "control": placement.place(jax.device_get(control), shardings.step),
    }


def _create_optimizer_state(options: Actor | Critic, params: Params, shardings: Any) -> Any:
    def init(params: Params) -> optax.OptState:
        return _role_optimizer(options).init(placement.to_device(params))

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


def _role_options(config: Config) -> dict[str, Actor | Critic]:
    return {"actor": config.actor, "critic": config.critic}


def _param_dtype(config: Config, role: str) -> jnp.dtype:
    return jnp.dtype(_role_options(config)[role].optim.param_dtype)


def _with_dtype(shapes: Params, dtype: jnp.dtype) -> Params:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def _role_optimizer(options: Actor | Critic) -> optax.GradientTransformation:
    return make_optimizer(options.optim, options.grad_clip)


def _init_shapes(net: Transformer | Deberta, head: str) -> Params:
    """Return the shapes of a role's parameters, or of its adapters."""
    key = _key_shape()
    if isinstance(net, Deberta):  # it comes with its head
        return jax.eval_shape(functools.partial(init_deberta_params, net), key)
    if net.lora is None:
        return _base_shapes(net, head)
    # Only the adapters and a head: their base is the reference.
    init = functools.partial(init_adapters, net.architecture, net.lora, head=head)
    return jax.eval_shape(init, key)


def _base_shapes(net: Transformer, head: str) -> Params:
    return jax.eval_shape(functools.partial(heads.init_params, net, head=head), _key_shape())


def _key_shape() -> jax.ShapeDtypeStruct:
    # No array, which the mesh of a machine that is only compiled for could not hold.
    return jax.eval_shape(lambda: jax.random.key(0))


def _with_train_layout(
    shapes: Params, mesh: Mesh, rules: sharding.Rules = sharding.TRAIN_RULES
) -> Params:
    """Return the same shapes with the shardings of training."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        sharding.tree_shardings(mesh, shapes, rules),
    )
