"""The train state: every parameter tree on the mesh, its shapes and shardings, and its creation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jax_ppo.config.schema import Actor, Config, Critic, option_value
from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta.encoder import Deberta, init_deberta_params
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.peft import load_adapters
from jax_ppo.models.lora import Lora, init_adapters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.control import first_control, read_value_unit, resumed_control
from jax_ppo.training.networks import Folders, Networks, full_parameters
from jax_ppo.training.optimizer import make_optimizer
from jax_ppo.training.roles import ModelRole, find_role, present_roles
from jax_ppo.types import Control, Params, pytree

# Returns, for the name of a tree, the callback (tensors read, tensors in all) of its loader.
LoadingProgress = Callable[[str], Callable[[int, int], None] | None]


@pytree
class TrainState:
    """Everything on the mesh that outlives a step, as one pytree.

    Attributes:
      step: int32 scalar, the number of completed steps.
      models: by the role's name, the parameters of the roles that the run has. Those of trained
        roles are in their `optim.param_dtype`; with `model.lora` they are adapters
        (`models/lora.py`). Frozen ones are in the computation dtype; the reference is then the bare
        base, the one copy that all adapters apply to, see `reference_policy`.
      optimizers: by the role's name, the optax states of trained roles.
      control: the KL coefficient and running moments for the coming step.
    """

    step: Any
    models: dict[str, Any]
    optimizers: dict[str, Any]
    control: Control

    @property
    def actor(self) -> Any:
        """Return the policy's trained parameters."""
        return self.models.get("actor")

    @property
    def critic(self) -> Any:
        """Return the critic's trained parameters.

        `None` if advantages need no critic, or if it is a head of the actor's
        (`critic.shared_trunk`).
        """
        return self.models.get("critic")

    @property
    def reference(self) -> Any:
        """Return the frozen copy of the first actor; `None` if nothing needs it."""
        return self.models.get("reference")

    def with_models(self, **models: Any) -> "TrainState":
        """Return the state with other parameters of some roles."""
        return dataclasses.replace(self, models={**self.models, **models})

    def on_device(self) -> "TrainState":
        """Return the state with its parameters in the devices' memory, inside a compiled function.

        Of what is in the host's memory, a program copies only what it reads.
        """
        return dataclasses.replace(self, models=placement.to_device(self.models))

    def without_trained(self) -> "TrainState":
        """Return the state without the trees that training changes, which an update donates."""
        names = self.models.keys() - self.optimizers.keys()
        models = {name: self.models[name] for name in sorted(names)}
        return dataclasses.replace(self, models=models, optimizers={})

    def role_params(self, name: str, nets: Networks) -> Params:
        """Return all parameters of a role, joined with their base if they are adapters."""
        return full_parameters(nets[name], self.models[name], self.reference)


def policy_params(nets: Networks, state: TrainState) -> Params:
    """Return the actor's parameters on devices, joined with their base, without a critic's head."""
    return heads.without_scalar_head(placement.fetch(state.role_params("actor", nets)))


def reference_policy(nets: Networks, state: TrainState) -> tuple[Transformer, Params]:
    """Return the model and all parameters of the policy that the KL is measured to."""
    if "reference_adapters" in nets:
        return nets["reference_adapters"], state.role_params("reference_adapters", nets)
    return nets.actor, state.reference


def trained_trees(state: TrainState) -> dict[str, Any]:
    """Return everything in a state that training changes: the trees of a checkpoint, by name."""
    return {
        **{name: params for name, params in state.models.items() if name in state.optimizers},
        "optimizer": state.optimizers,
        "control": state.control,
    }


def assemble_state(trained: dict[str, Any], *, step: Any, frozen: dict[str, Any]) -> TrainState:
    """Return the state, or its shapes, of the trees that `trained_trees` names and the others."""
    models = {name: x for name, x in trained.items() if name not in ("optimizer", "control")}
    return TrainState(
        step=step,
        models=models | frozen,
        optimizers=trained["optimizer"],
        control=trained["control"],
    )


def trained_shapes(config: Config, nets: Networks, mesh: Mesh) -> dict[str, Any]:
    """Return shapes and shardings of everything that training changes, as a checkpoint names it.

    Returns:
      Trees of `jax.ShapeDtypeStruct`, in the structure of `trained_trees`.
    """
    roles = present_roles(config, nets, trained=True)
    # Shapes come from tracing the initialization: nothing is allocated.
    params = {
        role.name: _with_dtype(
            _role_shapes(role, nets, role.head(config)), param_dtype(role.options(config))
        )
        for role in roles
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
    for role in present_roles(config, nets, trained=False):
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
    loader = _RoleLoader(config, nets, folders, mesh, progress)
    if trained is None:
        trained = loader.create_trained()
    else:
        control = resumed_control(config.algorithm.kl_ctrl, trained["control"])
        trained = {**trained, "control": control}
    dtype = jnp.dtype(config.model.dtype)
    return assemble_state(
        trained,
        step=placement.place(np.int32(step), sharding.replicated(mesh)),
        frozen={
            role.name: loader.load(role, dtype)
            for role in present_roles(config, nets, trained=False)
        },
    )


def create_models_state(
    config: Config, nets: Networks, folders: Folders, mesh: Mesh, progress: LoadingProgress
) -> TrainState:
    """Return a state to sample and to run forward passes with: models, without optimizers.

    Takes the same arguments as `create_state`.
    """
    loader = _RoleLoader(config, nets, folders, mesh, progress)
    control = loader.create_control()
    models = {
        role.name: loader.load(role, jnp.dtype(jnp.float32))
        for role in present_roles(config, nets, trained=True)
    }
    trained = {**models, "optimizer": {}, "control": control}
    return create_state(config, nets, folders, mesh, progress, trained=trained)


class _RoleLoader:
    """Reads the trees of roles, each directly into its shards; arguments as in `create_state`."""

    def __init__(
        self,
        config: Config,
        nets: Networks,
        folders: Folders,
        mesh: Mesh,
        progress: LoadingProgress,
    ) -> None:
        self._config = config
        self._nets = nets
        self._folders = folders
        self._progress = progress
        # Each loader reads only the parts of a tensor that its devices hold.
        self._shardings = jax.tree.map(lambda x: x.sharding, state_shapes(config, nets, mesh))

    def create_trained(self) -> dict[str, Any]:
        """Return everything that training changes, for a run that starts at step 0."""
        control = self.create_control()
        params = {}
        optimizers = {}
        for role in present_roles(self._config, self._nets, trained=True):
            options = role.options(self._config)
            params[role.name] = self.load(role, param_dtype(options))
            # Optimizer states are created in their shards: they may fit no single device.
            optimizers[role.name] = _create_optimizer_state(
                options, params[role.name], self._shardings.optimizers[role.name]
            )
        return {**params, "optimizer": optimizers, "control": control}

    def create_control(self) -> Control:
        """Return the control of the first step, on the mesh: a critic keeps its values' unit."""
        config, folders = self._config, self._folders
        critic = find_role("critic")
        returns = None
        if critic.is_used(config) and critic.keeps_head(config, folders):
            returns = read_value_unit(config.critic, folders["critic"])
        control = first_control(config.algorithm.kl_ctrl, config.reward, config.critic, returns)
        placed: Control = placement.place(jax.device_get(control), self._shardings.step)
        return placed

    def load(self, role: ModelRole, dtype: jnp.dtype) -> Params:
        """Read a role's parameters or adapters, or create new adapters if there is no folder."""
        config, folders, progress = self._config, self._folders, self._progress
        net, folder = role.model(self._nets), role.starts_from(config, folders)
        shards = self._shardings.models[role.name]
        head = "reward" if role.keeps_head(config, folders) else role.head(config)
        if isinstance(net, Deberta) or net.lora is None or role.holds_base:
            assert folder is not None, f"the {role.title} has no checkpoint"
            # Where others have adapters, this is the base of them.
            name = role.title if getattr(net, "lora", None) is None else "base"
            return load_checkpoint(folder, net.architecture, shards, dtype, head, progress(name))
        if folder is None:
            return _new_adapters(role, net.architecture, net.lora, shards, head, dtype, config.seed)
        # With adapters the progress has another name than the base's.
        report = progress(f"{role.title}'s adapters")
        return load_adapters(folder, net.architecture, net.lora, shards, dtype, head, report)


def _create_optimizer_state(options: Actor | Critic, params: Params, shardings: Any) -> Any:
    def init(params: Params) -> optax.OptState:
        return role_optimizer(options).init(placement.to_device(params))

    return jax.jit(init, out_shardings=shardings)(params)


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
