"""Floating point operations that a model needs by its architecture's arithmetic."""

import numpy as np

from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta.architecture import DebertaArchitecture


def count_forward_flops(
    architecture: Architecture | DebertaArchitecture, lengths: np.ndarray, num_logits: int = 0
) -> float:
    """Return the FLOPs of the matrix products of a forward pass over sequences.

    A multiplication and an addition count as two, as in PaLM (arXiv 2204.02311, appendix B). Of the
    experts, those that a token passes through count.
    Attention counts the pairs of tokens that see each other, not those that are masked. Norms,
    activations, biases and a scalar head are left out, and so are the relative terms of DeBERTa.

    Args:
      architecture: the architecture of a decoder or an encoder.
      lengths: int [B], tokens of each sequence.
      num_logits: number of tokens for which logits over the vocabulary are computed.
    """
    lengths = lengths.astype(np.float64)
    if isinstance(architecture, DebertaArchitecture):
        width = architecture.hidden_size
        matrices = 4 * width**2 + 2 * width * architecture.intermediate_size
        per_layer = 2 * matrices * lengths.sum() + 4 * width * (lengths**2).sum()
        return float(architecture.num_layers * per_layer)
    D = architecture.hidden_size
    heads_width = architecture.num_heads * architecture.head_dim
    kv_width = architecture.num_kv_heads * architecture.head_dim
    matrices = 2 * D * heads_width + 2 * D * kv_width
    matrices += len(architecture.mlp_projections) * D * architecture.active_width
    matrices += D * architecture.num_experts  # the router
    flops = architecture.num_layers * 2 * matrices * lengths.sum()
    for is_local in architecture.layers_are_local:
        window = architecture.sliding_window if is_local else None
        # The products with keys and with values: two per pair and per number of a head.
        flops += 4 * heads_width * _visible_pairs(lengths, window)
    return float(flops + 2 * architecture.vocab_size * D * num_logits)


def _visible_pairs(lengths: np.ndarray, window: int | None) -> float:
    """Return how many (query, key) pairs a causal mask shows; each token sees itself."""
    pairs = lengths * (lengths + 1) / 2
    if window is not None:
        hidden = np.maximum(lengths - window, 0)
        pairs = pairs - hidden * (hidden + 1) / 2
    return float(pairs.sum())
