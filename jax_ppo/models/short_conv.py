"""Layers with a gated short convolution in place of attention (Liquid AI 2025, arXiv 2511.23404).

Three projections b, c and x of a token have the width of the hidden states, and c times the causal
convolution of b x is projected to the output. What a layer remembers of a sequence is the window of
a `cache.RecurrentState`. Its parameters are, per layer,

    short_conv/{in_proj, out_proj}/kernel [in, out], window_filter [W, 1, D]

The outputs of `in_proj` have K groups, each with a K-th of b, c and x: the devices of `model` split
the channels.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ppo.models.cache import RecurrentState
from jax_ppo.models.delta_net import DeltaLayer, RecurrentMixer
from jax_ppo.models.layers import ATTENTION_OUTPUT


class ShortConvolution(RecurrentMixer):
    """A gated short convolution; attributes and arguments as for `DeltaNet`."""

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        segments_BxT: jax.Array | None,
        cache: RecurrentState | None,
        ends_B: jax.Array | None,
    ) -> tuple[jax.Array, RecurrentState | None]:
        """Return the output [B, T, D], and the state after these tokens."""
        B, T, D = x_BxTxD.shape
        projected = self.project("in_proj", 3 * D, x_BxTxD)
        grouped = projected.reshape(B, T, self.options.architecture.num_kv_heads, 3, -1)
        b, c, x = (grouped[..., i, :].reshape(B, T, D) for i in range(3))
        out, window = self.convolve_tokens(b * x, segments_BxT, cache, ends_B)
        state = None
        if window is not None:
            nothing = jnp.zeros((B, 0, 0, 0), jnp.float32)
            state = RecurrentState(nothing if cache is None else cache.matrix, window)
        out = checkpoint_name(c * out, ATTENTION_OUTPUT)
        return self.project("out_proj", D, out), state


class ConvolutionLayer(DeltaLayer):
    """A layer with either attention or a short convolution, as its kind says."""

    mixer = (ShortConvolution, "short_conv")
