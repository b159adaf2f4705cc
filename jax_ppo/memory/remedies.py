"""Changes of single options that make a run need less memory on each device."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh

from jax_ppo.config import validation
from jax_ppo.config.schema import Config, MeshShape, RolloutMesh, Supervised
from jax_ppo.errors import UserError
from jax_ppo.kernels.platform import target_platform
from jax_ppo.registries import ADVANTAGE_ESTIMATORS
from jax_ppo.runtime import meshes
from jax_ppo.training.roles import resolve_roles

# What suggestions propose: adapters of this rank, and an estimator that needs nothing.
_LORA_RANK = 16
_WITHOUT_CRITIC = ADVANTAGE_ESTIMATORS.names(lambda entry: not any(entry.needs))[0]
_MAX_MODEL_PARALLELISM = 8
# Options of the packed rows of a device at once.
_ROWS = (
    ("actor", "ppo_micro_batch_size_per_device"),
    ("critic", "ppo_micro_batch_size_per_device"),
    ("rollout", "logprob_micro_batch_size_per_device"),
)
# Options of the types in which the trained parameters, their moments and gradients are stored.
_STORED = ("param_dtype", "moments_dtype", "gradient_dtype")
_IN_BFLOAT16: dict[str, Any] = dict.fromkeys(_STORED, "bfloat16")
_FIRST_CHANGES = 3  # pairs begin with one of the best single changes

Change = tuple[str, Config]  # its words on the command line, and all options after it
# (options, mesh) -> the bytes that a device needs for a run; raises `UserError` if it is impossible
Measure = Callable[[Config, Mesh], int]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of options.

    Attributes:
      options: the words of the change, as on the command line.
      needed: bytes that a device needs after it.
      config: all options after it.
    """

    options: str
    needed: int
    config: Config


def rank_remedies(
    changes: "PossibleChanges", measure: Measure, needed: int, available: float | None = None
) -> list[Remedy]:
    """Return changes of options that save memory, most effective first.

    Args:
      changes: the changes to try.
      measure: returns the bytes that a device needs after a change.
      needed: bytes that a device needs without a change.
      available: bytes of a device; if given and no change is enough, pairs of changes that are
        enough are returned, too.
    """
    remedies = list(_possible_remedies(changes, measure, needed))
    remedies.sort(key=lambda remedy: remedy.needed)
    if available is None or not remedies or remedies[0].needed <= available:
        return remedies
    pairs: dict[frozenset[str], Remedy] = {}
    for first in remedies[:_FIRST_CHANGES]:
        further = PossibleChanges(first.config, changes.mesh)
        for second in _possible_remedies(further, measure, int(available) + 1):
            options = f"{first.options} and {second.options}"
            words = frozenset((first.options, second.options))
            pairs.setdefault(words, dataclasses.replace(second, options=options))
    return sorted([*pairs.values(), *remedies], key=lambda remedy: remedy.needed)


def _possible_remedies(
    changes: "PossibleChanges", measure: Measure, needed: int
) -> Iterator[Remedy]:
    """Yield the single changes after which less than `needed` is needed."""
    for options, changed in changes:
        try:
            changed_mesh = meshes.make_mesh(changed.mesh, list(changes.mesh.devices.flat))
            changed_need = measure(changed, changed_mesh)
        except UserError:
            continue
        if changed_need < needed:
            yield Remedy(options, changed_need, changed)


def _is_allowed(change: Change) -> bool:
    try:
        validation.validate_config(change[1], "plan")
    except UserError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class PossibleChanges:
    """The changes of a PPO run: the words of each on the command line, and the options after it.

    Those that other options do not allow are left out.
    """

    config: Config
    mesh: Mesh

    def __iter__(self) -> Iterator[Change]:
        return filter(_is_allowed, self._all())

    def save_temporary_memory(self) -> Iterator[Change]:
        """Return the changes that save temporary memory only.

        More is computed again, or fewer tokens are processed at once.
        """
        return filter(_is_allowed, self._save_temporary_memory())

    def _all(self) -> Iterator[Change]:
        config = self.config
        yield from self._other_meshes()
        yield from self._save_temporary_memory()
        yield from self._use_host_memory()
        int8 = dataclasses.replace(config.rollout, quantization="int8")
        yield "config.rollout.quantization=int8", dataclasses.replace(config, rollout=int8)
        yield from self._store_bfloat16()
        lora = dataclasses.replace(config.model.lora, rank=_LORA_RANK)
        model = dataclasses.replace(config.model, lora=lora)
        yield f"config.model.lora.rank={_LORA_RANK}", dataclasses.replace(config, model=model)
        critic = dataclasses.replace(config.critic, shared_trunk=True)
        yield "config.critic.shared_trunk=True", dataclasses.replace(config, critic=critic)
        algorithm = dataclasses.replace(config.algorithm, adv_estimator=_WITHOUT_CRITIC)
        yield (
            f"config.algorithm.adv_estimator={_WITHOUT_CRITIC}",
            dataclasses.replace(config, algorithm=algorithm),
        )

    def _other_meshes(self) -> Iterator[Change]:
        """Yield changes of the meshes; the number of devices stays."""
        config = self.config
        split = meshes.split_copies(self.mesh)
        words = f"config.mesh.data=1 with config.mesh.fsdp={split.fsdp}"
        yield words, dataclasses.replace(config, mesh=split)
        if split.context == 1 and split.fsdp > 1:
            parted = dataclasses.replace(split, fsdp=1, context=split.fsdp)
            context = f"config.mesh.fsdp=1 and config.mesh.context={parted.context}"
            yield f"config.mesh.data=1 with {context}", dataclasses.replace(config, mesh=parted)
        size = 2
        while size <= _MAX_MODEL_PARALLELISM:
            if self.mesh.size % size == 0:
                rollout = dataclasses.replace(config.rollout, mesh=RolloutMesh(model=size))
                yield (
                    f"{words} and config.rollout.mesh.model={size}",
                    dataclasses.replace(config, mesh=split, rollout=rollout),
                )
            size *= 2

    def _use_host_memory(self) -> Iterator[Change]:
        """Yield changes that keep in the host's memory what a phase does not read."""
        # The memory of CPU devices is the host's.
        if target_platform() == "cpu":
            return
        config = self.config
        roles = [role for role in resolve_roles(config) if role.is_used]
        optimizers = [role.entry.optimizer_offload for role in roles if role.is_trained]
        # The base of adapters is read by every program.
        idle = [
            role.entry.param_offload
            for role in roles
            if role.entry.param_offload and not (role.entry.holds_base and config.has_adapters)
        ]
        for names in (optimizers, idle):
            changed = config
            for name in names:
                section, _, option = name.partition(".")
                options = dataclasses.replace(getattr(changed, section), **{option: True})
                changed = dataclasses.replace(changed, **{section: options})
            yield " and ".join(f"config.{name}=True" for name in names), changed

    def _store_bfloat16(self) -> Iterator[Change]:
        """Yield the change that stores what is trained in half the memory."""
        changed = self.config
        roles = [
            role.entry.section
            for role in resolve_roles(self.config)
            if role.is_used and role.is_trained
        ]
        for role in roles:
            options = getattr(changed, role)
            optim = dataclasses.replace(options.optim, **_IN_BFLOAT16)
            options = dataclasses.replace(options, optim=optim)
            changed = dataclasses.replace(changed, **{role: options})
        words = " and ".join(
            f"config.{role}.optim.{{param,moments,gradient}}_dtype=bfloat16" for role in roles
        )
        yield words, changed

    def _save_temporary_memory(self) -> Iterator[Change]:
        config = self.config
        recomputed = dataclasses.replace(
            config.model, gradient_checkpointing=True, gradient_checkpointing_policy="full"
        )
        if recomputed != config.model:
            words = (
                "config.model.gradient_checkpointing=True with "
                "config.model.gradient_checkpointing_policy=full"
            )
            yield words, dataclasses.replace(config, model=recomputed)
        for section, option in _ROWS:
            options = getattr(config, section)
            # Unset, the others follow the actor's.
            rows = getattr(options, option)
            if rows == 1 or (section != "actor" and not rows):
                continue
            options = dataclasses.replace(options, **{option: 1})
            yield f"config.{section}.{option}=1", dataclasses.replace(config, **{section: options})
        samples = meshes.rows_per_shard(self.mesh, config.data.train_batch_size) * config.rollout.n
        slots = min(config.rollout.max_num_seqs or samples, samples) // 4
        if slots:
            fewer = dataclasses.replace(config.rollout, max_num_seqs=slots)
            yield f"config.rollout.max_num_seqs={slots}", dataclasses.replace(config, rollout=fewer)
        stage = config.data.max_response_length // 4
        if config.rollout.stage_length is None and stage:
            staged = dataclasses.replace(config.rollout, stage_length=stage)
            yield (
                f"config.rollout.stage_length={stage}",
                dataclasses.replace(config, rollout=staged),
            )


def save_supervised_memory(
    mesh_options: MeshShape, supervised: Supervised, mesh: Mesh
) -> Iterator[tuple[str, MeshShape, Supervised]]:
    """Yield the words of each change for supervised training, and the sections after it."""
    split = meshes.split_copies(mesh)
    yield f"config.mesh.data=1 with config.mesh.fsdp={split.fsdp}", split, supervised
    words = " with ".join(f"config.supervised.optim.{name}=bfloat16" for name in _STORED)
    optim = dataclasses.replace(supervised.optim, **_IN_BFLOAT16)
    yield words, mesh_options, dataclasses.replace(supervised, optim=optim)
