"""The table of roles: which models a PPO run has, where each starts, and what trains it.

A role is one entry of `ROLES`; `resolve_roles` reads the options of a run for it, once. All else
follows from the two; what a role computes is an entry of `ppo.programs.PROGRAMS`.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_ppo.config.option import option_value
from jax_ppo.config.schema import Actor, Config, Critic, Model
from jax_ppo.models.deberta_encoder import Deberta
from jax_ppo.models.hf import peft
from jax_ppo.models.hf.model_folders import HUB_FILES, resolve_model_folder
from jax_ppo.models.transformer import Transformer
from jax_ppo.training.networks import Folders, NetworkReader, Networks, critic_head
from jax_ppo.training.random_streams import Stream

# The actor's checkpoint without a `model.path`, made by benchmarks/demonstration_model.py.
SMALL_MODEL = Path(__file__).parents[1] / "demonstration" / "model"
_DIGESTED_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """How the end of a run exports a role, to the folder of its name in the work directory."""

    adapter_folder: str
    # Whether a run that exports its models exports this one.
    is_wanted: Callable[[Config], bool] = lambda config: True
    left_out: str  # the head that a shared trunk has for another role
    merges_adapters: bool = False  # into their base, besides
    per_token: bool = False  # it is read as a token classifier with one label


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRole:
    """A role of a PPO run, as one entry of `ROLES`."""

    name: str  # its key in the train state, `Networks`, `Folders` and checkpoints
    title: str  # the role in messages and in the progress of loading
    is_used: Callable[[Config], bool]  # whether a run has it as a separate tree
    path_option: str  # names its checkpoint; without a path it starts from the actor's
    # Reads its model from its folder.
    read_net: Callable[[NetworkReader], Transformer | Deberta] | None = None
    has_actors_net: bool = False  # whether its model is the actor's
    head: str  # its head, in the terms of the loader
    shared_head: str = ""  # likewise where the critic is a head of its trunk
    # Returns the head to load, of its section and its folder, if that depends on them.
    loaded_head: Callable[[Any, Path | None], str] | None = None
    reads_actors_tokens: bool = False  # a tokenizer in its folder must have the actor's
    holds_base: bool = False  # whether it has all weights, even where other roles have adapters
    param_offload: str = ""  # the option that keeps its parameters in the host's memory, if any
    section: str = ""  # the section of the options that trains it; empty if it is always frozen
    # Whether a run trains it: a checkpoint then holds it and its optimizer.
    is_trained: Callable[[Config], bool] = lambda config: False
    adapter_stream: Stream | None = None  # the random numbers of new adapters
    export: Export | None = None  # how it is exported; `None` if it is not

    @property
    def has_logits(self) -> bool:
        """Return whether it computes logits over the vocabulary."""
        return self.head == "lm"

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


# fmt: off
# Without the formatter, as in config/schema.py: a role is read as a paragraph.
# All roles, in the order in which they are created; the only list of them.
ROLES: tuple[ModelRole, ...] = (
    ModelRole(name="actor", title="actor", path_option="model.path",
        is_used=lambda config: True, head="lm", shared_head="both",
        section="actor", is_trained=lambda config: not config.trainer.critic_only,
        param_offload="actor.param_offload", adapter_stream=Stream.ACTOR_ADAPTERS,
        # A critic's head on a shared trunk is not part of the policy.
        export=Export(adapter_folder="adapter", left_out="score", merges_adapters=True)),
    ModelRole(name="critic", title="critic", path_option="critic.path",
        is_used=lambda config: config.has_critic and not config.shares_trunk,
        read_net=NetworkReader.read_critic, head="scalar", loaded_head=critic_head,
        reads_actors_tokens=True, section="critic", is_trained=lambda config: True,
        param_offload="critic.param_offload", adapter_stream=Stream.CRITIC_ADAPTERS,
        export=Export(adapter_folder="critic", left_out="lm_head", per_token=True,
            is_wanted=lambda config: config.has_critic and config.trainer.export_critic)),
    ModelRole(name="reference", title="reference", path_option="reference.path",
        is_used=lambda config: config.algorithm.use_reference or config.has_adapters,
        read_net=NetworkReader.validate_reference, has_actors_net=True, head="lm", holds_base=True,
        param_offload="algorithm.reference_offload"),
    # With `model.lora` the reference above is the base of all adapters, these included.
    ModelRole(name="reference_adapters", title="reference", path_option="reference.path",
        is_used=lambda config: (
            config.has_adapters and config.algorithm.use_reference and bool(config.reference.path)),
        read_net=NetworkReader.read_reference_adapters, head="lm"),
    ModelRole(name="reward", title="reward model", path_option="reward.model_path",
        is_used=lambda config: bool(config.reward.model_path),
        read_net=NetworkReader.read_reward_model, head="reward",
        param_offload="reward.param_offload"),
    ModelRole(name="teacher", title="teacher", path_option="teacher.path",
        is_used=lambda config: bool(config.teacher.path),
        read_net=NetworkReader.read_teacher, head="lm", reads_actors_tokens=True,
        param_offload="teacher.param_offload"),
)
# fmt: on


def find_role(name: str) -> ModelRole:
    """Return the role of this name."""
    return next(role for role in ROLES if role.name == name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRole:
    """The options of a run that concern one role."""

    entry: ModelRole
    is_used: bool
    is_trained: bool
    is_exported: bool  # whether a run that exports its models exports this one
    path: str  # what names its checkpoint; empty if it starts from the actor's
    head: str  # its head, in the terms of the loader
    options: Actor | Critic | None  # the section that trains it; `None` if it is always frozen
    dtype: str  # the type of its parameters: frozen models need no float32 master copy
    has_adapters: bool  # whether adapters are what training changes of it
    offloads: tuple[str, ...]  # the options that keep its arrays in the host's memory

    @property
    def name(self) -> str:
        """Return its key in the train state, in `Networks` and in `Folders`."""
        return self.entry.name

    @property
    def trained_with(self) -> Actor | Critic:
        """Return the section that trains it, of a role that can be trained."""
        assert self.options is not None, f"nothing trains the {self.entry.title}"
        return self.options

    def starts_from(self, folders: Folders) -> Path | None:
        """Return its checkpoint; `None` for new adapters."""
        # With adapters `folders.actor` is their base.
        if self.has_adapters and folders.is_actors(self.name):
            return folders.get("adapters")
        return folders.get(self.name, folders.actor)

    def loaded_head(self, folders: Folders) -> str:
        """Return the head to load from its checkpoint; a "scalar" one starts at zero."""
        if self.entry.loaded_head is None:
            return self.head
        return self.entry.loaded_head(self.options, folders.get(self.name))


def resolve_roles(config: Config) -> tuple[RunRole, ...]:
    """Return what the options say of each role, also of roles that the run does not have."""
    roles = []
    for entry in ROLES:
        options: Actor | Critic | None = getattr(config, entry.section) if entry.section else None
        is_trained = entry.is_trained(config)
        path = str(option_value(config, entry.path_option))
        role = RunRole(
            entry=entry,
            is_used=entry.is_used(config),
            is_trained=is_trained,
            is_exported=is_trained and entry.export is not None and entry.export.is_wanted(config),
            # Adapters share the actor's base.
            path="" if entry.holds_base and config.has_adapters else path,
            head=(config.shares_trunk and entry.shared_head) or entry.head,
            options=options,
            dtype=options.optim.param_dtype if is_trained and options else config.model.dtype,
            has_adapters=config.has_adapters and bool(entry.section),
            offloads=tuple(name for name in entry.offloads if option_value(config, name)),
        )
        roles.append(role)
    return tuple(roles)


def resolve_role_folders(
    roles: Sequence[RunRole], model: Model, files: Sequence[str] = HUB_FILES
) -> Folders:
    """Find or download every role's checkpoint; `files` are patterns of the files to download."""
    actor = resolve_model_folder(model.path or str(SMALL_MODEL), files=files)
    folders = {"actor": actor}
    for role in roles:
        if role.name == "actor" or not role.is_used:
            continue
        if role.path:
            option = f"config.{role.entry.path_option}"
            folders[role.name] = resolve_model_folder(role.path, option, files=files)
        elif role.options:
            folders[role.name] = actor
    if model.lora.path:
        folders["adapters"] = resolve_model_folder(
            model.lora.path,
            "config.model.lora.path",
            f"{peft.ADAPTER_CONFIG} and {peft.ADAPTER_WEIGHTS}",
            files=HUB_FILES,
        )
    return Folders(**folders)


def fingerprint_frozen(roles: Sequence[RunRole], folders: Folders) -> dict[str, str]:
    """Return a digest of the files of each frozen model, by the option that names its folder.

    No checkpoint holds these weights. Of each file its size, beginning and end count.
    """
    digests = {}
    for role in roles:
        folder = role.starts_from(folders)
        if role.is_trained or not role.is_used or folder is None:
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
        option = role.entry.path_option if role.path else "model.path"
        digests[option] = digest.hexdigest()
    return digests


def read_networks(config: Config, folders: Folders, needs_weights: bool = True) -> Networks:
    """Read every role's config.json and build its model; raise `UserError` if it cannot be used.

    Without `needs_weights`, folders without weights do, to plan a run from config.json.
    """
    reader = NetworkReader(config, folders, needs_weights)
    nets: dict[str, Transformer | Deberta] = {"actor": reader.actor}
    for role in ROLES:
        if role.read_net is not None and role.name in folders:
            net = role.read_net(reader)
            if not role.has_actors_net:
                nets[role.name] = net
    return Networks(**nets)
