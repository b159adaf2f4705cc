"""Description of a DeBERTa-v2 or v3 encoder, read from Hugging Face's config.json."""

import dataclasses
from typing import Any

from jax_ppo.errors import UserError
from jax_ppo.models.hf.validation import refuse_quantization, require_sizes

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")


@dataclasses.dataclass(frozen=True)
class DebertaArchitecture:
    """The architecture of an encoder. Hashable: it is a static argument of compiled functions.

    Attributes:
      family: Hugging Face's `model_type`.
      vocab_size: V, number of rows of the word embedding.
      embedding_size: E, width of the word embedding; if it is not D, a projection follows.
      hidden_size: D.
      intermediate_size: Width of the MLP.
      num_layers: Number of layers.
      num_heads: Number of attention heads; it divides `hidden_size`.
      activation: Activation of the MLP, one of `ACTIVATIONS`.
      pooler_activation: Activation of the pooler.
      conv_activation: Activation of the convolution.
      norm_epsilon: Epsilon of LayerNorm.
      max_position_embeddings: Longest sequence that the model was made for, in tokens.
      absolute_positions: Whether position embeddings are added to the word embeddings.
      relative_span: S; each relative distance from -S to S - 1 has an embedding.
      log_buckets: Whether distant positions share embeddings, in buckets of geometrically growing
        width (position_buckets > 0 in config.json).
      max_relative_distance: With `log_buckets`, the distance where the last bucket ends.
      content_to_position: Whether attention has the term between a query and a relative position.
      position_to_content: Whether attention has the term between a relative position and a key.
      share_keys: Whether these terms use the projections of the content.
      norm_relative: Whether the embeddings of distances are normalized by a LayerNorm.
      conv_kernel_size: Width of the convolution beside the first layer, an odd number; 0: none.
    """

    family: str
    vocab_size: int
    embedding_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str = "gelu"
    pooler_activation: str = "gelu"
    conv_activation: str = "tanh"
    norm_epsilon: float = 1e-7
    max_position_embeddings: int = 512
    absolute_positions: bool = True
    relative_span: int = 512
    log_buckets: bool = False
    max_relative_distance: int = 512
    content_to_position: bool = False
    position_to_content: bool = False
    share_keys: bool = False
    norm_relative: bool = False
    conv_kernel_size: int = 0

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads, which is that of the query heads."""
        return self.num_heads


def deberta_from_hf_config(config: dict[str, Any]) -> DebertaArchitecture:
    """Return the architecture that config.json describes.

    Args:
      config: Contents of config.json.

    Raises:
      UserError: A field is missing or has an unsupported value; the message names it.
    """
    _refuse_unsupported(config)
    hidden_size = config["hidden_size"]
    max_length = config.get("max_position_embeddings", 512)
    max_distance = config.get("max_relative_positions", -1)
    if max_distance < 1:
        max_distance = max_length
    buckets = config.get("position_buckets", -1)
    attention_terms = _split_list(config.get("pos_att_type"))
    return DebertaArchitecture(
        family=config["model_type"],
        vocab_size=config["vocab_size"],
        embedding_size=config.get("embedding_size", hidden_size),
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        activation=config.get("hidden_act", "gelu"),
        pooler_activation=config.get("pooler_hidden_act", "gelu"),
        conv_activation=config.get("conv_act", "tanh"),
        norm_epsilon=config.get("layer_norm_eps", 1e-7),
        max_position_embeddings=max_length,
        absolute_positions=bool(config.get("position_biased_input", True)),
        relative_span=buckets if buckets > 0 else max_distance,
        log_buckets=buckets > 0,
        max_relative_distance=max_distance,
        content_to_position="c2p" in attention_terms,
        position_to_content="p2c" in attention_terms,
        share_keys=bool(config.get("share_att_key", False)),
        norm_relative="layer_norm" in _split_list(config.get("norm_rel_ebd")),
        conv_kernel_size=config.get("conv_kernel_size", 0),
    )


def _split_list(value: str | list[str] | None) -> list[str]:
    """Return ["p2c", "c2p"] for that list or for "p2c|c2p", and [] for `None` or "none"."""
    parts = value.lower().split("|") if isinstance(value, str) else value or []
    return [part.strip() for part in parts if part.strip() not in ("", "none")]


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Raise `UserError` for a model that the encoder would compute differently."""
    require_sizes(config)
    hidden_size = config["hidden_size"]
    num_heads = config["num_attention_heads"]
    if hidden_size % num_heads:
        raise UserError(
            f"config.json: num_attention_heads={num_heads} must divide hidden_size={hidden_size}"
        )
    kernel_size = config.get("conv_kernel_size", 0)
    if kernel_size < 0 or (kernel_size and kernel_size % 2 == 0):
        raise UserError(
            f"config.json: conv_kernel_size {kernel_size} is not supported, only 0 and odd "
            "numbers are"
        )
    supported_values = {
        "relative_attention": True,
        "type_vocab_size": 0,
        "conv_groups": 1,
        "pooler_hidden_size": hidden_size,
        "attention_head_size": hidden_size // num_heads,
    }
    # A missing relative_attention means False; the other fields default to the supported value.
    fields = {**supported_values, "relative_attention": False, **config}
    for name, value in supported_values.items():
        if fields[name] != value:
            raise UserError(
                f"config.json: {name} {fields[name]!r} is not supported, only {value!r} is"
            )
    _refuse_unknown_names(config, has_convolution=kernel_size > 0)
    refuse_quantization(config)


def _refuse_unknown_names(config: dict[str, Any], has_convolution: bool) -> None:
    """Raise `UserError` for an unknown activation, attention term or normalization."""
    activations = ["hidden_act", "pooler_hidden_act"]
    if has_convolution:
        activations.append("conv_act")
    for name in activations:
        if config.get(name, "gelu") not in ACTIVATIONS:
            raise UserError(
                f"config.json: {name} {config[name]!r} is not supported, only "
                f"{', '.join(ACTIVATIONS)} are"
            )
    for name, known in (("pos_att_type", ("c2p", "p2c")), ("norm_rel_ebd", ("layer_norm",))):
        unknown = [part for part in _split_list(config.get(name)) if part not in known]
        if unknown:
            raise UserError(
                f"config.json: {name} {'|'.join(unknown)!r} is not supported, only "
                f"{', '.join(known)} and none are"
            )
