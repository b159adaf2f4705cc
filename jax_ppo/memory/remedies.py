"""Changes of single options that make a run need less memory on each device."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jax.sharding import Mesh

from jax_ppo.config import validation
from jax_ppo.config.loading import AUTO
from jax_ppo.config.rollout_options import RolloutMesh
from jax_ppo.config.schema import Config, all_options, flatten_options, replace_options
from jax_ppo.errors import UserError
from jax_ppo.kernels.platform import target_platform
from jax_ppo.registries import ADVANTAGE_ESTIMATORS
from jax_ppo.runtime import meshes
from jax_ppo.training.roles import RunRole, resolve_roles

_LORA_RANK = 16  # suggestions propose adapters of this rank, and an estimator without requirements
_WITHOUT_CRITIC = ADVANTAGE_ESTIMATORS.names(lambda entry: not any(entry.needs))[0]
_MODEL_PARALLELISM = (2, 4, 8)
# Options of the types in which the trained parameters, their moments and gradients are stored.
_STORED = ("param_dtype", "moments_dtype", "gradient_dtype")
_FIRST_CHANGES = 3  # pairs begin with one of the best single changes

Change = tuple[str, Config]  # its words on the command line, and all options after it
# (options, mesh) -> the bytes that a device needs for a run; raises `UserError` if it is impossible
Measure = Callable[[Config, Mesh], int]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of options."""

    options: str  # the words of the change, as on the command line
    needed: int  # bytes that a device needs after it
    config: Config  # all options after it


def rank_remedies(
    changes: "PossibleChanges", measure: Measure, needed: int, available: float | None = None
) -> list[Remedy]:
    """Return changes of options that save memory, most effective first.

    A device needs `needed` bytes without a change. If it has `available` bytes, and no single
    change suffices, the pairs of changes that do are returned, too.
    """
    measured = measure_changes(changes, changes.mesh, measure)
    remedies = sorted((x for x in measured if x.needed < needed), key=lambda x: x.needed)
    if available is None or not remedies or remedies[0].needed <= available:
        return remedies
    pairs: dict[frozenset[str], Remedy] = {}
    for first in remedies[:_FIRST_CHANGES]:
        further = PossibleChanges(first.config, changes.mesh)
        for second in measure_changes(further, changes.mesh, measure):
            if second.needed > available:
                continue
            options = f"{first.options} and {second.options}"
            words = frozenset((first.options, second.options))
            pairs.setdefault(words, dataclasses.replace(second, options=options))
    return sorted([*pairs.values(), *remedies], key=lambda remedy: remedy.needed)


def measure_changes(changes: Iterable[Change], mesh: Mesh, measure: Measure) -> Iterator[Remedy]:
    """Yield the possible ones of single changes, on the devices of `mesh`."""
    for options, changed in changes:
        with contextlib.suppress(UserError):
            changed_mesh = meshes.make_mesh(changed.mesh, list(mesh.devices.flat))
            yield Remedy(options, measure(changed, changed_mesh), changed)


def _is_allowed(change: Change) -> bool:
    try:
        validation.validate_config(change[1], "plan")
    except UserError:
        return False
    return True


def set_sizes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes, of options by dotted name, that are set and could be automatic."""
    names = [option.name for option in all_options() if option.facts.is_automatic]
    return {name: options[name] for name in names if options[name] is not None}


@dataclasses.dataclass(frozen=True)
class PossibleChanges:
    """The changes of a PPO run that its other options allow."""

    config: Config
    mesh: Mesh

    def __iter__(self) -> Iterator[Change]:
        return filter(_is_allowed, self._all())

    def leave_sizes(self) -> Iterator[Change]:
        """Yield the change that lets the run choose the sizes that are set, if there are any."""
        if are_set := set_sizes(flatten_options(dataclasses.asdict(self.config))):
            words = " and ".join(f"config.{name}={AUTO}" for name in are_set)
            yield words, replace_options(self.config, dict.fromkeys(are_set))

    def save_time(self) -> Iterator[Change]:
        """Return changes that compute or exchange less, for more memory."""
        shape, changes = self.mesh.shape, []
        if self.config.model.gradient_checkpointing:
            changes.append(self._change({"model.gradient_checkpointing": False}))
        if shape["fsdp"] > 1:
            devices = shape["data"] * shape["fsdp"]
            changes.append(self._change({"mesh.data": devices, "mesh.fsdp": 1}))
        return filter(_is_allowed, changes)

    @property
    def _roles(self) -> list[RunRole]:
        return [role for role in resolve_roles(self.config) if role.is_used]

    def _all(self) -> Iterator[Change]:
        yield from self._other_meshes()
        yield from self.leave_sizes()
        yield from self._use_host_memory()
        yield self._change({"rollout.quantization": "int8"})
        yield self._store_bfloat16()
        yield self._change({"model.lora.rank": _LORA_RANK})
        yield self._change({"critic.shared_trunk": True})
        yield self._change({"algorithm.adv_estimator": _WITHOUT_CRITIC})

    def _other_meshes(self) -> Iterator[Change]:
        """Yield changes of the meshes; the number of devices stays."""
        words, whole = self._split_copies()
        yield words, whole
        split = whole.mesh
        if split.context == 1 and split.fsdp > 1:
            context, parted = PossibleChanges(whole, self.mesh)._change(
                {"mesh.fsdp": 1, "mesh.context": split.fsdp}
            )
            yield f"config.mesh.data=1 with {context}", parted
        separate = self.config.rollout.mesh.devices
        for size in _MODEL_PARALLELISM:
            if (separate or self.mesh.size) % size == 0:
                shape = RolloutMesh(model=size, devices=separate)
                decoding = replace_options(whole, {"rollout.mesh": shape})
                yield f"{words} and config.rollout.mesh.model={size}", decoding

    def _use_host_memory(self) -> Iterator[Change]:
        """Yield changes that keep in the host's memory what a phase does not read."""
        if target_platform() == "cpu":  # the memory of CPU devices is the host's
            return
        optimizers = [role.entry.optimizer_offload for role in self._roles if role.is_trained]
        idle = [  # the base of adapters is read by every program
            role.entry.param_offload
            for role in self._roles
            if role.entry.param_offload and not (role.entry.holds_base and self.config.has_adapters)
        ]
        for names in (optimizers, idle):
            yield self._change(dict.fromkeys(names, True))

    def _store_bfloat16(self) -> Change:
        sections = [role.entry.section for role in self._roles if role.is_trained]
        words = " and ".join(
            f"config.{section}.optim.{{param,moments,gradient}}_dtype=bfloat16"
            for section in sections
        )
        names = [f"{section}.optim.{name}" for section in sections for name in _STORED]
        return words, replace_options(self.config, dict.fromkeys(names, "bfloat16"))

    def _change(self, values: dict[str, Any]) -> Change:
        words = " and ".join(f"config.{name}={value}" for name, value in values.items())
        return words, replace_options(self.config, values)

    def _split_copies(self) -> Change:
        split = meshes.split_copies(self.mesh)
        words = f"config.mesh.data=1 with config.mesh.fsdp={split.fsdp}"
        return words, replace_options(self.config, {"mesh": split})


class SupervisedChanges(PossibleChanges):
    """The changes of a supervised run."""

    def __iter__(self) -> Iterator[Change]:
        yield self._split_copies()
        names = [f"supervised.optim.{name}" for name in _STORED]
        yield self._change(dict.fromkeys(names, "bfloat16"))
