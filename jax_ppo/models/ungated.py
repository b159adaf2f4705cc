"""The ungated block: LayerNorm, attention and an MLP of two projections, all with biases.

Attention is layers.py's. The architecture says which biases and positions it has.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_ppo.models import rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import Segments
from jax_ppo.models.cache import LayerCache
from jax_ppo.models.layers import (
    MLP,
    NO_INPUTS,
    Auxiliary,
    Layer,
    LayerInputs,
    LayerKind,
    layer_norm,
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
        rounded = (scale.astype(x.dtype), bias.astype(x.dtype))
        return layer_norm(x, *rounded, self.architecture.norm_epsilon)


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
        inputs: LayerInputs = NO_INPUTS,
        cache: LayerCache | None = None,
        columns_B: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
        """Return the hidden states after this layer, what it remembers, and other outputs."""
        a = self.architecture
        normed = LayerNorm(a, name="input_norm")(x)
        attended, cache = self._attend(normed, kind, rotations, segments_BxT, cache, columns_B)
        mlp_input = x if a.parallel_residual else x + attended
        normed = LayerNorm(a, name="post_attention_norm")(mlp_input)
        out, _ = MLP(a, self.dtype, self.lora_scale, a.intermediate_size, name="mlp")(normed)
        # In the order in which transformers adds and rounds.
        if a.parallel_residual:
            x = out + attended + x
        else:
            x = mlp_input + out
        return x, cache, {}
