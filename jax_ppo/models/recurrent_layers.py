"""Layers with a recurrent state in place of attention: Gated DeltaNets and short convolutions.

The memory of such a layer for a sequence is a `cache.RecurrentState`.

In a Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), queries, keys and values are projections
that a short convolution and a SiLU have passed over; the gated delta rule (kernels/delta_rule.py)
combines them, and its output is normalized per head and multiplied by the SiLU of a gate. Its
parameters are, per layer,

    delta_net/{in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj}/kernel [in, out]
    delta_net/window_filter [W, 1, C], log_rate [H], step_bias [H], norm/scale [V]

C has the channels of the queries, keys and values of one key head, then of the next: each device of
`model` computes the key heads of its part, and the value heads that read them.

In a gated short convolution (Liquid AI 2025, arXiv 2511.23404), three projections b, c and x of a
token have the width of the hidden states, and c times the causal convolution of b x is projected to
the output. Its parameters are, per layer,

    short_conv/{in_proj, out_proj}/kernel [in, out], window_filter [W, 1, D]

The outputs of `in_proj` have K groups, each with a K-th of b, c and x: the devices of `model` split
the channels.
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ppo.kernels.delta_rule import delta_chunks, delta_step
from jax_ppo.models.cache import LayerCache, RecurrentState
from jax_ppo.models.layers import ATTENTION_OUTPUT, DecoderModule, Layer, normalize

EPSILON = 1e-6  # of the norms of queries and keys, as in transformers


class GatedNorm(nn.Module):
    """RMSNorm over the last axis, then a product with the SiLU of a gate."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalize `x`, rounding to its type at the same points as transformers."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        normed = scale.astype(x.dtype) * normalize(x, self.epsilon).astype(x.dtype)
        return (normed * nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class RecurrentMixer(DecoderModule):
    """A substitute for attention that begins with a short convolution of its inputs."""

    def convolve_tokens(
        self,
        inputs_BxTxC: jax.Array,
        segments_BxT: jax.Array | None,
        cache: RecurrentState | None,
        ends_B: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the convolution [B, T, C], and the window of the state after these tokens."""
        W = self.options.architecture.delta_window
        shape = (W, 1, inputs_BxTxC.shape[-1])
        weights = self.param("window_filter", nn.initializers.normal(W**-0.5), shape)
        weights_WxC = weights.astype(self.options.dtype)[:, 0]
        if cache is None:
            window = None if ends_B is None else last_inputs(inputs_BxTxC, ends_B, W - 1)
            return convolve(inputs_BxTxC, weights_WxC, segments_BxT), window
        B = len(inputs_BxTxC)
        window = jnp.concatenate([cache.window[:B], inputs_BxTxC], axis=1)
        new_window = cache.window.at[:B].set(window[:, 1:])
        return convolve(window, weights_WxC)[:, -1:], new_window


class DeltaNet(RecurrentMixer):
    """A Gated DeltaNet, with the delta rule in float32 whatever the type of the computation."""

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        segments_BxT: jax.Array | None,
        cache: RecurrentState | None,
        ends_B: jax.Array | None,
    ) -> tuple[jax.Array, RecurrentState | None]:
        """Return the output [B, T, D], and the state after these tokens.

        Args:
          x_BxTxD: inputs; T = 1 with a cache.
          segments_BxT: see `Transformer.apply`.
          cache: the state before the tokens; its rows beyond B are left alone.
          ends_B: without a cache, the numbers of tokens that the state includes; `None`: no state
            is returned.
        """
        a = self.options.architecture
        B, T, _ = x_BxTxD.shape
        inputs = self.project("in_proj_qkv", sum(a.delta_widths), x_BxTxD)
        gate = self.project("in_proj_z", a.delta_widths[2], x_BxTxD)
        rate = self.project("in_proj_b", a.delta_value_heads, x_BxTxD)
        rate = nn.sigmoid(rate.astype(jnp.float32))
        decay = self._decay(self.project("in_proj_a", a.delta_value_heads, x_BxTxD))
        convolved, window = self.convolve_tokens(inputs, segments_BxT, cache, ends_B)
        q, k, v = self._heads(nn.silu(convolved))
        if cache is None:
            out, matrix = delta_chunks(q, k, v, decay, rate, segments_BxT, ends_B)
        else:
            token = (x[:, 0] for x in (q, k, v, decay, rate))
            out, new_matrix = delta_step(cache.matrix[:B], *token)
            out, matrix = out[:, None], cache.matrix.at[:B].set(new_matrix)
        state = None
        if matrix is not None and window is not None:
            state = RecurrentState(matrix, window)
        gate = gate.reshape(out.shape)
        out = GatedNorm(a.norm_epsilon, name="norm")(out.astype(self.options.dtype), gate)
        out = checkpoint_name(out, ATTENTION_OUTPUT)
        return self.project("out_proj", a.hidden_size, out.reshape(B, T, -1)), state

    def _decay(self, projected: jax.Array) -> jax.Array:
        """Return the logarithms of the factors on the states, float32 [B, T, H]."""

        def init_log_rate(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return jnp.log(jax.random.uniform(key, shape, dtype, minval=0.01, maxval=16.0))

        shape = (self.options.architecture.delta_value_heads,)
        bias = self.param("step_bias", nn.initializers.ones, shape, jnp.float32)
        log_rate = self.param("log_rate", init_log_rate, shape, jnp.float32)
        # Decoding has rounded them already: whole sequences take the same numbers.
        bias, log_rate = (
            x.astype(self.options.dtype).astype(jnp.float32) for x in (bias, log_rate)
        )
        return -jnp.exp(log_rate) * nn.softplus(projected.astype(jnp.float32) + bias)

    def _heads(self, convolved: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values, float32 [B, T, H, K or V]."""
        a = self.options.architecture
        B, T, _ = convolved.shape
        K = a.delta_key_dim
        grouped = convolved.astype(jnp.float32).reshape(B, T, a.delta_key_heads, -1)
        q, k, v = jnp.split(grouped, (K, 2 * K), axis=-1)
        v = v.reshape(B, T, a.delta_value_heads, a.delta_value_dim)
        # Each head of queries and keys serves several heads of values, which are adjacent.
        copies = a.delta_value_heads // a.delta_key_heads
        q, k = (  # of unit length
            jnp.repeat(
                x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + EPSILON), copies, axis=2
            )
            for x in (q, k)
        )
        return q * K**-0.5, k, v


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


class DeltaLayer(Layer):
    """A layer with either attention or a Gated DeltaNet, as its kind says."""

    mixer: ClassVar[tuple[type[RecurrentMixer], str]] = (DeltaNet, "delta_net")

    def _attend(self, x: jax.Array, *inputs: Any) -> tuple[jax.Array, LayerCache | None]:
        kind, _, segments_BxT, cache, ends_B = inputs
        if not kind.is_linear:
            return super()._attend(x, *inputs)
        create, name = self.mixer
        mixer: Any = create(self.options, name=name)
        output: tuple[jax.Array, LayerCache | None] = mixer(x, segments_BxT, cache, ends_B)
        return output


class ConvolutionLayer(DeltaLayer):
    """A layer with either attention or a short convolution, as its kind says."""

    mixer = (ShortConvolution, "short_conv")


def convolve(
    x_BxTxC: jax.Array, weights_WxC: jax.Array, segments_BxT: jax.Array | None = None
) -> jax.Array:
    """Return the causal convolution of each channel, [B, T, C], within segments.

    The last weight belongs to the token itself; without segments, each row is one.
    """
    T = x_BxTxC.shape[1]
    W = len(weights_WxC)
    out = jnp.zeros(x_BxTxC.shape, jnp.float32)
    for distance in range(min(W, T)):
        earlier = jnp.pad(x_BxTxC, ((0, 0), (distance, 0), (0, 0)))[:, :T]
        if segments_BxT is not None and distance:
            # The first tokens of a row meet zeros, whatever their segment.
            segments = jnp.pad(segments_BxT, ((0, 0), (distance, 0)))[:, :T]
            earlier = jnp.where((segments == segments_BxT)[..., None], earlier, 0)
        out += earlier.astype(jnp.float32) * weights_WxC[W - 1 - distance].astype(jnp.float32)
    return out.astype(x_BxTxC.dtype)


def last_inputs(x_BxTxC: jax.Array, ends_B: jax.Array, count: int) -> jax.Array:
    """Return the inputs of `count` tokens before the end of each row, zeros before the first."""
    columns = ends_B[:, None] + jnp.arange(-count, 0)
    taken = jnp.take_along_axis(x_BxTxC, jnp.maximum(columns, 0)[..., None], axis=1)
    return jnp.where((columns >= 0)[..., None], taken, 0)
