"""The train state: every parameter tree on the mesh, its shapes and shardings, and its creation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.kernels.masked_statistics import Moments
from jax_ppo.models import heads
from jax_ppo.models.deberta_encoder import Deberta, init_deberta_params
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.peft import load_adapters
from jax_ppo.models.lora import init_adapters
from jax_ppo.models.quantization import round_parameters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.control import first_control, read_value_unit, resumed_control
from jax_ppo.training.networks import Folders, Networks, full_parameters
from jax_ppo.training.optimizer import make_optimizer
from jax_ppo.training.roles import RunRole, resolve_roles
from jax_ppo.types import Control, Params, pytree

# Returns, for the name of a tree, the callback (tensors read, tensors in all) of its loader.
LoadingProgress = Callable[[str], Callable[[int, int], None] | None]


@pytree
class TrainState:
    """Everything on the mesh that outlives a step, as one pytree."""

    step: Any  # int32 scalar, the number of completed steps
    # Parameters by the role's name: of trained roles in `optim.param_dtype`, of frozen ones in
    # the computation dtype. With `model.lora` trained ones are adapters, and the reference is the
    # bare base, the one copy that all adapters apply to, see `reference_policy`.
    models: dict[str, Any]
    optimizers: dict[str, Any]  # by the role's name, the optax states of trained roles
    control: Control  # the KL coefficient and running moments for the coming step

    @property
    def actor(self) -> Any:
        """Return the policy's trained parameters."""
        return self.models.get("actor")

    @property
    def critic(self) -> Any:
        """Return the critic's trained parameters; `None` without one, or with a shared trunk."""
        return self.models.get("critic")

    @property
    def reference(self) -> Any:
        """Return the frozen copy of the first actor; `None` if nothing needs it."""
        return self.models.get("reference")

    def on_device(self) -> "TrainState":
        """Return the state on the devices, in a program, which copies only the arrays it uses."""
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
    return heads.without_part(placement.fetch(state.role_params("actor", nets)), "score")


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
    """Return the state, or its shapes, from `trained_trees`' trees and frozen ones by role."""
    models = {name: x for name, x in trained.items() if name not in ("optimizer", "control")}
    return TrainState(
        step=step,
        models=models | frozen,
        optimizers=trained["optimizer"],
        control=trained["control"],
    )


@dataclasses.dataclass(frozen=True)
class StateBuilder:
    """Makes the train state of a run, its shapes, and the shapes of what a checkpoint holds."""

    config: Config
    nets: Networks
    mesh: Mesh

    @functools.cached_property
    def roles(self) -> tuple[RunRole, ...]:
        """Return what the options say of each role."""
        return resolve_roles(self.config)

    def shapes(self) -> TrainState:
        """Return shapes and shardings (`jax.ShapeDtypeStruct`) of what `create` returns."""
        frozen = {}
        for role in self._present_roles(trained=False):
            rules = sharding.TRAIN_RULES
            if isinstance(role.entry.model(self.nets), Deberta):
                rules = sharding.ENCODER_RULES
            shapes = sharding.with_layout(self.mesh, _role_shapes(role, self.nets), rules)
            if role.entry.param_offload in role.offloads:
                shapes = placement.in_host_memory(shapes, self.mesh)
            frozen[role.name] = shapes
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(self.mesh))
        return assemble_state(self.trained_shapes(), step=step, frozen=frozen)

    def trained_shapes(self) -> dict[str, Any]:
        """Return shapes and shardings of what training changes, as `trained_trees` names it."""
        mesh = self.mesh
        roles = self._present_roles(trained=True)
        # Shapes come from tracing the initialization: nothing is allocated.
        params = {role.name: _role_shapes(role, self.nets) for role in roles}
        optimizers = {
            role.name: jax.eval_shape(make_optimizer(role.trained_with).init, params[role.name])
            for role in roles
        }
        trained = sharding.with_layout(
            mesh, params | {"optimizer": optimizers}, sharding.TRAIN_RULES
        )
        for role in roles:
            if role.entry.optimizer_offload in role.offloads:
                optimizer = trained["optimizer"][role.name]
                trained["optimizer"][role.name] = placement.in_host_memory(optimizer, mesh)
            if role.entry.param_offload in role.offloads:
                trained[role.name] = placement.in_host_memory(trained[role.name], mesh)
        # The control is a few scalars, which every device has.
        replicated = sharding.replicated(mesh)
        control = jax.eval_shape(self._first_control)
        return {
            **trained,
            "control": jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), control
            ),
        }

    def create(
        self,
        folders: Folders,
        progress: LoadingProgress,
        trained: dict[str, Any] | None = None,
        step: int = 0,
    ) -> TrainState:
        """Return the state to start from, each tree read directly into its shards.

        `trained` has a checkpoint's arrays after `step` steps; `None` reads the roles' folders.
        """
        # Each loader reads only the parts of a tensor that its devices hold.
        shardings = jax.tree.map(lambda x: x.sharding, self.shapes())
        if trained is None:
            trained = self._load_trained(folders, progress, shardings)
            # Optimizer states are created in their shards: they may fit no single device.
            trained["optimizer"] = {
                role.name: jax.jit(
                    lambda params, role=role: make_optimizer(role.trained_with).init(
                        placement.to_device(params)
                    ),
                    out_shardings=shardings.optimizers[role.name],
                )(trained[role.name])
                for role in self._present_roles(trained=True)
            }
        else:
            control = resumed_control(self.config.algorithm.kl_ctrl, trained["control"])
            trained = {**trained, "control": control}
        return assemble_state(
            trained,
            step=placement.place(np.int32(step), sharding.replicated(self.mesh)),
            frozen={
                role.name: self._load(role, folders, progress, shardings)
                for role in self._present_roles(trained=False)
            },
        )

    def create_models(self, folders: Folders, progress: LoadingProgress) -> TrainState:
        """Return a state to sample and to run forward passes with: models, without optimizers."""
        shardings = jax.tree.map(lambda x: x.sharding, self.shapes())
        trained = self._load_trained(folders, progress, shardings, dtype="float32")
        return self.create(folders, progress, trained | {"optimizer": {}})

    def _first_control(self, returns: Moments | None = None) -> Control:
        config = self.config
        return first_control(config.algorithm.kl_ctrl, config.reward, config.critic, returns)

    def _present_roles(self, *, trained: bool) -> list[RunRole]:
        return [
            role
            for role in self.roles
            if role.is_trained == trained
            and (role.is_used if role.entry.has_actors_net else role.name in self.nets)
        ]

    def _load_trained(
        self,
        folders: Folders,
        progress: LoadingProgress,
        shardings: TrainState,
        dtype: str | None = None,
    ) -> dict[str, Any]:
        """Return the models that training changes, and the first control with a critic's unit."""
        returns = None
        critic = next(role for role in self.roles if role.name == "critic")
        if critic.is_used and critic.loaded_head(folders) == "reward":
            returns = read_value_unit(self.config.critic, folders["critic"])
        loaded: dict[str, Any] = {
            role.name: self._load(
                dataclasses.replace(role, dtype=dtype or role.dtype), folders, progress, shardings
            )
            for role in self._present_roles(trained=True)
        }
        everywhere = sharding.replicated(self.mesh)
        return loaded | {
            "control": placement.place(jax.device_get(self._first_control(returns)), everywhere)
        }

    def _load(
        self, role: RunRole, folders: Folders, progress: LoadingProgress, shardings: TrainState
    ) -> Params:
        """Read a role's parameters or adapters, or create new adapters if there is no folder."""
        net, folder = role.entry.model(self.nets), role.starts_from(folders)
        shards, dtype = shardings.models[role.name], jnp.dtype(role.dtype)
        head, title = role.loaded_head(folders), role.entry.title
        if isinstance(net, Deberta) or net.lora is None or role.entry.holds_base:
            assert folder is not None, f"the {title} has no checkpoint"
            # Where others have adapters, this is the base of them.
            name = title if getattr(net, "lora", None) is None else "base"
            return load_checkpoint(folder, net.architecture, shards, dtype, head, progress(name))
        if folder is None:
            stream = role.entry.adapter_stream
            assert stream is not None, f"the {title} cannot start with new adapters"

            def init() -> Params:
                # A stream per role, so that the critic's adapters are not a copy of the actor's.
                key = jax.random.fold_in(jax.random.key(self.config.seed), stream)
                adapters = init_adapters(net.architecture, net.lora, key, head)
                return jax.tree.map(lambda x: x.astype(dtype), adapters)

            return jax.jit(init, out_shardings=shards)()
        # With adapters the progress has another name than the base's.
        report = progress(f"{title}'s adapters")
        return load_adapters(folder, net.architecture, net.lora, shards, dtype, head, report)


def _role_shapes(role: RunRole, nets: Networks) -> Params:
    net = role.entry.model(nets)
    head = "scalar" if role.head == "reward" else role.head
    # No array, which the mesh of a machine that is only compiled for could not hold.
    key = jax.eval_shape(lambda: jax.random.key(0))
    if isinstance(net, Deberta):  # it comes with its head
        shapes = jax.eval_shape(functools.partial(init_deberta_params, net), key)
    elif role.entry.holds_base or net.lora is None:
        shapes = heads.param_shapes(net, head)
    else:  # only the adapters and a head: their base is the reference
        init = functools.partial(init_adapters, net.architecture, net.lora, head=head)
        shapes = jax.eval_shape(init, key)
    return jax.eval_shape(functools.partial(round_parameters, dtype=role.dtype), shapes)
