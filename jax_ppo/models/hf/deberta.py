"""Description of a DeBERTa-v2 or v3 encoder: its config.json and the tensors of its checkpoints."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from jax_ppo.models.hf.fields import HARMLESS_FIELDS, MAX_LAYERS, ConfigReader, require_divisor
from jax_ppo.models.hf.tensors import TensorMapping, TensorTable

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")
DEFAULTS = {  # values that transformers uses for missing fields, besides null and False
    "conv_act": "tanh",
    "conv_kernel_size": 0,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-7,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "norm_rel_ebd": "none",
    "pooler_hidden_act": "gelu",
    "position_biased_input": True,
    "position_buckets": -1,
}
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
    # Distant positions share embeddings in growing buckets (position_buckets > 0 in config.json).
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


# Tensors of some checkpoints that the model does not read, and the values that it uses instead.
UNUSED_TENSORS: Mapping[str, Callable[[DebertaArchitecture], np.ndarray]] = {
    "deberta.embeddings.position_ids": lambda a: np.arange(a.max_position_embeddings),
    "deberta.embeddings.position_embeddings.weight": lambda _: np.array(0),
}


def deberta_from_hf_config(config: dict[str, Any]) -> DebertaArchitecture:
    """Return the architecture that config.json describes; raise `UserError` if unsupported."""
    reader = ConfigReader(config, DEFAULTS)
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    require_divisor("num_attention_heads", num_heads, "hidden_size", hidden_size)
    kernel_size = reader.integer("conv_kernel_size", minimum=-1)
    if kernel_size < 0 or (kernel_size and kernel_size % 2 == 0):
        raise reader.unsupported("conv_kernel_size", kernel_size, "0 and odd numbers are")
    _refuse_unsupported(reader, hidden_size, num_heads)
    attention_terms = _read_words(reader, "pos_att_type", ("c2p", "p2c"), or_list=True)
    norms = _read_words(reader, "norm_rel_ebd", ("layer_norm",))
    architecture = DebertaArchitecture(
        family=reader.string("model_type"),
        vocab_size=reader.integer("vocab_size"),
        embedding_size=reader.optional_integer("embedding_size", nullable=False) or hidden_size,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        activation=_read_activation(reader, "hidden_act"),
        pooler_activation=_read_activation(reader, "pooler_hidden_act"),
        conv_activation=_read_activation(reader, "conv_act"),
        norm_epsilon=reader.fraction("layer_norm_eps"),
        absolute_positions=reader.boolean("position_biased_input"),
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


def _read_distances(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of the architecture that describe positions and their distances."""
    max_length = reader.integer("max_position_embeddings")
    max_distance = reader.integer("max_relative_positions", minimum=-1)
    if max_distance < 1:  # -1 means the longest sequence
        max_distance = max_length
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


def _read_words(
    reader: ConfigReader, name: str, supported: tuple[str, ...], or_list: bool = False
) -> list[str]:
    """Return the words of a text such as "p2c|c2p", except "none", or of a list if `or_list`."""
    if or_list and not isinstance(reader.any_value(name), str):
        words = reader.strings(name) or []
    else:
        words = [word.strip() for word in reader.string(name).lower().split("|")]
        words = [word for word in words if word not in ("", "none")]
    if unknown := [word for word in words if word not in supported]:
        raise reader.unsupported(name, "|".join(unknown), f"{', '.join(supported)} and none are")
    return words


def _read_activation(reader: ConfigReader, name: str) -> str:
    activation = reader.string(name)
    if activation not in ACTIVATIONS:
        raise reader.unsupported(name, activation, f"{', '.join(ACTIVATIONS)} are")
    return activation


def _refuse_unsupported(reader: ConfigReader, hidden_size: int, num_heads: int) -> None:
    if not reader.boolean("relative_attention"):
        raise reader.unsupported("relative_attention", False, "True is")
    supported_sizes = {
        "type_vocab_size": 0,
        "conv_groups": 1,
        "pooler_hidden_size": hidden_size,
        "attention_head_size": hidden_size // num_heads,
    }
    for name, supported in supported_sizes.items():
        size = reader.optional_integer(name, minimum=0, nullable=False)
        if size is not None and size != supported:
            raise reader.unsupported(name, size, f"{supported} is")


def deberta_tensor_table(architecture: DebertaArchitecture) -> TensorTable:
    """Return the checkpoint tensor of each parameter of the encoder and its score head."""
    a = architecture
    hidden, width, layers = a.hidden_size, a.intermediate_size, a.num_layers
    embeddings, encoder = "deberta.embeddings", "deberta.encoder"
    layer = f"{encoder}.layer.{{}}"
    projections = {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj"}
    # Checkpoints hold these projections only for the terms that are configured.
    if a.content_to_position and not a.share_keys:
        projections["pos_k_proj"] = "pos_key_proj"
    if a.position_to_content and not a.share_keys:
        projections["pos_q_proj"] = "pos_query_proj"
    attention = {
        name: _dense(f"{layer}.attention.self.{hf_name}", hidden, hidden, layers)
        for name, hf_name in projections.items()
    }
    attention["o_proj"] = _dense(f"{layer}.attention.output.dense", hidden, hidden, layers)
    rows: dict[str, Any] = {
        "score": _dense("classifier", hidden, 1),  # first: its absence has a separate error message
        "words": _embedding(f"{embeddings}.word_embeddings", a.vocab_size, a.embedding_size),
        "embed_norm": _norm(embeddings, hidden),
        "relative": _embedding(f"{encoder}.rel_embeddings", 2 * a.relative_span, hidden),
        "layers": {
            "attention": attention,
            "attention_norm": _norm(f"{layer}.attention.output", hidden, layers),
            "mlp": {
                "up_proj": _dense(f"{layer}.intermediate.dense", hidden, width, layers),
                "down_proj": _dense(f"{layer}.output.dense", width, hidden, layers),
            },
            "mlp_norm": _norm(f"{layer}.output", hidden, layers),
        },
        "pooler": _dense("pooler.dense", hidden, hidden),
    }
    # Without them the checkpoint's tensor, if it has one, is in UNUSED_TENSORS.
    if a.absolute_positions:
        name = f"{embeddings}.position_embeddings"
        rows["places"] = _embedding(name, a.max_position_embeddings, a.embedding_size)
    if a.embedding_size != hidden:
        projection = _dense(f"{embeddings}.embed_proj", a.embedding_size, hidden)
        rows["embed_proj"] = {"kernel": projection["kernel"]}
    if a.norm_relative:
        rows["relative_norm"] = _norm(encoder, hidden)
    if a.conv_kernel_size:
        name, shape = f"{encoder}.conv.conv", (a.conv_kernel_size, hidden, hidden)
        kernel = TensorMapping(f"{name}.weight", shape, transposed=True)
        rows["conv"] = {"kernel": kernel, "bias": TensorMapping(f"{name}.bias", (hidden,))}
        rows["conv_norm"] = _norm(f"{encoder}.conv", hidden)
    return traverse_util.flatten_dict(rows)


def _embedding(name: str, rows: int, width: int) -> dict[str, TensorMapping]:
    return {"embedding": TensorMapping(f"{name}.weight", (rows, width))}


def _dense(
    name: str, inputs: int, outputs: int, layers: int | None = None
) -> dict[str, TensorMapping]:
    return {
        "kernel": TensorMapping(
            f"{name}.weight", (inputs, outputs), transposed=True, layers=layers
        ),
        "bias": TensorMapping(f"{name}.bias", (outputs,), layers=layers),
    }


def _norm(name: str, width: int, layers: int | None = None) -> dict[str, TensorMapping]:
    return {
        "scale": TensorMapping(f"{name}.LayerNorm.weight", (width,), layers=layers),
        "bias": TensorMapping(f"{name}.LayerNorm.bias", (width,), layers=layers),
    }
