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
from jax.typing import DTypeLike

from jax_ppo.models.architecture import Architecture
from jax_ppo.models.cache import RecurrentState
from jax_ppo.models.delta_net import DeltaLayer, convolve, last_inputs
from jax_ppo.models.layers import ATTENTION_OUTPUT, Dense


class ShortConvolution(nn.Module):
    """A gated short convolution; attributes and arguments as for `DeltaNet`."""

    architecture: Architecture
    dtype: DTypeLike
    lora_scale: float | None

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        segments_BxT: jax.Array | None,
        cache: RecurrentState | None,
        ends_B: jax.Array | None,
    ) -> tuple[jax.Array, RecurrentState | None]:
        """Return the output [B, T, D], and the state after these tokens."""
        a = self.architecture
        B, T, D = x_BxTxD.shape
        projected = Dense(3 * D, False, self.dtype, self.lora_scale, name="in_proj")(x_BxTxD)
        grouped = projected.reshape(B, T, a.num_kv_heads, 3, -1)
        b, c, x = (grouped[..., i, :].reshape(B, T, D) for i in range(3))
        inputs = b * x
        init = nn.initializers.normal(a.delta_window**-0.5)
        weights = self.param("window_filter", init, (a.delta_window, 1, D))
        weights_WxD = weights.astype(self.dtype)[:, 0]
        state = None
        if cache is None:
            out = convolve(inputs, weights_WxD, segments_BxT)
            if ends_B is not None:
                nothing = jnp.zeros((B, 0, 0, 0), jnp.float32)
                state = RecurrentState(nothing, last_inputs(inputs, ends_B, a.delta_window - 1))
        else:
            window = jnp.concatenate([cache.window[:B], inputs], axis=1)
            out = convolve(window, weights_WxD)[:, -1:]
            state = cache._replace(window=cache.window.at[:B].set(window[:, 1:]))
        out = checkpoint_name(c * out, ATTENTION_OUTPUT)
        return Dense(D, False, self.dtype, self.lora_scale, name="out_proj")(out), state


class ConvolutionLayer(DeltaLayer):
    """A layer with either attention or a short convolution, as its kind says."""

    mixer = (ShortConvolution, "short_conv")
