"""The train state: every parameter tree on the mesh, with its optimizer state."""

from typing import Any

from jax_ppo.models import heads
from jax_ppo.training.networks import Networks, full_parameters
from jax_ppo.training.roles import frozen_roles, trained_roles
from jax_ppo.types import Control, Params, pytree


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
      critic_optimizer: optax state; `None` without a separate critic.
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


def policy_params(nets: Networks, state: TrainState) -> Params:
    """Return the actor's parameters, joined with their base, without a critic's head."""
    return heads.without_scalar_head(full_parameters(nets.actor, state.actor, state.reference))


def trained_trees(state: TrainState) -> dict[str, Any]:
    """Return everything in a state that training changes: the trees of a checkpoint, by name."""
    roles = [role for role in trained_roles() if getattr(state, role.name) is not None]
    trees = {role.name: getattr(state, role.name) for role in roles}
    optimizers = {role.name: getattr(state, role.optimizer) for role in roles}
    return {**trees, "optimizer": optimizers, "control": state.control}


def assemble_state(trained: dict[str, Any], *, step: Any, frozen: dict[str, Any]) -> TrainState:
    """Return the state, or its shapes, of the trees that `trained_trees` names and the others."""
    fields = {role.name: frozen.get(role.name) for role in frozen_roles()}
    for role in trained_roles():
        fields[role.name] = trained.get(role.name)
        fields[role.optimizer] = trained["optimizer"].get(role.name)
    return TrainState(step=step, control=trained["control"], **fields)
