"""The roles' models: reading each role's architecture, and joining adapters with their base."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from jax_ppo.config.schema import Config, Critic
from jax_ppo.errors import UserError
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.deberta.encoder import Deberta
from jax_ppo.models.hf.load import read_architecture, read_reward_architecture
from jax_ppo.models.hf.peft import holds_adapters, holds_critic
from jax_ppo.models.lora import join_adapters
from jax_ppo.models.transformer import Transformer
from jax_ppo.training.adapters import read_actor_lora, read_adapters
from jax_ppo.training.decoders import build_decoder, decoding_program, packed_row_length
from jax_ppo.types import Params


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
      reference: the reference; `None` for the actor's checkpoint.
    """

    actor: Path
    critic: Path | None
    reward: Path | None
    adapters: Path | None = None
    reference: Path | None = None

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
    # Only config.json is read here; weights are loaded once everything is validated. A small model
    # that the run makes for itself is trained after that.
    actor_needs_weights = needs_weights and bool(config.model.path)
    architecture = read_architecture(folders.actor, actor_needs_weights)
    if folders.reference is not None:
        _validate_reference(config, folders.reference, architecture, needs_weights)
    decoder = build_decoder(architecture, config.model, packed_row_length(config))
    lora = None
    if config.has_adapters:
        lora = read_actor_lora(config.model, folders.adapters, folders.actor, architecture)
    # Only the actor decodes, so only its model has a program that reads a cache.
    actor = decoder.clone(
        decoding=decoding_program(config, decoder),
        quantized=config.rollout.quantization == "int8",
        lora=lora,
    )
    critic_needs_weights = needs_weights if config.critic.path else actor_needs_weights
    critic = _read_critic(config, folders, actor, critic_needs_weights)
    refuse_router_loss("config.actor", config.actor.router_aux_loss_coef, actor)
    refuse_router_loss("config.critic", config.critic.router_aux_loss_coef, critic)
    refuse_router_replay(config.actor.router_replay.mode, actor)
    return Networks(
        actor=actor,
        critic=critic,
        reward=_read_reward_model(config, folders, actor, needs_weights),
    )


def _validate_reference(
    config: Config, folder: Path, actor: Architecture, needs_weights: bool
) -> None:
    """Raise `UserError` unless the reference is a policy of the actor's architecture."""
    setting = f"config.reference.path={config.reference.path!r}"
    _refuse_adapters(folder, setting)
    reference = read_architecture(folder, needs_weights)
    differences = [
        f"{field.name} {getattr(reference, field.name)} instead of {getattr(actor, field.name)}"
        for field in dataclasses.fields(actor)
        # What ends a response does not matter to log-probs.
        if field.name != "eos_ids" and getattr(reference, field.name) != getattr(actor, field.name)
    ]
    if differences:
        raise UserError(
            f"{setting}: expected the actor's architecture, found {', '.join(differences)}"
        )


def _refuse_adapters(folder: Path, setting: str) -> None:
    """Raise `UserError` for adapters where all weights are expected."""
    if holds_adapters(folder):
        raise UserError(
            f"{setting}: holds adapters; expected all weights, as in the folder `actor` that a run "
            "with adapters exports, or as PEFT's merge_and_unload makes them"
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


def critic_head(options: Critic, folder: Path | None) -> str:
    """Return "reward" if the critic keeps the head in its folder, "scalar" if it starts anew."""
    keeps_head = options.keep_head
    if keeps_head is None:
        keeps_head = bool(options.path) and folder is not None and holds_critic(folder)
    return "reward" if keeps_head else "scalar"


def _read_critic(
    config: Config, folders: Folders, actor: Transformer, needs_weights: bool
) -> Transformer | None:
    if folders.critic is None:
        return None
    options = config.critic
    head = critic_head(options, folders.critic)
    if config.has_adapters:
        # The same adapters with another head: the actor's model fits them.
        if folders.critic_starts_as_actor and head == "scalar":
            return actor
        lora = read_adapters(
            folders.critic,
            option="config.critic.path",
            head=head,
            architecture=actor.architecture,
            base_folder=folders.actor,
            base_path=config.model.path,
        )
        return actor.clone(lora=lora)
    _refuse_adapters(folders.critic, f"config.critic.path={options.path!r}")
    if head == "reward":
        architecture = _read_architecture_with_head(options, folders.critic, needs_weights)
    else:
        architecture = read_architecture(folders.critic, needs_weights)
    if isinstance(architecture, DebertaArchitecture):
        raise UserError(
            f"config.critic.path={options.path!r}: is an encoder, which sees a response's "
            "end from its start; a critic must be a decoder"
        )
    return build_decoder(architecture, config.model, packed_row_length(config))


def _read_architecture_with_head(
    options: Critic, folder: Path, needs_weights: bool
) -> Architecture | DebertaArchitecture:
    try:
        return read_reward_architecture(folder, needs_weights)
    except UserError as error:
        if options.keep_head is None:
            raise UserError(
                f"config.critic.path={options.path!r}: holds a critic whose head cannot be kept; "
                f"config.critic.keep_head=False starts with a head of zeros: {error}"
            ) from None
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
        lora = read_adapters(
            folders.reward,
            option="config.reward.model_path",
            head="reward",
            architecture=actor.architecture,
            base_folder=folders.actor,
            base_path=config.model.path,
        )
        return actor.clone(lora=lora)
    _refuse_adapters(folders.reward, f"config.reward.model_path={config.reward.model_path!r}")
    architecture = read_reward_architecture(folders.reward, needs_weights)
    if isinstance(architecture, DebertaArchitecture):
        return Deberta(architecture, jnp.dtype(config.model.dtype))
    return build_decoder(architecture, config.model, packed_row_length(config))
