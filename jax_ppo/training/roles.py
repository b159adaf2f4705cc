"""The table of roles: which models a PPO run has, where each starts, and what trains it.

A role is one entry of `ROLES`. Folders, models, state, shapes, checkpoints, memory, counts and
exports follow from the table; what a role computes is an entry of `ppo.programs.PROGRAMS`.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_ppo.config.schema import Actor, Config, Critic, option_value
from jax_ppo.models import heads
from jax_ppo.models.deberta.encoder import Deberta
from jax_ppo.models.hf import peft
from jax_ppo.models.hf.hub import HUB_FILES, resolve_model_folder
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import work_directory
from jax_ppo.training.networks import (
    Folders,
    NetworkReader,
    Networks,
    actor_head,
    critic_head,
)
from jax_ppo.training.random_streams import Stream
from jax_ppo.types import Params

_DIGESTED_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """How the end of a run exports a role, to the folder of its name in the work directory.

    Attributes:
      option: the option that reads the folder.
      adapter_folder: the folder for its adapters.
      is_wanted: returns whether a run that exports its models exports this one.
      drop_head: removes what a shared trunk has for another role.
      merges_adapters: whether adapters are also merged into their base.
      per_token: whether it is read as a token classifier with one label.
    """

    option: str
    adapter_folder: str
    is_wanted: Callable[[Config], bool] = lambda config: True
    drop_head: Callable[[Params], Params]
    merges_adapters: bool = False
    per_token: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRole:
    """A role of a PPO run, as one entry of `ROLES`.

    Attributes:
      name: its key in the train state, in `Networks` and in `Folders`, its tree in a checkpoint,
        the part of a program's name.
      title: the role in messages and in the progress of loading.
      is_used: returns whether a run with these options has it as a separate tree.
      path_option: the option that names its checkpoint. Without a path it starts from the actor's.
      read_net: reads its model from its folder.
      has_actors_net: whether its model is the actor's.
      head: returns its head, in the terms of the loader.
      keeps_head: returns whether its scalar head is read and does not start at zero.
      reads_actors_tokens: whether a tokenizer in its folder must have the actor's vocabulary.
      holds_base: whether it has all weights, even where other roles have adapters.
      param_offload: the option that keeps its parameters in the host's memory; empty if none does.
      section: the section of the options that trains it; empty if it is always frozen.
      is_trained: returns whether a run with these options trains it: a checkpoint then holds it and
        its optimizer.
      adapter_stream: the random numbers of new adapters.
      export: how it is exported; `None` if it is not.
    """

    name: str
    title: str
    is_used: Callable[[Config], bool]
    path_option: str
    read_net: Callable[[NetworkReader], Transformer | Deberta] | None = None
    has_actors_net: bool = False
    head: Callable[[Config], str]
    keeps_head: Callable[[Config, Folders], bool] = lambda config, folders: False
    reads_actors_tokens: bool = False
    holds_base: bool = False
    param_offload: str = ""
    section: str = ""
    is_trained: Callable[[Config], bool] = lambda config: False
    adapter_stream: Stream | None = None
    export: Export | None = None

    @property
    def optimizer_offload(self) -> str:
        """Return the option that keeps its optimizer state in the host's memory."""
        return f"{self.section}.optimizer_offload"

    @property
    def offloads(self) -> tuple[str, ...]:
        """Return the options that keep its arrays in the host's memory."""
        options = (self.optimizer_offload if self.section else "", self.param_offload)
        return tuple(name for name in options if name)

    def model(self, nets: Networks) -> Any:
        """Return its model."""
        return nets.actor if self.has_actors_net else nets[self.name]

    def starts_from(self, config: Config, folders: Folders) -> Path | None:
        """Return its checkpoint; `None` for new adapters."""
        # With adapters `folders.actor` is their base.
        if config.has_adapters and self.section and folders.is_actors(self.name):
            return folders.get("adapters")
        return folders.get(self.name, folders.actor)

    def path(self, config: Config) -> str:
        """Return what names its checkpoint; empty if it starts from the actor's."""
        if self.holds_base and config.has_adapters:
            return ""
        return str(option_value(config, self.path_option))

    def options(self, config: Config) -> Actor | Critic:
        """Return the options that it is trained with."""
        options: Actor | Critic = getattr(config, self.section)
        return options


# All roles, in the order in which they are created. What lists roles reads this table.
ROLES: tuple[ModelRole, ...] = (
    ModelRole(
        name="actor",
        title="actor",
        is_used=lambda config: True,
        path_option="model.path",
        head=lambda config: actor_head(config.shares_trunk),
        param_offload="actor.param_offload",
        section="actor",
        is_trained=lambda config: not config.trainer.critic_only,
        adapter_stream=Stream.ACTOR_ADAPTERS,
        export=Export(
            option="model.path",
            adapter_folder="adapter",
            is_wanted=lambda config: not config.trainer.critic_only,
            # A critic's head on a shared trunk is not part of the policy.
            drop_head=heads.without_scalar_head,
            merges_adapters=True,
        ),
    ),
    ModelRole(
        name="critic",
        title="critic",
        is_used=lambda config: config.has_critic and not config.shares_trunk,
        path_option="critic.path",
        read_net=NetworkReader.read_critic,
        head=lambda config: "scalar",
        keeps_head=lambda config, folders: (
            critic_head(config.critic, folders.get("critic")) == "reward"
        ),
        reads_actors_tokens=True,
        param_offload="critic.param_offload",
        section="critic",
        is_trained=lambda config: True,
        adapter_stream=Stream.CRITIC_ADAPTERS,
        export=Export(
            option="critic.path",
            adapter_folder="critic",
            is_wanted=lambda config: config.has_critic and config.trainer.export_critic,
            drop_head=heads.without_language_head,
            per_token=True,
        ),
    ),
    ModelRole(
        name="reference",
        title="reference",
        is_used=lambda config: config.keeps_reference,
        path_option="reference.path",
        read_net=NetworkReader.validate_reference,
        has_actors_net=True,
        head=lambda config: "lm",
        holds_base=True,
        param_offload="algorithm.reference_offload",
    ),
    # With `model.lora` the reference above is the base of all adapters, these included.
    ModelRole(
        name="reference_adapters",
        title="reference",
        is_used=lambda config: (
            config.has_adapters and config.algorithm.use_reference and bool(config.reference.path)
        ),
        path_option="reference.path",
        read_net=NetworkReader.read_reference_adapters,
        head=lambda config: "lm",
    ),
    ModelRole(
        name="reward",
        title="reward model",
        is_used=lambda config: bool(config.reward.model_path),
        path_option="reward.model_path",
        read_net=NetworkReader.read_reward_model,
        head=lambda config: "reward",
        param_offload="reward.param_offload",
    ),
    ModelRole(
        name="teacher",
        title="teacher",
        is_used=lambda config: bool(config.teacher.path),
        path_option="teacher.path",
        read_net=NetworkReader.read_teacher,
        head=lambda config: "lm",
        reads_actors_tokens=True,
        param_offload="teacher.param_offload",
    ),
)


def find_role(name: str) -> ModelRole:
    """Return the role of this name."""
    return next(role for role in ROLES if role.name == name)


def used_roles(config: Config) -> tuple[ModelRole, ...]:
    """Return the roles that a run with these options has."""
    return tuple(role for role in ROLES if role.is_used(config))


def trained_roles(config: Config) -> tuple[ModelRole, ...]:
    """Return the roles that training changes, also those that the run does not have."""
    return tuple(role for role in ROLES if role.is_trained(config))


def present_roles(config: Config, nets: Networks, *, trained: bool) -> list[ModelRole]:
    """Return the roles in the state that training changes, or the others."""
    return [
        role
        for role in ROLES
        if role.is_trained(config) == trained
        and (role.is_used(config) if role.has_actors_net else role.name in nets)
    ]


def resolve_role_folders(
    config: Config,
    workdir: Path,
    describe_model: Callable[[Path], None],
    files: Sequence[str] = HUB_FILES,
) -> Folders:
    """Find or download every role's checkpoint, and describe a small actor if none is named.

    Args:
      config: the options.
      workdir: the small actor is written to its folder `model`.
      describe_model: writes the small actor, but for its weights, to a folder.
      files: patterns of the files to download.
    """
    # Without a model a small one is made, so that a first run needs no download.
    if config.model.path:
        actor = resolve_model_folder(config.model.path, files=files)
    else:
        actor = workdir / work_directory.WARM_UP_MODEL
        describe_model(actor)
    folders = {"actor": actor}
    for role in ROLES:
        if role.name == "actor" or not role.is_used(config):
            continue
        if path := role.path(config):
            option = f"config.{role.path_option}"
            folders[role.name] = resolve_model_folder(path, option, files=files)
        elif role.section:
            folders[role.name] = actor
    if config.model.lora.path:
        folders["adapters"] = resolve_model_folder(
            config.model.lora.path,
            "config.model.lora.path",
            f"{peft.ADAPTER_CONFIG} and {peft.ADAPTER_WEIGHTS}",
            files=HUB_FILES,
        )
    return Folders(**folders)


def fingerprint_frozen(config: Config, folders: Folders) -> dict[str, str]:
    """Return a digest of the files of each frozen model, by the option that names its folder.

    No checkpoint of a run holds these weights. Of each file its size, beginning and end count.
    """
    digests = {}
    for role in used_roles(config):
        folder = role.starts_from(config, folders)
        if role.is_trained(config) or folder is None:
            continue
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".safetensors"):
                size = path.stat().st_size
                digest.update(f"{path.name} {size} ".encode())
                with open(path, "rb") as file:
                    digest.update(file.read(_DIGESTED_BYTES))
                    file.seek(max(0, size - _DIGESTED_BYTES))
                    digest.update(file.read())
        option = role.path_option if role.path(config) else "model.path"
        digests[option] = digest.hexdigest()
    return digests


def read_networks(config: Config, folders: Folders, needs_weights: bool = True) -> Networks:
    """Read every role's config.json and build its model.

    Args:
      config: the options.
      folders: each role's checkpoint.
      needs_weights: False also accepts folders without weights, to plan a run from config.json.

    Raises:
      UserError: an architecture is not supported, the reward model is not a reward model, adapters
        do not fit their base, or an attention program cannot run on this machine.
    """
    reader = NetworkReader(config, folders, needs_weights)
    nets: dict[str, Transformer | Deberta] = {"actor": reader.actor}
    for role in ROLES:
        if role.read_net is not None and role.name in folders:
            net = role.read_net(reader)
            if not role.has_actors_net:
                nets[role.name] = net
    return Networks(**nets)
