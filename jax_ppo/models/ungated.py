"""The ungated block: LayerNorm, attention and an MLP of two projections, all with biases.

Attention is layers.py's. The architecture says which biases and positions it has.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ppo.models import rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import Segments
from jax_ppo.models.cache import LayerCache
from jax_ppo.models.layers import (
    ACTIVATION_FUNCTIONS,
    Auxiliary,
    Dense,
    Layer,
    LayerKind,
)


class LayerNorm(nn.Module):
    """Normalization to mean 0 and variance 1 over the last axis (Ba et al. 2016)."""

    architecture: Architecture

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize `x` in float32, rounding to its type at the end, as transformers does."""
        width = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, width, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, width, jnp.float32)
        scale = scale.astype(x.dtype)
        bias = bias.astype(x.dtype)
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(wide**2, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(variance + self.architecture.norm_epsilon)
        return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class UngatedMLP(nn.Module):
    """The MLP of two projections with an activation between them."""

    architecture: Architecture
    dtype: DTypeLike
    lora_scale: float | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output [..., D]."""
        a = self.architecture

        def project(name: str, features: int, x: jax.Array) -> jax.Array:
            return Dense(features, a.mlp_bias, self.dtype, self.lora_scale, name=name)(x)

        inner = ACTIVATION_FUNCTIONS[a.activation](project("up_proj", a.intermediate_size, x))
        return project("down_proj", a.hidden_size, inner)


class UngatedLayer(Layer):
    """One layer: LayerNorm, attention, LayerNorm and MLP, with residual connections.

    Attributes and arguments as for `Layer`.
    """

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kind: LayerKind,
        rotations: tuple[rope.Rotation, ...],
        segments_BxT: Segments,
        routed_experts_BxTxk: jax.Array | None = None,
        cache: LayerCache | None = None,
        columns_B: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
        """Return the hidden states after this layer, what it remembers, and other outputs."""
        a = self.architecture
        normed = LayerNorm(a, name="input_norm")(x)
        attended, cache = self._attend(normed, kind, rotations, segments_BxT, cache, columns_B)
        mlp_input = x if a.parallel_residual else x + attended
        normed = LayerNorm(a, name="post_attention_norm")(mlp_input)
        out = UngatedMLP(a, self.dtype, self.lora_scale, name="mlp")(normed)
        # In the order in which transformers adds and rounds.
        if a.parallel_residual:
            x = out + attended + x
        else:
            x = mlp_input + out
        return x, cache, {}
