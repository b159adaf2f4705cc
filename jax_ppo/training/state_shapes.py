"""Shapes, dtypes and shardings of the train state, without allocating any of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jax_ppo.config.schema import Actor, Config, Critic, option_value
from jax_ppo.models import heads
from jax_ppo.models.deberta.encoder import Deberta, init_deberta_params
from jax_ppo.models.lora import init_adapters
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.kl_schedule import first_control
from jax_ppo.training.networks import Networks
from jax_ppo.training.optimizer import make_optimizer
from jax_ppo.training.roles import ModelRole, frozen_roles, trained_roles
from jax_ppo.training.state import TrainState, assemble_state
from jax_ppo.types import Params


def trained_shapes(config: Config, nets: Networks, mesh: Mesh) -> dict[str, Any]:
    """Return shapes and shardings of everything that training changes, as a checkpoint names it.

    Returns:
      Trees of `jax.ShapeDtypeStruct`, in the structure of `trained_trees`.
    """
    roles = [role for role in trained_roles() if role.is_present(config, nets)]
    # Shapes come from tracing the initialization: nothing is allocated.
    params = {
        role.name: _with_dtype(_role_shapes(role, nets, role.head(config)), param_dtype(options))
        for role in roles
        if (options := role.options(config))
    }
    optimizers = {
        role.name: jax.eval_shape(role_optimizer(role.options(config)).init, params[role.name])
        for role in roles
    }
    # The control is a few scalars, which every device has.
    control = jax.eval_shape(
        lambda: first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    )
    replicated = sharding.replicated(mesh)
    trained = _with_train_layout(params | {"optimizer": optimizers}, mesh)
    for role in roles:
        if option_value(config, role.optimizer_offload):
            trained["optimizer"][role.name] = _in_host_memory(trained["optimizer"][role.name], mesh)
        if role.param_offload and option_value(config, role.param_offload):
            trained[role.name] = _in_host_memory(trained[role.name], mesh)
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

    frozen = {}
    for role in frozen_roles():
        if not role.is_present(config, nets):
            continue
        rules = sharding.TRAIN_RULES
        if isinstance(role.model(nets), Deberta):
            rules = sharding.ENCODER_RULES
        shapes = _with_dtype(_role_shapes(role, nets, role.head(config)), frozen_dtype)
        frozen[role.name] = _with_train_layout(shapes, mesh, rules)
        if role.param_offload and option_value(config, role.param_offload):
            frozen[role.name] = _in_host_memory(frozen[role.name], mesh)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh))
    return assemble_state(trained, step=step, frozen=frozen)


def param_dtype(options: Actor | Critic) -> jnp.dtype:
    """Return the dtype of a role's trained parameters."""
    return jnp.dtype(options.optim.param_dtype)


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


def _role_shapes(role: ModelRole, nets: Networks, head: str) -> Params:
    """Return the shapes of a role's parameters, or of its adapters."""
    net = role.model(nets)
    head = "scalar" if head == "reward" else head
    key = _key_shape()
    if isinstance(net, Deberta):  # it comes with its head
        return jax.eval_shape(functools.partial(init_deberta_params, net), key)
    if role.holds_base or net.lora is None:
        init_params = functools.partial(heads.init_params, net, head=head)
        return jax.eval_shape(init_params, key)
    # Only the adapters and a head: their base is the reference.
    init = functools.partial(init_adapters, net.architecture, net.lora, head=head)
    return jax.eval_shape(init, key)


def _key_shape() -> jax.ShapeDtypeStruct:
    # No array, which the mesh of a machine that is only compiled for could not hold.
    return jax.eval_shape(lambda: jax.random.key(0))
