"""The table of roles: which models a PPO run has, where each starts, and what trains it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_ppo.config.schema import Actor, Config, Critic
from jax_ppo.training.networks import Folders, Networks, actor_head, critic_head
from jax_ppo.training.random_streams import Stream


@dataclasses.dataclass(frozen=True)
class ModelRole:
    """A role of a PPO run, as one entry of `ROLES`.

    Attributes:
      name: the field of the train state, the tree in a checkpoint, the part of a program's name.
      title: the role in messages and in the progress of loading.
      section: the section of the options that trains it; empty if it is frozen.
      net: the field of `Networks` with its model.
      head: returns its head, in the terms of the loader.
      keeps_head: returns whether its scalar head is read and does not start at zero.
      is_present: returns whether a run has it as a separate tree.
      starts_from: returns its checkpoint; `None` for new adapters.
      holds_base: whether it has all weights, even where other roles have adapters.
      param_offload: the option that keeps its parameters in the host's memory; empty if none does.
      adapter_stream: the random numbers of new adapters.
    """

    name: str
    title: str
    section: str
    net: str
    head: Callable[[Config], str]
    is_present: Callable[[Config, Networks], bool]
    starts_from: Callable[[Config, Folders], Path | None]
    holds_base: bool = False
    param_offload: str = ""
    adapter_stream: Stream | None = None
    keeps_head: Callable[[Config, Folders], bool] = lambda config, folders: False

    @property
    def is_trained(self) -> bool:
        """Return whether training changes it: a checkpoint holds it and its optimizer."""
        return bool(self.section)

    @property
    def optimizer(self) -> str:
        """Return the field of the train state with its optimizer state."""
        return f"{self.name}_optimizer"

    @property
    def optimizer_offload(self) -> str:
        """Return the option that keeps its optimizer state in the host's memory."""
        return f"{self.section}.optimizer_offload"

    @property
    def offloads(self) -> tuple[str, ...]:
        """Return the options that keep its arrays in the host's memory."""
        options = (self.optimizer_offload if self.is_trained else "", self.param_offload)
        return tuple(name for name in options if name)

    def loaded_head(self, config: Config, folders: Folders) -> str:
        """Return the head that it is loaded with, in the terms of the loader."""
        return "reward" if self.keeps_head(config, folders) else self.head(config)

    def model(self, nets: Networks) -> Any:
        """Return its model."""
        return getattr(nets, self.net)

    def options(self, config: Config) -> Actor | Critic:
        """Return the options that it is trained with."""
        options: Actor | Critic = getattr(config, self.section)
        return options


def _actor_folder(config: Config, folders: Folders) -> Path | None:
    """Return the folder of what is trained of the actor; `None` for new adapters."""
    # With adapters `folders.actor` is their base.
    if config.has_adapters:
        return folders.adapters
    return folders.actor


def _critic_folder(config: Config, folders: Folders) -> Path | None:
    if folders.critic_starts_as_actor:
        return _actor_folder(config, folders)
    return folders.critic


# All roles, in the order in which they are created. What lists roles reads this table.
ROLES: tuple[ModelRole, ...] = (
    ModelRole(
        name="actor",
        title="actor",
        section="actor",
        net="actor",
        head=lambda config: actor_head(config.shares_trunk),
        is_present=lambda config, nets: True,
        starts_from=_actor_folder,
        adapter_stream=Stream.ACTOR_ADAPTERS,
    ),
    ModelRole(
        name="critic",
        title="critic",
        section="critic",
        net="critic",
        head=lambda config: "scalar",
        keeps_head=lambda config, folders: critic_head(config.critic, folders.critic) == "reward",
        is_present=lambda config, nets: nets.critic is not None,
        starts_from=_critic_folder,
        param_offload="critic.param_offload",
        adapter_stream=Stream.CRITIC_ADAPTERS,
    ),
    ModelRole(
        name="reference",
        title="reference",
        section="",
        net="actor",
        head=lambda config: "lm",
        is_present=lambda config, nets: config.keeps_reference,
        starts_from=lambda config, folders: folders.reference or folders.actor,
        holds_base=True,
        param_offload="algorithm.reference_offload",
    ),
    ModelRole(
        name="reward",
        title="reward model",
        section="",
        net="reward",
        head=lambda config: "reward",
        is_present=lambda config, nets: nets.reward is not None,
        starts_from=lambda config, folders: folders.reward,
        param_offload="reward.param_offload",
    ),
)


def find_role(name: str) -> ModelRole:
    """Return the role of this name."""
    return next(role for role in ROLES if role.name == name)


def trained_roles() -> tuple[ModelRole, ...]:
    """Return the roles that training changes."""
    return tuple(role for role in ROLES if role.is_trained)


def frozen_roles() -> tuple[ModelRole, ...]:
    """Return the roles that stay as they are loaded."""
    return tuple(role for role in ROLES if not role.is_trained)
