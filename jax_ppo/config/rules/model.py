"""Rules of the models and their adapters."""

import dataclasses

from jax_ppo.config import parsing
from jax_ppo.config.schema import Create, Data, Lora, Model, Supervised
from jax_ppo.errors import UserError


def require_model_or_arithmetic(model: Model, data: Data) -> None:
    """Raise `UserError` without a model, except for the data that a model is created for."""
    # The created model is taught only arithmetic.
    if not model.path and not data.train_files.startswith("arithmetic:"):
        raise UserError(
            "config.model.path='': must be set to a Hugging Face folder or hub name; a model is "
            "created only for the `arithmetic` data"
        )


def require_heads_divide_width(create: Create) -> None:
    """Raise `UserError` unless the small model's heads divide its width."""
    if create.hidden_size % create.num_heads or create.num_heads % create.num_kv_heads:
        raise UserError(
            f"config.model.create: num_heads={create.num_heads} must divide "
            f"hidden_size={create.hidden_size}, and num_kv_heads={create.num_kv_heads} must divide "
            "num_heads"
        )


def require_known_lora_targets(lora: Lora) -> None:
    """Raise `UserError` for an adapter target that is not a projection."""
    try:
        parsing.parse_lora_targets(lora.targets)
    except ValueError as error:
        raise UserError(f"config.model.lora.targets={lora.targets!r}: {error}") from None


def require_lora_path_alone(lora: Lora) -> None:
    """Raise `UserError` for a rank, alpha or targets besides adapters that determine them."""
    if lora.path and lora != dataclasses.replace(Lora(), path=lora.path):
        raise UserError(
            f"config.model.lora.path={lora.path!r}: determines rank, alpha and targets; leave "
            "config.model.lora.rank, alpha and targets at their defaults"
        )


def reject_adapters(lora: Lora, command: str) -> None:
    """Raise `UserError` for adapters in supervised training."""
    for name in ("rank", "path"):
        if value := getattr(lora, name):
            raise UserError(
                f"config.model.lora.{name}={value!r}: jax_ppo.{command} trains all parameters, "
                "only jax_ppo.train trains adapters; leave it unset"
            )


def reject_center_coef_in_sft(supervised: Supervised, command: str) -> None:
    """Raise `UserError` for the reward model's loss term in fine-tuning."""
    center_coef = supervised.center_coef
    if command == "sft" and center_coef:
        raise UserError(
            f"config.supervised.center_coef={center_coef}: only jax_ppo.reward_model reads it"
        )
