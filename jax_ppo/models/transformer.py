"""One decoder for all families (grouped-query attention, RoPE, RMSNorm, gated MLP). `Architecture` says what differs.

Parameters, a nested dict (L: the stacked layers; the unrolled form has `layer_0`, ... instead, without this axis):
    embed/embedding [V, D]
    layers/{input_norm, post_attention_norm}/scale [L, D] (with post_norms {pre_feedforward_norm, post_feedforward_norm} too)
    layers/attention/{q_proj, k_proj, v_proj, o_proj}/kernel [L, in, out] (bias [L, out])
    layers/attention/{q_norm, k_norm}/scale [L, head_dim] (with qk_norm)
    layers/mlp/{gate_proj, up_proj, down_proj}/kernel [L, in, out]
    norm/scale [D]
Heads stand beside these in the same dict (heads.py) and the decoder does not look at them. Adapters stand beside the kernels
that they belong to (lora.py).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_ppo.models import attention, rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.cache import attend_to_cache, cache_layout, num_columns, write_tokens
from jax_ppo.models.lora import Lora

MAX_UNROLLED_LAYERS = 8  # so many are no loop: on a CPU its gradient takes a quarter less then, and it compiles as fast


class RMSNorm(nn.Module):
    architecture: Architecture

    @nn.compact
    def __call__(self, x):
        a = self.architecture
        start = nn.initializers.zeros if a.norm_plus_one else nn.initializers.ones
        scale = self.param("scale", start, (x.shape[-1],), jnp.float32).astype(x.dtype)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + a.norm_epsilon)
        if a.norm_plus_one:  # the one place where families round at different points
            return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return scale * wide.astype(x.dtype)


class Dense(nn.Module):
    """x [..., in] -> [..., features], with the adapters of the projection where the parameters have them (lora.py).

    The axes before are one in the product: its gradient needs no transposed copies then.
    """

    features: int
    use_bias: bool
    dtype: Any
    lora_scale: float | None

    @nn.compact
    def __call__(self, x):
        kernel = self.param(
            "kernel", nn.initializers.normal(0.02), (x.shape[-1], self.features), jnp.float32
        )
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        out = jax.lax.dot(flat, kernel.astype(self.dtype))
        if self.use_bias:
            out += self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32).astype(
                self.dtype
            )
        if self.has_variable("params", "lora_a"):
            a, b = (
                self.get_variable("params", name).astype(self.dtype)
                for name in ("lora_a", "lora_b")
            )
            low = self.lora_scale * jax.lax.dot(
                flat, a, preferred_element_type=jnp.float32
            )  # the scale itself is not rounded
            out += jax.lax.dot(low.astype(self.dtype), b)
        return out.reshape(*x.shape[:-1], self.features)


class Attention(nn.Module):
    architecture: Architecture
    dtype: Any
    program: str
    decoding: str
    lora_scale: float | None

    @nn.compact
    def __call__(self, x_BxTxD, is_local, rotations, segments_BxT, cache, columns_B):
        a = self.architecture
        B, T, _ = x_BxTxD.shape

        def project(name, heads):
            out = Dense(heads * a.head_dim, a.qkv_bias, self.dtype, self.lora_scale, name=name)(
                x_BxTxD
            )
            return out.reshape(B, T, heads, a.head_dim)

        q, k, v = (
            project("q_proj", a.num_heads),
            project("k_proj", a.num_kv_heads),
            project("v_proj", a.num_kv_heads),
        )
        if a.qk_norm:
            q, k = RMSNorm(a, name="q_norm")(q), RMSNorm(a, name="k_norm")(k)
        cos_sin = rotations[0]
        if len(rotations) > 1:
            cos_sin = jax.tree.map(
                lambda whole, local: jnp.where(is_local, local, whole), *rotations
            )
        q, k = rope.rotate(q, *cos_sin), rope.rotate(k, *cos_sin)
        options = {"scale": a.attention_scale, "softcap": a.attention_softcap}
        if cache is None:

            def attend(sliding_window):
                return attention.run_attention(
                    self.program, q, k, v, segments_BxT, sliding_window=sliding_window, **options
                )

            short = a.sliding_window is None or T <= a.sliding_window
            out = (
                attend(None)
                if short
                else _if_local(is_local, lambda: attend(a.sliding_window), lambda: attend(None))
            )
            cache = cache_layout(self.decoding, k, v)
        else:
            cache = write_tokens(self.decoding, cache, k, v, columns_B)
            out = attend_to_cache(
                self.decoding,
                q,
                cache,
                columns_B,
                sliding_window=a.sliding_window if is_local else None,
                **options,
            )
        out = out.reshape(B, T, a.num_heads * a.head_dim)
        return Dense(a.hidden_size, a.output_bias, self.dtype, self.lora_scale, name="o_proj")(
            out
        ), cache


def _if_local(is_local, yes, no):
    """yes() or no(). `is_local` is known, or a value of the loop over layers."""
    return (
        (yes if is_local else no)()
        if isinstance(is_local, bool)
        else jax.lax.cond(is_local, yes, no)
    )


class MLP(nn.Module):
    architecture: Architecture
    dtype: Any
    lora_scale: float | None

    @nn.compact
    def __call__(self, x):
        a = self.architecture

        def project(name, features, x):
            return Dense(features, a.mlp_bias, self.dtype, self.lora_scale, name=name)(x)

        gate, up = (
            project("gate_proj", a.intermediate_size, x),
            project("up_proj", a.intermediate_size, x),
        )
        gate = {"silu": nn.silu, "gelu_pytorch_tanh": nn.gelu}[a.activation](gate)
        return project("down_proj", a.hidden_size, gate * up)


class Layer(nn.Module):
    architecture: Architecture
    dtype: Any
    attention: str
    decoding: str
    keep_cache: bool  # a scan would stack the keys and values that nobody reads
    is_local: (
        bool | None
    )  # None: some layers of the scan are, some are not, and each is told when it is called
    lora_scale: float | None

    @nn.compact
    def __call__(self, x, is_local, rotations, segments_BxT, cache=None, columns_B=None):
        a = self.architecture

        def norm(name, x):
            return RMSNorm(a, name=name)(x)

        attend = Attention(
            a, self.dtype, self.attention, self.decoding, self.lora_scale, name="attention"
        )
        mlp = MLP(a, self.dtype, self.lora_scale, name="mlp")
        attended, cache = attend(
            norm("input_norm", x),
            is_local if self.is_local is None else self.is_local,
            rotations,
            segments_BxT,
            cache,
            columns_B,
        )
        if a.post_norms:  # Hugging Face's names: the second one means another place here
            x = x + norm("post_attention_norm", attended)
            x = x + norm("post_feedforward_norm", mlp(norm("pre_feedforward_norm", x)))
        else:
            x = x + attended
            x = x + mlp(norm("post_attention_norm", x))
        return x, cache if self.keep_cache else None


class Transformer(nn.Module):
    """The decoder without a head.

    Attributes:
      architecture: the shape.
      dtype: of the computation; parameters may be of any type.
      remat: recompute each layer in the backward pass.
      unrolled: False: layers are one `scan` over stacked parameters (short compilation: training, scoring). True:
        layers are written out and keys and values come back (decoding: no copy of the cache). `unroll` turns
        parameters of the first form into the second.
      attention: the program for whole sequences, one of attention.py's.
      decoding: the program for one new token a row, one of cache.py's, which says what form the cache has.
      lora: of the adapters that the parameters have, if they have any (lora.join).
    """

    architecture: Architecture
    dtype: Any = jnp.float32
    remat: bool = False
    unrolled: bool = False
    attention: str = "xla"
    decoding: str = "cpu"
    lora: Lora | None = None

    @nn.compact
    def __call__(self, tokens_BxT, positions_BxT, segments_BxT=None, *, cache=None):
        """Runs tokens through the layers.

        Args:
          tokens_BxT: int32 token ids.
          positions_BxT: int32, each token's place in its own sequence, from 0 and below T (S with a cache).
          segments_BxT: int32; a token sees those before it in the row that have the same segment. None: the row is one
            segment. Not with a cache.
          cache: for one new token a row (T = 1, unrolled): of each layer (cache.py), maybe with rows behind, which are left
            alone. The token at position i of a sequence has column i; the new token goes into its own and sees those up to it.

        Returns:
          hidden states after the last norm, [B, T, D] in `dtype`, and, unrolled, the cache: of these tokens, with S =
          T, or the one that was given with the new token in it. None when not unrolled.
        """
        a = self.architecture
        embedding = self.param("embed", _embedding, a.vocab_size, a.hidden_size)["embedding"]
        x = embedding[tokens_BxT].astype(self.dtype)
        if a.scaled_embedding:
            x = x * jnp.float32(a.hidden_size**0.5).astype(self.dtype)
        length = tokens_BxT.shape[1] if cache is None else num_columns(self.decoding, cache[0])
        rotations = (
            rope.rotation_tables(a, positions_BxT, length),
        )  # and that of local layers, where it is another
        if a.local_rope_theta is not None:
            rotations += (rope.rotation_tables(a, positions_BxT, length, local=True),)
        x, cache = self._layers(x, rotations, segments_BxT, cache, positions_BxT[:, 0])
        return RMSNorm(a, name="norm")(x), cache

    def _layers(self, x, rotations, segments_BxT, cache, columns_B):
        layers, local = self.architecture.num_layers, self.architecture.layers_are_local
        in_loop, programs = (
            not self.unrolled and layers > MAX_UNROLLED_LAYERS,
            (self.attention, self.decoding),
        )
        layer = nn.remat(Layer, prevent_cse=not in_loop) if self.remat else Layer
        scale = self.lora and self.lora.scale
        if not self.unrolled:
            of_all = local[0] if len(set(local)) == 1 else None
            stack = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=layers,
                in_axes=(nn.broadcast if of_all is not None else 0, nn.broadcast, nn.broadcast),
                unroll=1 if in_loop else layers,
            )
            return stack(
                self.architecture, self.dtype, *programs, False, of_all, scale, name="layers"
            )(x, None if of_all is not None else jnp.array(local), rotations, segments_BxT)
        new_cache = []
        for i in range(layers):
            own = None if cache is None else cache[i]
            block = layer(
                self.architecture, self.dtype, *programs, True, local[i], scale, name=f"layer_{i}"
            )
            x, own = block(x, None, rotations, segments_BxT, own, columns_B)
            new_cache.append(own)
        return x, tuple(new_cache)


def _embedding(key, rows, width):
    return {"embedding": nn.initializers.normal(0.02)(key, (rows, width), jnp.float32)}


def unroll_params(params: dict, dtype=None) -> dict:
    """Parameters for `Transformer(unrolled=True)` from the stacked ones, cast to `dtype` if given. Heads come along."""
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    layers = params["layers"]
    count = jax.tree.leaves(layers)[0].shape[0]
    unstacked = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count)}
    return {name: value for name, value in params.items() if name != "layers"} | unstacked
