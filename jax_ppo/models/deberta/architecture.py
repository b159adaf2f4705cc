"""What one DeBERTa-v2 or v3 encoder differs from another in, read from Hugging Face's config.json."""

import dataclasses
from typing import Any

from jax_ppo.errors import UserError

FAMILY = "deberta-v2"  # v3's too: v3 is v2 trained otherwise
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")


@dataclasses.dataclass(frozen=True)
class DebertaArchitecture:
    """An encoder's shape. Hashable: it is a static argument of compiled functions.

    Attributes:
      vocab_size: V, rows of the word embedding.
      embedding_size: its width, E; where that is not the hidden size a projection follows.
      hidden_size: D.
      intermediate_size: width of the MLP.
      num_layers, num_heads: as they say; num_heads divides hidden_size.
      activation, pooler_activation, conv_activation: of the MLP, of the pooler, of the convolution; one of ACTIVATIONS.
      norm_epsilon: LayerNorm.
      max_position_embeddings: longest sequence it was made for, tokens.
      absolute_positions: embeddings of the places are added to those of the words.
      relative_span: S; the relative distances -S..S-1 have an embedding each.
      log_buckets: farther distances share embeddings, the farther the more (config.json's position_buckets > 0).
      max_relative_distance: with log_buckets, the distance that the last bucket ends at.
      content_to_position, position_to_content: which of the two terms attention has besides content to content.
      share_keys: those terms use the projections of the content.
      norm_relative: the embeddings of the distances go through a LayerNorm.
      conv_kernel_size: of the convolution beside the first layer, an odd number; 0: there is none.
    """

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
    def family(self) -> str:
        return FAMILY

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


def deberta_from_hf_config(config: dict[str, Any]) -> DebertaArchitecture:
    """Reads the contents of config.json. UserError names what is missing or not supported."""
    _refuse_unsupported(config)
    hidden, longest = config["hidden_size"], config.get("max_position_embeddings", 512)
    distance = config.get("max_relative_positions", -1)
    distance = distance if distance >= 1 else longest
    buckets, terms = config.get("position_buckets", -1), _listed(config.get("pos_att_type"))
    return DebertaArchitecture(
        vocab_size=config["vocab_size"],
        embedding_size=config.get("embedding_size", hidden),
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        activation=config.get("hidden_act", "gelu"),
        pooler_activation=config.get("pooler_hidden_act", "gelu"),
        conv_activation=config.get("conv_act", "tanh"),
        norm_epsilon=config.get("layer_norm_eps", 1e-7),
        max_position_embeddings=longest,
        absolute_positions=bool(config.get("position_biased_input", True)),
        relative_span=buckets if buckets > 0 else distance,
        log_buckets=buckets > 0,
        max_relative_distance=distance,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        share_keys=bool(config.get("share_att_key", False)),
        norm_relative="layer_norm" in _listed(config.get("norm_rel_ebd")),
        conv_kernel_size=config.get("conv_kernel_size", 0),
    )


def _listed(value) -> list[str]:
    """["p2c", "c2p"] of that, or of "p2c|c2p"; [] of None and "none"."""
    parts = value.lower().split("|") if isinstance(value, str) else value or []
    return [part.strip() for part in parts if part.strip() not in ("", "none")]


def _refuse_unsupported(config):
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        if not isinstance(config.get(name), int):
            raise UserError(
                f"config.json: {name} must be a whole number, it is {config.get(name)!r}"
            )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise UserError(
            f"config.json: num_attention_heads={heads} must divide hidden_size={hidden}"
        )
    conv = config.get("conv_kernel_size", 0)
    if conv < 0 or (conv and conv % 2 == 0):
        raise UserError(
            f"config.json: conv_kernel_size {conv} is not supported, only 0 and odd numbers are"
        )
    only = {
        "relative_attention": True,
        "type_vocab_size": 0,
        "conv_groups": 1,
        "pooler_hidden_size": hidden,
        "attention_head_size": hidden // heads,
    }
    given = {"relative_attention": False} | config  # config.json may leave it out, which means that
    for name, value in only.items():
        if given.get(name, value) != value:
            raise UserError(
                f"config.json: {name} {given[name]!r} is not supported, only {value!r} is"
            )
    for name in ("hidden_act", "pooler_hidden_act", *["conv_act"] * bool(conv)):
        if config.get(name, "gelu") not in ACTIVATIONS:
            raise UserError(
                f"config.json: {name} {config[name]!r} is not supported, only {', '.join(ACTIVATIONS)} are"
            )
    for name, known in (("pos_att_type", ("c2p", "p2c")), ("norm_rel_ebd", ("layer_norm",))):
        unknown = [part for part in _listed(config.get(name)) if part not in known]
        if unknown:
            raise UserError(
                f"config.json: {name} {'|'.join(unknown)!r} is not supported, only {', '.join(known)} and none are"
            )
    if config.get("quantization_config"):
        raise UserError(
            "config.json: quantization_config is not supported; use a checkpoint in float32 or bfloat16"
        )
