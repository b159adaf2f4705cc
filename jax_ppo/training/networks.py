"""The roles' models: reading each role's architecture, and joining adapters with their base."""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_ppo.config import parsing
from jax_ppo.config.schema import Config, Critic
from jax_ppo.errors import UserError
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta_encoder import Deberta
from jax_ppo.models.hf.deberta import DebertaArchitecture
from jax_ppo.models.hf.load import read_architecture, read_reward_architecture
from jax_ppo.models.hf.names import EXPERT_PROJECTIONS
from jax_ppo.models.hf.peft import (
    ADAPTER_CONFIG,
    holds_adapters,
    holds_critic,
    read_adapter_config,
    validate_adapters,
)
from jax_ppo.models.lora import Lora, join_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.storage import hub
from jax_ppo.training.decoders import build_decoder, decoding_program, packed_row_length
from jax_ppo.types import Params

log = logging.getLogger(__name__)


class Networks(dict[str, Any]):
    """The models by the names of roles; a static argument of compiled functions.

    The reference has the actor's model, unless it is adapters (`reference_adapters`).
    """

    def __hash__(self) -> int:  # type: ignore[override]  # nothing changes it
        return hash(frozenset(self.items()))

    @property
    def actor(self) -> Transformer:
        """Return the policy's model."""
        actor: Transformer = self["actor"]
        return actor

    @property
    def critic(self) -> Transformer | None:
        """Return the critic's model; `None` without one, or if it shares the actor's trunk."""
        return self.get("critic")

    @property
    def reward(self) -> Transformer | Deberta | None:
        """Return the reward model; `None` without one."""
        return self.get("reward")

    def with_ids(self, count: int) -> "Networks":
        """Return the models, of whose vocabulary only the first `count` ids are drawn."""
        if count >= self.actor.architecture.vocab_size:
            return self
        decoders = {
            name: net.clone(architecture=dataclasses.replace(net.architecture, num_ids=count))
            for name, net in self.items()
            if isinstance(net, Transformer)
        }
        return Networks(**{**self, **decoders})


class Folders(dict[str, Path]):
    """The folder of each role's checkpoint, in Hugging Face format, by the name of the role.

    With `model.lora` the actor's is the base of all adapters, and `adapters` the folder that the
    actor's start from, if any. A role without a folder starts from the actor's checkpoint.
    """

    @property
    def actor(self) -> Path:
        """Return the folder of the actor."""
        return self["actor"]

    def is_actors(self, name: str) -> bool:
        """Return whether a role starts from the actor's checkpoint."""
        return name in self and self[name].resolve() == self.actor.resolve()


@dataclasses.dataclass(frozen=True)
class NetworkReader:
    """Reads the models of a run from the folders of its roles; a plan needs no weights in them."""

    config: Config
    folders: Folders
    needs_weights: bool

    @functools.cached_property
    def actor(self) -> Transformer:
        """Return the policy's model."""
        config, folders = self.config, self.folders
        # Only config.json is read here; weights are loaded once everything is validated.
        architecture = read_architecture(folders.actor, self.needs_weights)
        decoder = self._build_decoder(architecture)
        lora = None
        if config.has_adapters:
            options = config.model.lora
            if "adapters" in folders:
                lora = self._read_lora("adapters", "model.lora.path", "lm", architecture)
            else:
                targets = existing_targets(options.targets, architecture)
                lora = Lora(rank=options.rank, alpha=options.alpha, targets=targets)
        # Only the actor decodes, so only its model has a program that reads a cache.
        actor = decoder.clone(
            decoding=decoding_program(config.rollout, config.sequence_length, decoder),
            quantized=config.rollout.quantization == "int8",
            lora=lora,
        )
        coef, mode = config.actor.router_aux_loss_coef, config.actor.router_replay.mode
        refuse_without_experts("actor.router_aux_loss_coef", coef, 0, actor)
        refuse_without_experts("actor.router_replay.mode", mode, "disabled", actor)
        return actor

    def validate_reference(self) -> Transformer:
        """Return the actor's model; raise `UserError` unless the reference fits it."""
        setting = f"config.reference.path={self.config.reference.path!r}"
        folder = self.folders["reference"]
        _refuse_adapters(folder, setting)
        reference = read_architecture(folder, self.needs_weights)
        expected = self.actor.architecture
        differences = [
            f"{field.name} {getattr(reference, field.name)} instead of "
            f"{getattr(expected, field.name)}"
            for field in dataclasses.fields(expected)
            if field.name not in ("eos_ids", "bos_id", "pad_id")  # no log-prob depends on these
            and getattr(reference, field.name) != getattr(expected, field.name)
        ]
        if differences:
            raise UserError(
                f"{setting}: expected the actor's architecture, found {', '.join(differences)}"
            )
        return self.actor

    def read_reference_adapters(self) -> Transformer:
        """Return the actor's model with the reference's adapters."""
        return self._with_adapters("reference_adapters", "reference.path", "lm")

    def read_critic(self) -> Transformer:
        """Return the model of a separate critic."""
        options, folders = self.config.critic, self.folders
        folder = folders["critic"]
        head = critic_head(options, folder)
        if self.config.has_adapters:
            critic = self.actor
            # The same adapters with another head: the actor's model fits them.
            if not folders.is_actors("critic") or head != "scalar":
                critic = self._with_adapters("critic", "critic.path", head)
        else:
            _refuse_adapters(folder, f"config.critic.path={options.path!r}")
            if head == "reward":
                try:
                    architecture = read_reward_architecture(folder, self.needs_weights)
                except UserError as error:
                    raise UserError(
                        f"config.critic.path={options.path!r}: has no head that can be kept; "
                        f"config.critic.keep_head=False starts with a head of zeros: {error}"
                    ) from None
            else:
                architecture = read_architecture(folder, self.needs_weights)
            if isinstance(architecture, DebertaArchitecture):
                raise UserError(
                    f"config.critic.path={options.path!r}: is an encoder, which sees a response's "
                    "end from its start; a critic must be a decoder"
                )
            critic = self._build_decoder(architecture)
        coef = options.router_aux_loss_coef
        refuse_without_experts("critic.router_aux_loss_coef", coef, 0, critic)
        return critic

    def read_reward_model(self) -> Transformer | Deberta:
        """Return a decoder, an encoder, or the actor's model with other adapters."""
        folder = self.folders["reward"]
        option = "reward.model_path"
        # Adapters share the actor's base; a full reward model has separate weights.
        if self.config.has_adapters and holds_adapters(folder):
            return self._with_adapters("reward", option, "reward")
        _refuse_adapters(folder, f"config.{option}={self.config.reward.model_path!r}")
        architecture = read_reward_architecture(folder, self.needs_weights)
        if isinstance(architecture, DebertaArchitecture):
            return Deberta(architecture, jnp.dtype(self.config.model.dtype))
        return self._build_decoder(architecture)

    def read_teacher(self) -> Transformer:
        """Return the teacher's model: a decoder, or the actor's model with other adapters."""
        config, folder = self.config, self.folders["teacher"]
        option = "teacher.path"
        if config.has_adapters and holds_adapters(folder):
            return self._with_adapters("teacher", option, "lm")
        _refuse_adapters(folder, f"config.{option}={config.teacher.path!r}")
        architecture = read_architecture(folder, self.needs_weights)
        # Log-probs of tokens need the same tokens; sums over the vocabulary need the same logits.
        for field in ("vocab_size", "logit_softcap"):
            teachers, actors = (getattr(x, field) for x in (architecture, self.actor.architecture))
            if config.teacher.loss_coef and teachers != actors:
                raise UserError(
                    f"config.teacher.path={config.teacher.path!r}: its {field} is {teachers}; "
                    f"expected the actor's {actors}, or config.teacher.loss_coef=0, which needs "
                    "only the same tokenizer"
                )
        return self._build_decoder(architecture)

    def _build_decoder(self, architecture: Architecture) -> Transformer:
        return build_decoder(architecture, self.config.model, packed_row_length(self.config))

    def _with_adapters(self, role: str, option: str, head: str) -> Transformer:
        return self.actor.clone(lora=self._read_lora(role, option, head, self.actor.architecture))

    def _read_lora(self, role: str, option: str, head: str, architecture: Architecture) -> Lora:
        """Return the shape of a role's adapters; raise `UserError` if they have another base."""
        folder, base = self.folders[role], self.config.model.path
        # Weights of a full model would need a second base on the devices.
        if not holds_adapters(folder):
            raise UserError(
                f"config.{option}: {folder} holds no adapters ({ADAPTER_CONFIG}); with "
                "config.model.lora, all roles share the weights of config.model.path and differ in "
                "their adapters"
            )
        lora, named_base = read_adapter_config(folder, architecture)
        described = (
            f"the adapters in {folder} belong to {named_base!r} "
            f"(base_model_name_or_path in {ADAPTER_CONFIG})"
        )
        # A local folder is certain to be another model; a hub name may be the same one.
        if named_base and Path(named_base).is_dir():
            if Path(named_base).resolve() != self.folders.actor.resolve():
                raise UserError(
                    f"config.{option}: {described}, not to config.model.path={base!r}; change that "
                    "option, or the field if both folders hold the same model"
                )
        elif named_base and named_base != hub.split_revision(base)[0]:
            log.warning(
                "config.%s: %s, which should be another name of config.model.path=%r",
                option,
                described,
                base,
            )
        # Names and shapes of the weights, before any are loaded.
        validate_adapters(folder, architecture, lora, head)
        return lora


def _refuse_adapters(folder: Path, setting: str) -> None:
    if holds_adapters(folder):
        raise UserError(
            f"{setting}: holds adapters; expected all weights, as in the folder `actor` that a run "
            "with adapters exports, or as PEFT's merge_and_unload makes them"
        )


def refuse_without_experts(option: str, value: object, off: object, net: Transformer) -> None:
    """Raise `UserError` if an option of routers is not `off`, but the model has no experts."""
    if value != off and not net.architecture.num_experts:
        raise UserError(
            f"config.{option}={value!r}: must be {off!r}, since the model has no experts"
        )


def full_parameters(net: Transformer | Deberta, params: Params, base: Params | None) -> Params:
    """Return everything that `net` runs on: `params`, joined with `base` if they are adapters."""
    if getattr(net, "lora", None) is None:  # an encoder has no such field
        return params
    assert base is not None, "adapters need their base"
    return join_params(base, params)


def critic_head(options: Critic, folder: Path | None) -> str:
    """Return "reward" if the critic keeps the head in its folder, "scalar" if it starts anew."""
    keeps_head = options.keep_head
    if keeps_head is None:
        keeps_head = bool(options.path) and folder is not None and holds_critic(folder)
    return "reward" if keeps_head else "scalar"


def existing_targets(text: str, architecture: Architecture) -> tuple[str, ...]:
    """Return the projections that `model.lora.targets` names; all-linear names all but experts.

    Raise `UserError` for the name of one that the model lacks, or that is of experts.
    """
    targets = parsing.parse_lora_targets(text)
    existing = architecture.projections
    missing = [name for name in targets if name not in existing]
    if missing and text.strip() != "all-linear":
        if architecture.num_experts and not set(missing) - set(EXPERT_PROJECTIONS):
            raise UserError(
                f"config.model.lora.targets={text!r}: this model's "
                f"{', '.join(EXPERT_PROJECTIONS)} belong to experts, which have no adapters; leave "
                "them out, as all-linear does"
            )
        raise UserError(
            f"config.model.lora.targets={text!r}: this model has no {', '.join(missing)}, only "
            f"{', '.join(existing)}"
        )
    return tuple(name for name in targets if name in existing)
