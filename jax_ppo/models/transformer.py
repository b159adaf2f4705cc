"""The decoder of all families: grouped-query attention, RoPE, RMSNorm and a gated MLP.

`Architecture` holds everything in which the families differ. The parameters are a nested dict:

    embed/embedding [V, D]
    layers/{input_norm, post_attention_norm}/scale [L, D]
    layers/{pre_feedforward_norm, post_feedforward_norm}/scale [L, D] (with post_norms)
    layers/attention/{q_proj, k_proj, v_proj, o_proj}/{kernel [L, in, out], bias [L, out]}
    layers/attention/{q_norm, k_norm}/scale [L, head_dim] (with qk_norm)
    layers/mlp/{gate_proj, up_proj, down_proj}/{kernel [L, in, out], bias [L, out]}
    norm/scale [D]

L is the axis of the stacked layers. The unrolled form has `layer_0`, `layer_1`, ... instead of
`layers`, without this axis. Heads are stored in the same dict (heads.py) and adapters next to the
kernels that they belong to (lora.py); the decoder ignores the heads.

Two conventions leave room for mixtures of experts. A stacked parameter may have further axes
between L and its own, such as the experts' in layers/mlp/experts/{gate_proj, ...}/kernel
[L, E, in, out]; import, `unroll_params` and the optimizer only rely on L coming first, and a
partition rule for `experts/` goes before the rules for kernels, since the first match counts. And
a block may return auxiliary outputs, such as the loss of a router, which are collected per layer
in `TransformerOutput.auxiliary`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jax_ppo.models import rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import run_attention
from jax_ppo.models.cache import (
    LayerCache,
    attend_to_cache,
    cache_layout,
    num_columns,
    write_tokens,
)
from jax_ppo.models.lora import Lora
from jax_ppo.types import Params

# Up to this number of layers the loop over stacked parameters is unrolled: on a CPU the gradient
# takes a quarter less time, and compilation is as fast.
MAX_UNROLLED_LAYERS = 8
ACTIVATION_FUNCTIONS = {"silu": nn.silu, "gelu_pytorch_tanh": nn.gelu}

# Whether a layer is local: known when the program is traced, or an input of the loop over layers.
IsLocal = bool | jax.Array
Auxiliary = dict[str, jax.Array]


class TransformerOutput(NamedTuple):
    """Result of the decoder.

    Attributes:
      hidden: Hidden states after the last norm, [B, T, D] in the type of the computation.
      cache: Keys and values of each layer (cache.py) in the unrolled form, `None` otherwise.
      auxiliary: Further outputs of the layers by name, [L, ...]; empty for the present layers.
    """

    hidden: jax.Array
    cache: tuple[LayerCache, ...] | None
    auxiliary: Auxiliary


class LayerOutput(NamedTuple):
    """Result of one layer besides its hidden states.

    Attributes:
      cache: Keys and values, or `None` if they are not kept.
      auxiliary: Further outputs by name.
    """

    cache: LayerCache | None
    auxiliary: Auxiliary


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last axis."""

    architecture: Architecture

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize `x`, rounding to its type at the same points as transformers."""
        a = self.architecture
        init = nn.initializers.zeros if a.norm_plus_one else nn.initializers.ones
        scale = self.param("scale", init, (x.shape[-1],), jnp.float32).astype(x.dtype)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + a.norm_epsilon)
        # Families with 1 + scale round after the multiplication, the others before it.
        if a.norm_plus_one:
            return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return scale * wide.astype(x.dtype)


class Dense(nn.Module):
    """A projection [..., in] -> [..., features], with adapters if the parameters have them.

    The leading axes are merged in the product, so that its gradient needs no transposed copies.
    """

    features: int
    use_bias: bool
    dtype: DTypeLike
    lora_scale: float | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the projection of `x`."""
        kernel = self.param(
            "kernel", nn.initializers.normal(0.02), (x.shape[-1], self.features), jnp.float32
        )
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        out = jax.lax.dot(flat, kernel.astype(self.dtype))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            out += bias.astype(self.dtype)
        if self.has_variable("params", "lora_a"):
            assert self.lora_scale is not None, "adapters without their shape"
            out += self._adapter(flat, self.lora_scale)
        return out.reshape(*x.shape[:-1], self.features)

    def _adapter(self, flat: jax.Array, scale: float) -> jax.Array:
        """Return scale (x A) B; the scale itself is not rounded."""
        lora_a: jax.Array = self.get_variable("params", "lora_a")
        lora_b: jax.Array = self.get_variable("params", "lora_b")
        low_rank = jax.lax.dot(flat, lora_a.astype(self.dtype), preferred_element_type=jnp.float32)
        return jax.lax.dot((scale * low_rank).astype(self.dtype), lora_b.astype(self.dtype))


class Attention(nn.Module):
    """Attention with its projections and rotary embeddings.

    Attributes:
      architecture: The architecture.
      dtype: Type of the computation.
      program: Program for whole sequences, one of attention.py's.
      decoding: Program for new tokens, one of cache.py's.
      lora_scale: Scale of the adapters, if there are any.
    """

    architecture: Architecture
    dtype: DTypeLike
    program: str
    decoding: str
    lora_scale: float | None

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        is_local: IsLocal,
        rotations: tuple[rope.Rotation, ...],
        segments_BxT: jax.Array | None,
        cache: LayerCache | None,
        columns_B: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache]:
        """Return the output [B, T, D], and the cache of these tokens or with these tokens."""
        a = self.architecture
        q, k, v = self._project(x_BxTxD)
        cos, sin = rotations[0]
        if len(rotations) > 1:
            local_cos, local_sin = rotations[1]
            cos = jnp.where(is_local, local_cos, cos)
            sin = jnp.where(is_local, local_sin, sin)
        q = rope.rotate(q, cos, sin)
        k = rope.rotate(k, cos, sin)
        if cache is None or columns_B is None:
            out = self._attend_to_sequences(q, k, v, is_local, segments_BxT)
            cache = cache_layout(self.decoding, k, v)
        else:
            cache = write_tokens(self.decoding, cache, k, v, columns_B)
            out = attend_to_cache(
                self.decoding,
                q,
                cache,
                columns_B,
                sliding_window=a.sliding_window if is_local else None,
                scale=a.attention_scale,
                softcap=a.attention_softcap,
            )
        out = out.reshape(*x_BxTxD.shape[:2], a.num_heads * a.head_dim)
        project = Dense(a.hidden_size, a.output_bias, self.dtype, self.lora_scale, name="o_proj")
        return project(out), cache

    def _project(self, x_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [B, T, H, d], keys and values [B, T, K, d]."""
        a = self.architecture

        def project(name: str, heads: int) -> jax.Array:
            dense = Dense(heads * a.head_dim, a.qkv_bias, self.dtype, self.lora_scale, name=name)
            return dense(x_BxTxD).reshape(*x_BxTxD.shape[:2], heads, a.head_dim)

        q = project("q_proj", a.num_heads)
        k = project("k_proj", a.num_kv_heads)
        v = project("v_proj", a.num_kv_heads)
        if a.qk_norm:
            q = RMSNorm(a, name="q_norm")(q)
            k = RMSNorm(a, name="k_norm")(k)
        return q, k, v

    def _attend_to_sequences(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        is_local: IsLocal,
        segments_BxT: jax.Array | None,
    ) -> jax.Array:
        """Return the attention of whole sequences, [B, T, H, d]."""
        a = self.architecture

        def attend(sliding_window: int | None) -> jax.Array:
            return run_attention(
                self.program,
                q,
                k,
                v,
                segments_BxT,
                scale=a.attention_scale,
                softcap=a.attention_softcap,
                sliding_window=sliding_window,
            )

        # A window that holds the whole row changes nothing.
        if a.sliding_window is None or q.shape[1] <= a.sliding_window:
            return attend(None)
        return _if_local(is_local, lambda: attend(a.sliding_window), lambda: attend(None))


def _if_local(
    is_local: IsLocal, local: Callable[[], jax.Array], other: Callable[[], jax.Array]
) -> jax.Array:
    """Return local() or other(); if `is_local` is traced, both are compiled."""
    if isinstance(is_local, bool):
        return local() if is_local else other()
    return jax.lax.cond(is_local, local, other)


class MLP(nn.Module):
    """The gated MLP."""

    architecture: Architecture
    dtype: DTypeLike
    lora_scale: float | None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, Auxiliary]:
        """Return the output [..., D] and auxiliary outputs, of which this block has none."""
        a = self.architecture

        def project(name: str, features: int, x: jax.Array) -> jax.Array:
            return Dense(features, a.mlp_bias, self.dtype, self.lora_scale, name=name)(x)

        gate = project("gate_proj", a.intermediate_size, x)
        up = project("up_proj", a.intermediate_size, x)
        activated = ACTIVATION_FUNCTIONS[a.activation](gate)
        return project("down_proj", a.hidden_size, activated * up), {}


class Layer(nn.Module):
    """One layer: attention and MLP, each with its norms and a residual connection.

    Attributes:
      architecture: The architecture.
      dtype: Type of the computation.
      attention: Program for whole sequences, one of attention.py's.
      decoding: Program for new tokens, one of cache.py's.
      keep_cache: Whether keys and values are returned; a scan would stack them for nothing.
      is_local: Whether the layer is local; `None` if layers of a scan differ and each is passed
        its own value.
      lora_scale: Scale of the adapters, if there are any.
    """

    architecture: Architecture
    dtype: DTypeLike
    attention: str
    decoding: str
    keep_cache: bool
    is_local: bool | None
    lora_scale: float | None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        is_local: jax.Array | None,
        rotations: tuple[rope.Rotation, ...],
        segments_BxT: jax.Array | None,
        cache: LayerCache | None = None,
        columns_B: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerOutput]:
        """Return the hidden states after this layer and its other outputs."""
        a = self.architecture

        def norm(name: str, x: jax.Array) -> jax.Array:
            return RMSNorm(a, name=name)(x)

        attend = Attention(
            architecture=a,
            dtype=self.dtype,
            program=self.attention,
            decoding=self.decoding,
            lora_scale=self.lora_scale,
            name="attention",
        )
        mlp = MLP(a, self.dtype, self.lora_scale, name="mlp")
        own_is_local: Any = is_local if self.is_local is None else self.is_local
        attended, cache = attend(
            norm("input_norm", x), own_is_local, rotations, segments_BxT, cache, columns_B
        )
        # The names are Hugging Face's; post_attention_norm is another place with post_norms.
        if a.post_norms:
            x = x + norm("post_attention_norm", attended)
            out, auxiliary = mlp(norm("pre_feedforward_norm", x))
            x = x + norm("post_feedforward_norm", out)
        else:
            x = x + attended
            out, auxiliary = mlp(norm("post_attention_norm", x))
            x = x + out
        return x, LayerOutput(cache if self.keep_cache else None, auxiliary)


class Transformer(nn.Module):
    """The decoder without a head.

    Attributes:
      architecture: The architecture.
      dtype: Type of the computation; parameters may have any type.
      remat: Whether each layer is recomputed in the backward pass.
      unrolled: `False`: the layers are one `scan` over stacked parameters, which compiles fast
        (training, scoring). `True`: each layer has its own code and keys and values are returned
        (decoding, without copies of the cache). `unroll_params` converts parameters of the first
        form to the second.
      attention: Program for whole sequences, one of attention.py's.
      decoding: Program for one new token per row, one of cache.py's; it determines the layout of
        the cache.
      lora: Shape of the adapters in the parameters (lora.join_adapters), if there are any.
    """

    architecture: Architecture
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    unrolled: bool = False
    attention: str = "xla"
    decoding: str = "cpu"
    lora: Lora | None = None

    @nn.compact
    def __call__(
        self,
        tokens_BxT: Int[Array, "B T"],
        positions_BxT: Int[Array, "B T"],
        segments_BxT: Int[Array, "B T"] | None = None,
        *,
        cache: tuple[LayerCache, ...] | None = None,
    ) -> TransformerOutput:
        """Compute the hidden states of tokens.

        Args:
          tokens_BxT: Token ids.
          positions_BxT: Position of each token in its own sequence, from 0 and below T (below S
            with a cache).
          segments_BxT: A token attends to the earlier tokens in its row that have the same
            segment. `None`: each row is one segment. Not used with a cache.
          cache: Keys and values of each layer (cache.py), for one new token per row (T = 1,
            unrolled). Its rows beyond B are left alone. The token at position i of a sequence is
            in column i; the new token is written to its own column and attends up to it.

        Returns:
          Hidden states and, if unrolled, the cache: that of these tokens with S = T, or the one
          passed in with the new tokens written to it.
        """
        a = self.architecture
        embedding = self.param("embed", _init_embedding, a.vocab_size, a.hidden_size)["embedding"]
        x = embedding[tokens_BxT].astype(self.dtype)
        if a.scaled_embedding:
            x = x * jnp.float32(a.hidden_size**0.5).astype(self.dtype)
        length = tokens_BxT.shape[1]
        if cache is not None:
            length = num_columns(self.decoding, cache[0])
        rotations: tuple[rope.Rotation, ...] = (rope.rotation_tables(a, positions_BxT, length),)
        if a.local_rope_theta is not None:
            rotations = (*rotations, rope.rotation_tables(a, positions_BxT, length, local=True))
        if self.unrolled:
            columns_B = positions_BxT[:, 0]
            x, new_cache, auxiliary = self._unrolled_layers(
                x, rotations, segments_BxT, cache, columns_B
            )
        else:
            x, auxiliary = self._scanned_layers(x, rotations, segments_BxT)
            new_cache = None
        return TransformerOutput(RMSNorm(a, name="norm")(x), new_cache, auxiliary)

    def _layer_options(self) -> dict[str, Any]:
        return {
            "architecture": self.architecture,
            "dtype": self.dtype,
            "attention": self.attention,
            "decoding": self.decoding,
            "lora_scale": None if self.lora is None else self.lora.scale,
        }

    def _scanned_layers(
        self,
        x: jax.Array,
        rotations: tuple[rope.Rotation, ...],
        segments_BxT: jax.Array | None,
    ) -> tuple[jax.Array, Auxiliary]:
        """Run all layers as one scan over stacked parameters."""
        num_layers = self.architecture.num_layers
        is_local = self.architecture.layers_are_local
        in_loop = num_layers > MAX_UNROLLED_LAYERS
        all_alike = len(set(is_local)) == 1
        layer = Layer
        if self.remat:
            layer = nn.remat(Layer, prevent_cse=not in_loop)
        stack = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=num_layers,
            in_axes=(nn.broadcast if all_alike else 0, nn.broadcast, nn.broadcast),
            unroll=1 if in_loop else num_layers,
        )
        layers = stack(
            **self._layer_options(),
            keep_cache=False,
            is_local=is_local[0] if all_alike else None,
            name="layers",
        )
        each_is_local = None if all_alike else jnp.array(is_local)
        x, output = layers(x, each_is_local, rotations, segments_BxT)
        return x, output.auxiliary

    def _unrolled_layers(
        self,
        x: jax.Array,
        rotations: tuple[rope.Rotation, ...],
        segments_BxT: jax.Array | None,
        cache: tuple[LayerCache, ...] | None,
        columns_B: jax.Array,
    ) -> tuple[jax.Array, tuple[LayerCache, ...], Auxiliary]:
        """Run each layer as code of its own."""
        layer = Layer
        if self.remat:
            layer = nn.remat(Layer)
        new_cache = []
        auxiliary = []
        for i, is_local in enumerate(self.architecture.layers_are_local):
            block = layer(
                **self._layer_options(), keep_cache=True, is_local=is_local, name=f"layer_{i}"
            )
            layer_cache = None if cache is None else cache[i]
            x, output = block(x, None, rotations, segments_BxT, layer_cache, columns_B)
            assert output.cache is not None  # because of keep_cache
            new_cache.append(output.cache)
            auxiliary.append(output.auxiliary)
        return x, tuple(new_cache), jax.tree.map(lambda *x: jnp.stack(x), *auxiliary)


def _init_embedding(key: jax.Array, rows: int, width: int) -> Params:
    return {"embedding": nn.initializers.normal(0.02)(key, (rows, width), jnp.float32)}


def unroll_params(params: Params, dtype: DTypeLike | None = None) -> Params:
    """Return the parameters of `Transformer(unrolled=True)` for stacked ones.

    Args:
      params: Parameters with stacked layers; heads are kept.
      dtype: Type of the result; `None`: unchanged.
    """
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    layers = params["layers"]
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    unrolled = {name: value for name, value in params.items() if name != "layers"}
    for i in range(num_layers):
        unrolled[f"layer_{i}"] = jax.tree.map(lambda x, i=i: x[i], layers)
    return unrolled
