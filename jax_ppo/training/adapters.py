"""The shape of a role's adapters: those in its folder, or new ones as the options describe."""

import logging
from pathlib import Path

from jax_ppo.config import parsing
from jax_ppo.config.schema import Model
from jax_ppo.errors import UserError
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.names import EXPERT_PROJECTIONS
from jax_ppo.models.hf.peft import (
    ADAPTER_CONFIG,
    holds_adapters,
    read_adapter_config,
    validate_adapters,
)
from jax_ppo.models.lora import Lora
from jax_ppo.storage import hub

log = logging.getLogger(__name__)


def read_actor_lora(
    options: Model, adapters_folder: Path | None, base_folder: Path, architecture: Architecture
) -> Lora:
    """Return the shape of the actor's adapters.

    They apply to the model in `base_folder`, and are new without `adapters_folder`.

    Raises:
      UserError: the adapters do not fit the model, or it lacks a projection that is named.
    """
    if adapters_folder:
        return read_adapters(
            adapters_folder,
            option="config.model.lora.path",
            head="lm",
            architecture=architecture,
            base_folder=base_folder,
            base_path=options.path,
        )
    targets = existing_targets(options.lora.targets, architecture)
    return Lora(rank=options.lora.rank, alpha=options.lora.alpha, targets=targets)


def existing_targets(text: str, architecture: Architecture) -> tuple[str, ...]:
    """Return the projections that `model.lora.targets` names; all-linear names all of the model's.

    As in PEFT, all-linear does not include experts.

    Raises:
      UserError: the model lacks a projection that is named, or it is one of experts.
    """
    targets = parsing.parse_lora_targets(text)
    existing = architecture.projections
    missing = [name for name in targets if name not in existing]
    if missing and text.strip() != "all-linear":
        if architecture.num_experts and not set(missing) - set(EXPERT_PROJECTIONS):
            raise UserError(
                f"config.model.lora.targets={text!r}: this model's "
                f"{', '.join(EXPERT_PROJECTIONS)} are experts', which have no adapters; leave them "
                "out, as all-linear does"
            )
        raise UserError(
            f"config.model.lora.targets={text!r}: this model has no {', '.join(missing)}, only "
            f"{', '.join(existing)}"
        )
    return tuple(name for name in targets if name in existing)


def read_adapters(
    folder: Path,
    *,
    option: str,
    head: str,
    architecture: Architecture,
    base_folder: Path,
    base_path: str,
) -> Lora:
    """Return the shape of the adapters in a folder.

    Messages name `option`; `head` is the head that comes with the adapters, `base_path` is
    `config.model.path`, and the other arguments describe the actor's base.

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
