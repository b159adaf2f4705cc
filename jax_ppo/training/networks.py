"""The roles' models: reading each role's architecture, and joining adapters with their base."""

import dataclasses
import logging
from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp

from jax_ppo.config import parsing
from jax_ppo.config.schema import Config, Model
from jax_ppo.errors import UserError
from jax_ppo.kernels import logprobs
from jax_ppo.models import attention_programs, cache
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.deberta.encoder import Deberta
from jax_ppo.models.hf.load import read_architecture, read_reward_architecture
from jax_ppo.models.hf.names import EXPERT_PROJECTIONS
from jax_ppo.models.hf.peft import (
    ADAPTER_CONFIG,
    holds_adapters,
    read_adapter_config,
    validate_adapters,
)
from jax_ppo.models.lora import Lora, join_adapters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.parallelism.context import num_row_parts
from jax_ppo.storage import hub
from jax_ppo.types import Params

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Networks:
    """The models that the parameter trees belong to; a static argument of compiled functions.

    The reference has the actor's model. A model with `lora` runs on adapters joined with their
    base, see `full_parameters`.

    Attributes:
      actor: the policy's model.
      critic: the critic's model; `None` without a critic, or if it shares the actor's trunk.
      reward: the reward model; `None` without one.
    """

    actor: Transformer
    critic: Transformer | None
    reward: Transformer | Deberta | None


@dataclasses.dataclass(frozen=True)
class Folders:
    """The folder of each role's checkpoint, in Hugging Face format; `None` if the role is absent.

    Attributes:
      actor: the policy; with `model.lora` the base of all adapters.
      critic: the model, or with `model.lora` the adapters, that the critic starts from. If this is
        the actor's folder, the critic starts with the actor's adapters.
      reward: the reward model, or adapters on the actor's base.
      adapters: the adapters that the actor starts from; `None` for new ones.
    """

    actor: Path
    critic: Path | None
    reward: Path | None
    adapters: Path | None = None

    @property
    def critic_starts_as_actor(self) -> bool:
        """Return whether the critic starts from the actor's checkpoint."""
        return self.critic is not None and self.critic.resolve() == self.actor.resolve()


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
    # Only config.json is read here; weights are loaded once everything is validated.
    architecture = read_architecture(folders.actor, needs_weights)
    decoder = build_decoder(architecture, config.model, packed_row_length(config))
    # Only the actor decodes, so only its model has a program that reads a cache.
    actor = decoder.clone(
        decoding=_cache_program(config, decoder),
        quantized=config.rollout.quantization == "int8",
        lora=_read_actor_lora(config.model, folders, architecture) if config.has_adapters else None,
    )
    critic = _read_critic(config, folders, actor, needs_weights)
    refuse_router_loss("config.actor", config.actor.router_aux_loss_coef, actor)
    refuse_router_loss("config.critic", config.critic.router_aux_loss_coef, critic)
    refuse_router_replay(config.actor.router_replay.mode, actor)
    return Networks(
        actor=actor,
        critic=critic,
        reward=_read_reward_model(config, folders, actor, needs_weights),
    )


def refuse_router_loss(section: str, coef: float, net: Transformer | None) -> None:
    """Raise `UserError` if a role without experts is to be trained on the loss of its routers."""
    if coef and net is not None and not net.architecture.num_experts:
        raise UserError(
            f"{section}.router_aux_loss_coef={coef}: must be 0, since the model has no experts"
        )


def refuse_router_replay(mode: str, actor: Transformer) -> None:
    """Raise `UserError` if the routing of an actor without experts is to be replayed."""
    if mode != "disabled" and not actor.architecture.num_experts:
        raise UserError(
            f"config.actor.router_replay.mode={mode!r}: must be 'disabled', since the model has no "
            "experts"
        )


def packed_row_length(config: Config) -> int:
    """Return L, the number of tokens of a packed row in PPO.

    Unless configured it is that of the longest sample, rounded up so that the platform's attention
    program runs. Packed rows hold further samples in the rest.
    """
    return config.packing.row_length or attention_programs.round_row_length(
        config.model.attention, _platform(), config.sequence_length, config.mesh.context
    )


def describe_attention(
    options: Model, decoder: Transformer, row_length: int, decodes: bool = False
) -> str:
    """Return a line that names the attention program of each phase.

    Args:
      options: the section of the config.
      decoder: the decoder.
      row_length: L, tokens per packed row.
      decodes: whether the built-in engine samples from this decoder.
    """
    program, platform = decoder.attention, _platform()
    reason = None
    if options.attention == "auto":
        architecture = decoder.architecture
        reason = attention_programs.program_obstacle(
            attention_programs.PLATFORM_PROGRAMS.get(platform, "xla"),
            platform,
            decoder.dtype,
            architecture.head_dim,
            row_length // num_row_parts(),
            architecture.attention_softcap,
            gpu_generation=_gpu_generation(),
        )
    line = f"attention: {program} for packed rows of {row_length} tokens"
    if num_row_parts() > 1:
        line += f" in {num_row_parts()} parts"
    if reason:
        line += f" ({reason})"
    if decodes:
        reader = "cudnn" if decoder.decoding == "cudnn" else "xla"
        line += f", xla for prompts, {reader} for decoding"
    return line


def build_decoder(architecture: Architecture, options: Model, row_length: int) -> Transformer:
    """Return the decoder for packed rows of `row_length` tokens.

    Raises:
      UserError: the attention program of `options` cannot run on this machine.
    """
    dtype = jnp.dtype(options.dtype)
    try:
        # Chosen once, by what this machine and this model can run.
        program = attention_programs.select_attention_program(
            options.attention,
            _platform(),
            dtype,
            architecture.head_dim,
            row_length // num_row_parts(),
            architecture.attention_softcap,
            gpu_generation=_gpu_generation(),
        )
    except ValueError as obstacle:
        raise UserError(
            f"config.model.attention={options.attention!r}: {obstacle}; set 'auto'"
        ) from None
    return Transformer(
        architecture,
        dtype,
        remat=options.gradient_checkpointing,
        remat_policy=options.gradient_checkpointing_policy,
        attention=program,
    )


def actor_head(shares_trunk: bool) -> str:
    """Return the head of the actor's parameters, in the terms of `heads` and the loader."""
    return "both" if shares_trunk else "lm"


def full_parameters(net: Transformer | Deberta, params: Params, base: Params | None) -> Params:
    """Return everything that `net` runs on: `params`, joined with their base if they are adapters.

    Args:
      net: the role's model.
      params: the role's parameters, or its adapters.
      base: the parameters that adapters apply to (the state's reference); `None` is enough without
        adapters.
    """
    # An encoder has no such field.
    if getattr(net, "lora", None) is None:
        return params
    assert base is not None, "adapters need their base"
    return join_adapters(base, params)


def _cache_program(config: Config, decoder: Transformer) -> str:
    """Return the program that reads the actor's cache while decoding."""
    wanted = config.rollout.attention
    try:
        return cache.select_cache_program(
            wanted,
            _platform(),
            decoder.attention,
            decoder.architecture,
            config.sequence_length,
            is_split=config.rollout.mesh.context > 1,
        )
    except ValueError as obstacle:
        raise UserError(f"config.rollout.attention={wanted!r}: {obstacle}; set 'auto'") from None


def _platform() -> str:
    """Return cpu, cuda, rocm or tpu: the platform of the mesh in context, else of this machine."""
    backend = jax.extend.backend.get_backend()
    platform = logprobs.target_platform()
    # A mesh of another machine, which programs are only compiled for.
    if platform != backend.platform:
        return {"gpu": "cuda"}.get(platform, platform)
    # JAX calls both kinds of GPU "gpu"; the version names CUDA or ROCm.
    return backend.platform_version.split()[0] if backend.platform == "gpu" else backend.platform


def _gpu_generation() -> int | None:
    """Return the major part of the compute capability of this machine's GPUs.

    `None` without NVIDIA GPUs, and where programs are only compiled for another machine: JAX
    decides by this machine which head sizes cuDNN takes.
    """
    backend = jax.extend.backend.get_backend()
    if _platform() != "cuda" or logprobs.target_platform() != backend.platform:
        return None
    # A string such as "9.0".
    return int(backend.local_devices()[0].compute_capability.split(".")[0])


def _read_critic(
    config: Config, folders: Folders, actor: Transformer, needs_weights: bool
) -> Transformer | None:
    if folders.critic is None:
        return None
    options = config.critic
    if config.has_adapters:
        # The same adapters with another head: the actor's model fits them.
        if folders.critic_starts_as_actor and not options.keep_head:
            return actor
        lora = _read_adapters(
            folders.critic,
            option="config.critic.path",
            head="reward" if options.keep_head else "scalar",
            architecture=actor.architecture,
            base_folder=folders.actor,
            base_path=config.model.path,
        )
        return actor.clone(lora=lora)
    if options.keep_head:
        architecture = _read_architecture_with_head(folders.critic, needs_weights)
    else:
        architecture = read_architecture(folders.critic, needs_weights)
    if isinstance(architecture, DebertaArchitecture):
        raise UserError(
            f"config.critic.path={options.path!r}: is an encoder, which sees a response's "
            "end from its start; a critic must be a decoder"
        )
    return build_decoder(architecture, config.model, packed_row_length(config))


def _read_architecture_with_head(
    folder: Path, needs_weights: bool
) -> Architecture | DebertaArchitecture:
    try:
        return read_reward_architecture(folder, needs_weights)
    except UserError as error:
        raise UserError(
            f"config.critic.keep_head=True: config.critic.path has no head to keep: {error}"
        ) from None


def _read_reward_model(
    config: Config, folders: Folders, actor: Transformer, needs_weights: bool
) -> Transformer | Deberta | None:
    if folders.reward is None:
        return None
    # Adapters share the actor's base; a full reward model has weights of its own.
    if config.has_adapters and holds_adapters(folders.reward):
        lora = _read_adapters(
            folders.reward,
            option="config.reward.model_path",
            head="reward",
            architecture=actor.architecture,
            base_folder=folders.actor,
            base_path=config.model.path,
        )
        return actor.clone(lora=lora)
    architecture = read_reward_architecture(folders.reward, needs_weights)
    if isinstance(architecture, DebertaArchitecture):
        return Deberta(architecture, jnp.dtype(config.model.dtype))
    return build_decoder(architecture, config.model, packed_row_length(config))


def _read_actor_lora(options: Model, folders: Folders, architecture: Architecture) -> Lora:
    """Return the shape of the actor's adapters: of those it starts from, or as the options say."""
    if folders.adapters:
        return _read_adapters(
            folders.adapters,
            option="config.model.lora.path",
            head="lm",
            architecture=architecture,
            base_folder=folders.actor,
            base_path=options.path,
        )
    if architecture.num_experts:
        targets = targets_beside_experts(options.lora.targets)
    else:
        targets = existing_targets(options.lora.targets, architecture)
    return Lora(rank=options.lora.rank, alpha=options.lora.alpha, targets=targets)


def existing_targets(text: str, architecture: Architecture) -> tuple[str, ...]:
    """Return the projections that `model.lora.targets` names; all-linear names those there are.

    Raises:
      UserError: the model lacks a projection that is named.
    """
    targets = parsing.parse_lora_targets(text)
    existing = ("q_proj", "k_proj", "v_proj", "o_proj", *architecture.mlp_projections)
    missing = [name for name in targets if name not in existing]
    if missing and text.strip() != "all-linear":
        raise UserError(
            f"config.model.lora.targets={text!r}: this model has no {', '.join(missing)}, only "
            f"{', '.join(existing)}"
        )
    return tuple(name for name in targets if name in existing)


def targets_beside_experts(text: str) -> tuple[str, ...]:
    """Return the projections that `model.lora.targets` names where those of the MLP are experts'.

    As in PEFT, all-linear does not include experts.

    Raises:
      UserError: a projection of the experts is named.
    """
    targets = parsing.parse_lora_targets(text)
    attention = tuple(name for name in targets if name not in EXPERT_PROJECTIONS)
    if attention != targets and text.strip() != "all-linear":
        raise UserError(
            f"config.model.lora.targets={text!r}: this model's "
            f"{', '.join(EXPERT_PROJECTIONS)} are experts', which have no adapters; leave them "
            "out, as all-linear does"
        )
    return attention


def _read_adapters(
    folder: Path,
    *,
    option: str,
    head: str,
    architecture: Architecture,
    base_folder: Path,
    base_path: str,
) -> Lora:
    """Return the shape of the adapters in a folder.

    Args:
      folder: of the adapters, in PEFT format.
      option: the option that names the folder, for error messages.
      head: the head that the adapters come with.
      architecture: the base's.
      base_folder: of the actor's base.
      base_path: `config.model.path`.

    Raises:
      UserError: the folder does not hold adapters on the actor's base.
    """
    # Weights of a full model would need a second base on the devices.
    if not holds_adapters(folder):
        raise UserError(
            f"{option}: {folder} holds no adapters ({ADAPTER_CONFIG}); with config.model.lora they "
            "must stand on config.model.path's weights, which all roles share"
        )
    lora, named_base = read_adapter_config(folder, architecture)
    described = (
        f"the adapters in {folder} stand on {named_base!r} "
        f"(base_model_name_or_path in {ADAPTER_CONFIG})"
    )
    # A local folder is certain to be another model; a hub name may be the same one.
    if named_base and Path(named_base).is_dir():
        if Path(named_base).resolve() != base_folder.resolve():
            raise UserError(
                f"{option}: {described}, not on config.model.path={base_path!r}; set that, or "
                "where it is the same model in another folder, the field"
            )
    elif named_base and named_base != hub.split_revision(base_path)[0]:
        log.warning(
            "%s: %s, which should be config.model.path=%r under another name",
            option,
            described,
            base_path,
        )
    # Names and shapes of the weights, before any are loaded.
    validate_adapters(folder, architecture, lora, head)
    return lora
