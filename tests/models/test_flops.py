"""FLOPs of a forward pass by the architecture's arithmetic."""

import dataclasses

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.memory.step_flops import count_forward_flops
from jax_ppo.models import heads
from jax_ppo.models.transformer import Transformer


def test_each_weight_of_a_matrix_is_read_once_per_token():
    """Beyond attention and logits, the FLOPs are twice the weights of all kernels per token."""
    architecture = tiny.ARCHITECTURE
    params = heads.param_shapes(Transformer(architecture), "lm")
    weights = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"])
        if "kernel" in jax.tree_util.keystr(path)
    )
    # Tokens of a sequence of one see one key each.
    attention = 4 * architecture.num_layers * architecture.num_heads * architecture.head_dim
    assert count_forward_flops(architecture, np.array([1, 1, 1])) == 3 * (2 * weights + attention)


def test_logits_cost_the_unembedding():
    a = tiny.ARCHITECTURE
    lengths = np.array([5])
    logits = count_forward_flops(a, lengths, 3) - count_forward_flops(a, lengths)
    assert logits == 2 * a.vocab_size * a.hidden_size * 3


@pytest.mark.parametrize(("window", "pairs"), [(None, 15), (2, 9), (9, 15)])
def test_attention_counts_the_pairs_that_are_seen(window, pairs):
    """Five tokens see 1 + 2 + 3 + 4 + 5 tokens, or in a window of two 1 + 2 + 2 + 2 + 2."""
    a = dataclasses.replace(
        tiny.ARCHITECTURE,
        sliding_window=window,
        local_layers=(window is not None,) * tiny.ARCHITECTURE.num_layers,
    )
    per_pair = 4 * a.num_layers * a.num_heads * a.head_dim
    of_matrices = 5 * (count_forward_flops(a, np.array([1])) - per_pair)
    assert count_forward_flops(a, np.array([5])) == of_matrices + pairs * per_pair
