"""Checks of config.json that decoders and encoders share."""

from typing import Any

from jax_ppo.errors import UserError

REQUIRED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def require_sizes(config: dict[str, Any]) -> None:
    """Raise `UserError` unless the sizes that every model needs are integers."""
    for name in REQUIRED_SIZES:
        if not isinstance(config.get(name), int):
            raise UserError(
                f"config.json: {name} must be a whole number, it is {config.get(name)!r}"
            )


def refuse_quantization(config: dict[str, Any]) -> None:
    """Raise `UserError` for a quantized checkpoint."""
    if config.get("quantization_config"):
        raise UserError(
            "config.json: quantization_config is not supported; use a checkpoint in float32 or "
            "bfloat16"
        )
