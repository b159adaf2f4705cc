"""Description of a DeBERTa-v2 or v3 encoder: its config.json and the tensors of its checkpoints."""

import dataclasses
from typing import Any

from flax import traverse_util

from jax_ppo.models.hf.fields import HARMLESS_FIELDS, MAX_LAYERS, ConfigReader, require_divisor
from jax_ppo.models.hf.tensors import TensorMapping, TensorTable

# Fields that all published models of v2 and v3 agree on. The encoder has no other variants.
SUPPORTED = {
    "hidden_act": "gelu",
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "pooler_hidden_act": "gelu",
    "position_biased_input": False,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
}
# The same, if there is a convolution.
SUPPORTED_CONVOLUTION = {"conv_act": "gelu", "conv_groups": 1}
DEFAULTS = {  # values that transformers uses for missing fields, where they are not supported ones
    "conv_act": "tanh",
    "conv_kernel_size": 0,
    "layer_norm_eps": 1e-7,
    "max_position_embeddings": 512,
    "norm_rel_ebd": "none",
    "position_biased_input": True,
    "position_buckets": -1,
    "relative_attention": False,
    "share_att_key": False,
}
# Fields of config.json, besides the common ones, that do not change the scores.
UNUSED_FIELDS = frozenset({"legacy", "tie_word_embeddings"})
# Tensors of some checkpoints that neither transformers nor this model reads.
UNUSED_TENSORS = frozenset(
    {"deberta.embeddings.position_ids", "deberta.embeddings.position_embeddings.weight"}
)


@dataclasses.dataclass(frozen=True)
class DebertaArchitecture:
    """The architecture of an encoder. Hashable: it is a static argument of compiled functions."""

    family: str  # Hugging Face's `model_type`
    vocab_size: int  # V, number of rows of the word embedding
    hidden_size: int  # D
    intermediate_size: int  # width of the MLP
    num_layers: int
    num_heads: int  # divides `hidden_size`
    norm_epsilon: float
    max_position_embeddings: int  # longest sequence that the model was made for, in tokens
    relative_span: int  # S; the distances share 2 S embeddings, in buckets that grow from S / 2 on
    conv_kernel_size: int  # of the convolution beside the first layer, 3, or 0: there is none

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
    reader = ConfigReader(config, DEFAULTS)
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    require_divisor("num_attention_heads", num_heads, "hidden_size", hidden_size)
    kernel_size = reader.integer("conv_kernel_size", minimum=0)
    if kernel_size not in (0, 3):
        raise reader.unsupported("conv_kernel_size", kernel_size, "0 and 3 are")
    max_length = reader.integer("max_position_embeddings")
    span = reader.integer("position_buckets", minimum=-1)
    # Buckets beyond the middle grow up to the longest distance, which must lie beyond it.
    if not 0 < span // 2 < max_length - 1:
        raise reader.error(
            f"position_buckets={span} is not supported with distances up to {max_length}, only 2 "
            f"to {2 * max_length - 3} are"
        )
    supported = SUPPORTED | (SUPPORTED_CONVOLUTION if kernel_size else {})
    supported |= dict.fromkeys(("embedding_size", "pooler_hidden_size"), hidden_size)
    supported |= {"attention_head_size": hidden_size // num_heads}
    for name, value in supported.items():
        found = reader.any_value(name, value)
        if type(found) is not type(value) or found != value:
            raise reader.unsupported(name, found, f"{value!r} is")
    terms = reader.any_value("pos_att_type")
    words = terms.lower().split("|") if isinstance(terms, str) else reader.strings("pos_att_type")
    if {word.strip() for word in words or ()} != {"c2p", "p2c"}:
        raise reader.unsupported("pos_att_type", terms, "'p2c|c2p' is")
    architecture = DebertaArchitecture(
        family=reader.string("model_type"),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        norm_epsilon=reader.fraction("layer_norm_eps"),
        max_position_embeddings=max_length,
        relative_span=span,
        conv_kernel_size=kernel_size,
    )
    # Read for validation only: the encoder uses no special ids.
    reader.token_id("bos_token_id")
    reader.token_id("pad_token_id", maximum=architecture.vocab_size - 1)
    reader.token_ids("eos_token_id")
    reader.refuse_unread(HARMLESS_FIELDS | UNUSED_FIELDS | SUPPORTED_CONVOLUTION.keys())
    return architecture


def deberta_tensor_table(architecture: DebertaArchitecture) -> TensorTable:
    """Return the checkpoint tensor of each parameter of the encoder and its score head."""
    a = architecture
    hidden, width, layers = a.hidden_size, a.intermediate_size, a.num_layers
    embeddings, encoder = "deberta.embeddings", "deberta.encoder"
    layer = f"{encoder}.layer.{{}}"
    projections = {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj"}
    attention = {
        name: _dense(f"{layer}.attention.self.{hf_name}", hidden, hidden, layers)
        for name, hf_name in projections.items()
    }
    attention["o_proj"] = _dense(f"{layer}.attention.output.dense", hidden, hidden, layers)
    rows: dict[str, Any] = {
        "score": _dense("classifier", hidden, 1),  # first: its absence has a separate error message
        "words": _embedding(f"{embeddings}.word_embeddings", a.vocab_size, hidden),
        "embed_norm": _norm(embeddings, hidden),
        "relative": _embedding(f"{encoder}.rel_embeddings", 2 * a.relative_span, hidden),
        "relative_norm": _norm(encoder, hidden),
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
