"""Shapes, dtypes and shardings of the train state, without allocating any of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jax_ppo.config.schema import Actor, Config, Critic
from jax_ppo.models import heads
from jax_ppo.models.deberta.encoder import Deberta, init_deberta_params
from jax_ppo.models.lora import init_adapters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.kl_schedule import first_control
from jax_ppo.training.networks import Networks, actor_head
from jax_ppo.training.optimizer import make_optimizer
from jax_ppo.training.state import TrainState, assemble_state
from jax_ppo.types import Params


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
        role: _with_dtype(shapes, param_dtype(config, role)) for role, shapes in params.items()
    }
    optimizers = {
        role: jax.eval_shape(role_optimizer(options).init, params[role])
        for role, options in role_options(config).items()
        if role in params
    }
    # The control is a few scalars, which every device has.
    control = jax.eval_shape(
        lambda: first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    )
    replicated = sharding.replicated(mesh)
    trained = _with_train_layout(params | {"optimizer": optimizers}, mesh)
    for role, options in role_options(config).items():
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
        rules = sharding.TRAIN_RULES
        if isinstance(nets.reward, Deberta):
            rules = sharding.ENCODER_RULES
        reward = frozen(_init_shapes(nets.reward, "scalar"), rules)
        if config.reward.param_offload:
            reward = _in_host_memory(reward, mesh)
    return assemble_state(
        trained,
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh)),
        reference=reference,
        reward=reward,
    )


def role_options(config: Config) -> dict[str, Actor | Critic]:
    """Return the options of each trained role."""
    return {"actor": config.actor, "critic": config.critic}


def param_dtype(config: Config, role: str) -> jnp.dtype:
    """Return the dtype of a role's trained parameters."""
    return jnp.dtype(role_options(config)[role].optim.param_dtype)


def role_optimizer(options: Actor | Critic) -> optax.GradientTransformation:
    """Return the optimizer that a role's options describe."""
    return make_optimizer(options.optim, options.grad_clip)


def _in_host_memory(shapes: Any, mesh: Mesh) -> Any:
    return placement.in_memory(shapes, placement.host_memory_kind(mesh))


def _with_dtype(shapes: Params, dtype: jnp.dtype) -> Params:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def _with_train_layout(
    shapes: Params, mesh: Mesh, rules: sharding.Rules = sharding.TRAIN_RULES
) -> Params:
    """Return the same shapes with the shardings of training."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        sharding.tree_shardings(mesh, shapes, rules),
    )


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
