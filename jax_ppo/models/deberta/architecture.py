"""Description of a DeBERTa-v2 or v3 encoder, read from Hugging Face's config.json."""

import dataclasses
from typing import Any

from jax_ppo.models.hf.fields import HARMLESS_FIELDS, MAX_LAYERS, ConfigReader, require_divisor
from jax_ppo.models.hf.json_files import quote_value

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")
# Fields of config.json, besides the common ones, that do not change the scores.
UNUSED_FIELDS = frozenset(
    {"legacy", "summary_activation", "summary_type", "summary_use_proj", "tie_word_embeddings"}
)


@dataclasses.dataclass(frozen=True)
class DebertaArchitecture:
    """The architecture of an encoder. Hashable: it is a static argument of compiled functions."""

    family: str  # Hugging Face's `model_type`
    vocab_size: int  # V, number of rows of the word embedding
    embedding_size: int  # E, width of the word embedding; if it is not D, a projection follows
    hidden_size: int  # D
    intermediate_size: int  # width of the MLP
    num_layers: int
    num_heads: int  # divides `hidden_size`
    activation: str = "gelu"  # of the MLP, one of `ACTIVATIONS`
    pooler_activation: str = "gelu"
    conv_activation: str = "tanh"
    norm_epsilon: float = 1e-7
    max_position_embeddings: int = 512  # longest sequence that the model was made for, in tokens
    absolute_positions: bool = True  # they are embedded, and added to the word embeddings
    relative_span: int = 512  # S; each relative distance from -S to S - 1 has an embedding
    # Distant positions share embeddings, in buckets of geometrically growing width
    # (position_buckets > 0 in config.json).
    log_buckets: bool = False
    max_relative_distance: int = 512  # with `log_buckets`, the distance where the last bucket ends
    content_to_position: bool = False  # attention has the term of a query and a relative position
    position_to_content: bool = False  # ... of a relative position and a key
    share_keys: bool = False  # these terms use the projections of the content
    norm_relative: bool = False  # the embeddings of distances are normalized by a LayerNorm
    conv_kernel_size: int = 0  # of the convolution beside the first layer, odd; 0: none

    @property
    def head_dim(self) -> int:
        """Return the width of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key and value heads, which is that of the query heads."""
        return self.num_heads


def deberta_from_hf_config(config: dict[str, Any]) -> DebertaArchitecture:
    """Return the architecture that config.json describes; raise `UserError` if unsupported."""
    reader = ConfigReader(config)
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    require_divisor("num_attention_heads", num_heads, "hidden_size", hidden_size)
    kernel_size = _read_kernel_size(reader)
    _refuse_unsupported(reader, hidden_size, num_heads)
    attention_terms = _read_attention_terms(reader)
    norms = _split_words(reader, "norm_rel_ebd", ("layer_norm",))
    architecture = DebertaArchitecture(
        family=reader.string("model_type"),
        vocab_size=reader.integer("vocab_size"),
        embedding_size=_read_optional_size(reader, "embedding_size", hidden_size),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        activation=_read_activation(reader, "hidden_act", "gelu"),
        pooler_activation=_read_activation(reader, "pooler_hidden_act", "gelu"),
        conv_activation=_read_activation(reader, "conv_act", "tanh"),
        norm_epsilon=reader.fraction("layer_norm_eps", 1e-7),
        absolute_positions=reader.boolean("position_biased_input", default=True),
        content_to_position="c2p" in attention_terms,
        position_to_content="p2c" in attention_terms,
        share_keys=reader.boolean("share_att_key"),
        norm_relative="layer_norm" in norms,
        conv_kernel_size=kernel_size,
        **_read_distances(reader),
    )
    # Read for validation only: the encoder uses no special ids.
    reader.token_id("bos_token_id")
    reader.token_id("pad_token_id", maximum=architecture.vocab_size - 1)
    reader.token_ids("eos_token_id")
    reader.refuse_unread(HARMLESS_FIELDS | UNUSED_FIELDS)
    return architecture


def _read_optional_size(reader: ConfigReader, name: str, default: int) -> int:
    return reader.optional_integer(name, nullable=False) or default


def _read_distances(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of the architecture that describe positions and their distances."""
    max_length = _read_optional_size(reader, "max_position_embeddings", 512)
    max_distance = -1
    if "max_relative_positions" in reader:
        max_distance = reader.integer("max_relative_positions", minimum=-1)
    # -1, the default of transformers, means the longest sequence.
    if max_distance < 1:
        max_distance = max_length
    buckets = -1
    if "position_buckets" in reader:
        buckets = reader.integer("position_buckets", minimum=-1)
    has_buckets = buckets > 0
    # Buckets beyond the middle grow up to the longest distance, which must lie beyond it.
    if has_buckets and not 0 < buckets // 2 < max_distance - 1:
        raise reader.error(
            f"position_buckets={buckets} is not supported with distances up to {max_distance}, "
            f"only 2 to {2 * max_distance - 3} are"
        )
    return {
        "max_position_embeddings": max_length,
        "max_relative_distance": max_distance,
        "relative_span": buckets if has_buckets else max_distance,
        "log_buckets": has_buckets,
    }


def _read_attention_terms(reader: ConfigReader) -> list[str]:
    """Return ["p2c", "c2p"] for that list or for "p2c|c2p", and [] for `None` or "none"."""
    name = "pos_att_type"
    if isinstance(reader.any_value(name), str):
        return _split_words(reader, name, ("c2p", "p2c"))
    words = reader.strings(name) or []
    _refuse_unknown_words(reader, name, words, ("c2p", "p2c"))
    return words


def _split_words(reader: ConfigReader, name: str, supported: tuple[str, ...]) -> list[str]:
    """Return the words of a field that are separated by |, without "none"."""
    words = [word.strip() for word in reader.string(name, "none").lower().split("|")]
    words = [word for word in words if word not in ("", "none")]
    _refuse_unknown_words(reader, name, words, supported)
    return words


def _refuse_unknown_words(
    reader: ConfigReader, name: str, words: list[str], supported: tuple[str, ...]
) -> None:
    unknown = [word for word in words if word not in supported]
    if unknown:
        raise reader.error(
            f"{name} {quote_value('|'.join(unknown))} is not supported, only "
            f"{', '.join(supported)} and none are"
        )


def _read_kernel_size(reader: ConfigReader) -> int:
    if "conv_kernel_size" not in reader:
        return 0
    size = reader.integer("conv_kernel_size", minimum=-1)
    if size < 0 or (size and size % 2 == 0):
        raise reader.error(f"conv_kernel_size {size} is not supported, only 0 and odd numbers are")
    return size


def _read_activation(reader: ConfigReader, name: str, default: str) -> str:
    activation = reader.string(name, default)
    if activation not in ACTIVATIONS:
        raise reader.error(
            f"{name} {quote_value(activation)} is not supported, only {', '.join(ACTIVATIONS)} are"
        )
    return activation


def _refuse_unsupported(reader: ConfigReader, hidden_size: int, num_heads: int) -> None:
    """Raise `UserError` for a model that the encoder would compute differently."""
    if not reader.boolean("relative_attention"):
        raise reader.error("relative_attention False is not supported, only True is")
    supported_sizes = {
        "type_vocab_size": 0,
        "conv_groups": 1,
        "pooler_hidden_size": hidden_size,
        "attention_head_size": hidden_size // num_heads,
    }
    for name, supported in supported_sizes.items():
        size = reader.optional_integer(name, minimum=0, nullable=False)
        if size is not None and size != supported:
            raise reader.error(f"{name} {size} is not supported, only {supported} is")
