"""Tensors of a checkpoint that are left out because the model computes the same without them."""

import re

import jax.numpy as jnp
import numpy as np

from jax_ppo.models import rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.deberta import UNUSED_TENSORS, DebertaArchitecture
from jax_ppo.models.hf.files import SAFETENSORS_DTYPES, SafetensorsCheckpoint
from jax_ppo.models.hf.names import tensor_table

OUTPUT_EMBEDDINGS = ("lm_head.weight", "embed_out.weight")
SCORE_WEIGHTS = ("score.weight", "classifier.weight")  # score heads of a decoder and of an encoder
# Layers that predict later tokens: beginnings of their names (Qwen3.5), and the end of a name that
# they alone have, numbered after the others (DeepSeek-V3).
MULTI_TOKEN_HEADS = "mtp."
MULTI_TOKEN_LAYER = ".eh_proj.weight"


def is_ignorable(
    checkpoint: SafetensorsCheckpoint,
    name: str,
    head: str,
    architecture: Architecture | DebertaArchitecture,
) -> bool:
    """Return whether the model computes the same without this tensor.

    Such a tensor belongs to a part that is not used, or holds the values that the model computes.
    """
    if isinstance(architecture, DebertaArchitecture):
        return name in UNUSED_TENSORS
    if name.endswith("rotary_emb.inv_freq"):
        return _has_computed_frequencies(checkpoint, name, architecture)
    # Old versions of transformers stored attention masks and the logit of what is masked.
    if name.endswith((".attn.bias", ".attention.bias")):
        # [..., queries, keys]: each token sees itself and those before it.
        mask = checkpoint.read(name) != 0
        return mask.ndim >= 2 and bool(np.all(mask == np.tri(*mask.shape[-2:], dtype=np.bool_)))
    if name.endswith((".attn.masked_bias", ".attention.masked_bias")):
        # It was -1e4, later -1e9: any logit below -9e3 has a weight of 0 after the softmax.
        return bool(np.all(checkpoint.read(name) < -9e3))
    if name in OUTPUT_EMBEDDINGS:
        if head not in ("lm", "both"):
            return True
        # `read_architecture` unties a model whose output embedding differs.
        embedding = tensor_table(architecture, head)["embed", "embedding"].name
        return architecture.tied and checkpoint.are_equal(name, embedding)
    if name in ("score.bias", "classifier.bias"):
        return head != "reward" or not np.any(checkpoint.read(name))
    if match := re.search(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.", name):
        # It would compute keys or values that an earlier layer shares.
        first = architecture.num_layers - architecture.shared_layers
        if first <= int(match[1]) < architecture.num_layers:
            return True
    layer = ".".join(name.split(".")[:3])
    return (
        name == "score.weight"
        or name.startswith(MULTI_TOKEN_HEADS)
        or f"{layer}{MULTI_TOKEN_LAYER}" in checkpoint
    )


def _has_computed_frequencies(
    checkpoint: SafetensorsCheckpoint, name: str, architecture: Architecture
) -> bool:
    """Return whether stored rotary frequencies are config.json's, perhaps rounded or unscaled."""
    dtype = SAFETENSORS_DTYPES.get(checkpoint.dtype(name))
    if dtype is None:
        return False
    stored = checkpoint.read(name).astype(np.float64)
    scaled = rope.inverse_frequencies(architecture)[0]
    local = rope.inverse_frequencies(architecture, local=True)[0]
    dim = architecture.rotary_dim
    unscaled = architecture.rope_theta ** -(np.arange(0, dim, 2) / dim)
    precision = jnp.finfo(dtype)
    relative = max(4 * float(precision.eps), 1e-5)
    return any(
        stored.shape == expected.shape
        and np.allclose(stored, expected, relative, 4 * float(precision.smallest_subnormal))
        for expected in (scaled, local, unscaled)
    )
