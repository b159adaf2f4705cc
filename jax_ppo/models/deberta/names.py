"""Table of the tensors in a Hugging Face checkpoint of a DeBERTa-v2 or v3 reward model."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.hf.tensors import TensorMapping, TensorTable

# Tensors that some checkpoints keep although the model does not read them, and the values that it
# uses in their place: the positions in order, and nothing added to the embedding of a word.
UNUSED_TENSORS: Mapping[str, Callable[[DebertaArchitecture], np.ndarray]] = {
    "deberta.embeddings.position_ids": lambda a: np.arange(a.max_position_embeddings),
    "deberta.embeddings.position_embeddings.weight": lambda _: np.array(0),
}


def deberta_tensor_table(architecture: DebertaArchitecture) -> TensorTable:
    """Return the checkpoint tensor of each parameter of the encoder and its score head."""
    a = architecture
    hidden, width, layers = a.hidden_size, a.intermediate_size, a.num_layers
    embeddings, encoder = "deberta.embeddings", "deberta.encoder"
    layer = f"{encoder}.layer.{{}}"
    rows = {
        "score": _dense("classifier", hidden, 1),  # first: its absence has its own error message
        "words": _embedding(f"{embeddings}.word_embeddings", a.vocab_size, a.embedding_size),
        "embed_norm": _norm(embeddings, hidden),
        "relative": _embedding(f"{encoder}.rel_embeddings", 2 * a.relative_span, hidden),
        "layers": {
            "attention": _attention(a, layer),
            "attention_norm": _norm(f"{layer}.attention.output", hidden, layers),
            "mlp": {
                "up_proj": _dense(f"{layer}.intermediate.dense", hidden, width, layers),
                "down_proj": _dense(f"{layer}.output.dense", width, hidden, layers),
            },
            "mlp_norm": _norm(f"{layer}.output", hidden, layers),
        },
        "pooler": _dense("pooler.dense", hidden, hidden),
    }
    return traverse_util.flatten_dict(rows | _optional(a, embeddings, encoder))


def _attention(a: DebertaArchitecture, layer: str) -> dict[str, Any]:
    """Return the projections of attention, for positions too unless they share the content's."""
    names = {"q_proj": "self.query_proj", "k_proj": "self.key_proj", "v_proj": "self.value_proj"}
    # Checkpoints hold these projections only for the terms that are configured.
    if a.content_to_position and not a.share_keys:
        names["pos_k_proj"] = "self.pos_key_proj"
    if a.position_to_content and not a.share_keys:
        names["pos_q_proj"] = "self.pos_query_proj"
    names["o_proj"] = "output.dense"
    return {
        name: _dense(f"{layer}.attention.{hf_name}", a.hidden_size, a.hidden_size, a.num_layers)
        for name, hf_name in names.items()
    }


def _optional(a: DebertaArchitecture, embeddings: str, encoder: str) -> dict[str, Any]:
    """Return the parameters that only some architectures have."""
    hidden = a.hidden_size
    rows: dict[str, Any] = {}
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
        rows["conv"] = {
            "kernel": TensorMapping(
                f"{encoder}.conv.conv.weight", (a.conv_kernel_size, hidden, hidden), transposed=True
            ),
            "bias": TensorMapping(f"{encoder}.conv.conv.bias", (hidden,)),
        }
        rows["conv_norm"] = _norm(f"{encoder}.conv", hidden)
    return rows


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
