"""Changes of single options that make a run need less memory on each device."""

import dataclasses
from collections.abc import Callable, Iterator

from jax.sharding import Mesh

from jax_ppo.config import validation
from jax_ppo.config.schema import Config, RolloutMesh
from jax_ppo.errors import UserError
from jax_ppo.kernels.platform import target_platform
from jax_ppo.runtime import meshes
from jax_ppo.training.networks import Networks

# What suggestions propose: adapters of this rank, and an estimator that needs no critic.
_LORA_RANK = 16
_WITHOUT_CRITIC = "reinforce_plus_plus"
_MAX_MODEL_PARALLELISM = 8
# Options of the packed rows of a device at once.
_ROWS = (
    ("actor", "ppo_micro_batch_size_per_device"),
    ("critic", "ppo_micro_batch_size_per_device"),
    ("rollout", "logprob_micro_batch_size_per_device"),
)
_FIRST_CHANGES = 3  # pairs begin with one of the best single changes

# (options, models, mesh) -> the bytes that a device needs for a run
Measure = Callable[[Config, Networks, Mesh], int]


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
    config: Config,
    mesh: Mesh,
    needed: int,
    read_nets: Callable[[Config], Networks],
    measure: Measure,
    available: float | None = None,
) -> list[Remedy]:
    """Return changes of options that save memory, most effective first.

    Args:
      config: all options.
      mesh: the run's mesh.
      needed: bytes that a device needs without a change.
      read_nets: returns each role's model after a change.
      measure: returns the bytes that a device needs after a change.
      available: bytes of a device; if given and no change is enough, pairs of changes that are
        enough are returned, too.
    """
    remedies = list(_possible_remedies(config, mesh, needed, read_nets, measure))
    remedies.sort(key=lambda remedy: remedy.needed)
    if available is None or not remedies or remedies[0].needed <= available:
        return remedies
    pairs: dict[frozenset[str], Remedy] = {}
    for first in remedies[:_FIRST_CHANGES]:
        seconds = _possible_remedies(first.config, mesh, int(available) + 1, read_nets, measure)
        for second in seconds:
            options = f"{first.options} and {second.options}"
            words = frozenset((first.options, second.options))
            pairs.setdefault(words, dataclasses.replace(second, options=options))
    return sorted([*pairs.values(), *remedies], key=lambda remedy: remedy.needed)


def _possible_remedies(
    config: Config,
    mesh: Mesh,
    needed: int,
    read_nets: Callable[[Config], Networks],
    measure: Measure,
) -> Iterator[Remedy]:
    """Yield the single changes after which less than `needed` is needed."""
    for options, changed in _possible_changes(config, mesh):
        # Skip a change that other options do not allow.
        try:
            validation.validate_train_config(changed)
            changed_mesh = meshes.make_mesh(changed.mesh, list(mesh.devices.flat))
            rollout_mesh = meshes.make_rollout_mesh(changed_mesh, changed.rollout.mesh)
            nets = read_nets(changed)
            for shape in (changed_mesh, rollout_mesh):
                meshes.validate_architecture(shape, nets.actor.architecture)
            changed_need = measure(changed, nets, changed_mesh)
        except UserError:
            continue
        if changed_need < needed:
            yield Remedy(options, changed_need, changed)


def _possible_changes(config: Config, mesh: Mesh) -> Iterator[tuple[str, Config]]:
    """Yield the words of each change on the command line, and the options after it."""
    yield from _other_meshes(config, mesh)
    yield from temporary_savings(config, mesh)
    yield from _host_memory(config)
    int8 = dataclasses.replace(config.rollout, quantization="int8")
    yield "config.rollout.quantization=int8", dataclasses.replace(config, rollout=int8)
    yield from _bfloat16_storage(config)
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


def _other_meshes(config: Config, mesh: Mesh) -> Iterator[tuple[str, Config]]:
    """Yield changes of the meshes; the number of devices stays."""
    split = meshes.split_copies(mesh)
    words = f"config.mesh.data=1 with config.mesh.fsdp={split.fsdp}"
    yield words, dataclasses.replace(config, mesh=split)
    if split.context == 1 and split.fsdp > 1:
        parted = dataclasses.replace(split, fsdp=1, context=split.fsdp)
        yield (
            f"config.mesh.data=1 with config.mesh.fsdp=1 and config.mesh.context={parted.context}",
            dataclasses.replace(config, mesh=parted),
        )
    size = 2
    while size <= _MAX_MODEL_PARALLELISM:
        if mesh.size % size == 0:
            rollout = dataclasses.replace(config.rollout, mesh=RolloutMesh(model=size))
            yield (
                f"{words} and config.rollout.mesh.model={size}",
                dataclasses.replace(config, mesh=split, rollout=rollout),
            )
        size *= 2


def _host_memory(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield changes that keep in the host's memory what a phase does not read."""
    # The memory of CPU devices is the host's.
    if target_platform() == "cpu":
        return
    optimizers = [f"{role}.optimizer_offload" for role in _trained_roles(config)]
    idle = []
    if config.keeps_reference and not config.has_adapters:
        idle.append("algorithm.reference_offload")
    if "critic" in _trained_roles(config):
        idle.append("critic.param_offload")
    if config.reward.model_path:
        idle.append("reward.param_offload")
    for names in (optimizers, idle):
        changed = config
        for name in names:
            section, _, option = name.partition(".")
            options = dataclasses.replace(getattr(changed, section), **{option: True})
            changed = dataclasses.replace(changed, **{section: options})
        yield " and ".join(f"config.{name}=True" for name in names), changed


def _trained_roles(config: Config) -> list[str]:
    if config.has_critic and not config.shares_trunk:
        return ["actor", "critic"]
    return ["actor"]


def _bfloat16_storage(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield the change that stores what is trained in half the memory."""
    roles = _trained_roles(config)
    changed = config
    for role in roles:
        options = getattr(changed, role)
        optim = dataclasses.replace(
            options.optim,
            param_dtype="bfloat16",
            moments_dtype="bfloat16",
            gradient_dtype="bfloat16",
        )
        changed = dataclasses.replace(changed, **{role: dataclasses.replace(options, optim=optim)})
    words = " and ".join(
        f"config.{role}.optim.{{param,moments,gradient}}_dtype=bfloat16" for role in roles
    )
    yield words, changed


def temporary_savings(config: Config, mesh: Mesh) -> Iterator[tuple[str, Config]]:
    """Yield changes that save temporary memory only.

    More is computed again, or fewer tokens are processed at once.
    """
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
        if getattr(options, option) == 1 or (section != "actor" and not getattr(options, option)):
            continue
        options = dataclasses.replace(options, **{option: 1})
        yield f"config.{section}.{option}=1", dataclasses.replace(config, **{section: options})
    samples = meshes.rows_per_shard(mesh, config.data.train_batch_size) * config.rollout.n
    slots = min(config.rollout.max_num_seqs or samples, samples) // 4
    if slots:
        fewer = dataclasses.replace(config.rollout, max_num_seqs=slots)
        yield f"config.rollout.max_num_seqs={slots}", dataclasses.replace(config, rollout=fewer)
    stage = config.data.max_response_length // 4
    if config.rollout.stage_length is None and stage:
        staged = dataclasses.replace(config.rollout, stage_length=stage)
        yield f"config.rollout.stage_length={stage}", dataclasses.replace(config, rollout=staged)
