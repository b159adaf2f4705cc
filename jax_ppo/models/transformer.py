"""One decoder: Llama and Qwen2 (grouped-query attention, RoPE, RMSNorm, SwiGLU). `Architecture` says what differs.

Parameters, a nested dict (L: the stacked layers; the unrolled form has `layer_0`, ... instead, without this axis):
    embed/embedding [V, D]
    layers/{input_norm, post_attention_norm}/scale [L, D]
    layers/attention/{q_proj, k_proj, v_proj, o_proj}/kernel [L, in, out] (bias [L, out])
    layers/mlp/{gate_proj, up_proj, down_proj}/kernel [L, in, out]
    norm/scale [D]
Heads stand beside these in the same dict (heads.py) and the decoder does not look at them.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_ppo.models import attention, rope
from jax_ppo.models.architecture import Architecture

FEW_LAYERS = 8  # so many are no loop: on a CPU its gradient takes a quarter less then, and it compiles as fast


class RMSNorm(nn.Module):
    epsilon: float

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return scale.astype(x.dtype) * wide.astype(x.dtype)


def _dense(features, use_bias, dtype, name):
    """x [..., in] -> [..., features]. The axes before are one in the product: its gradient needs no transposed copies then."""
    kernel_init = nn.initializers.normal(0.02)
    dense = nn.Dense(features, use_bias, dtype=dtype, param_dtype=jnp.float32, kernel_init=kernel_init, name=name)
    return lambda x: dense(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], features)


class Attention(nn.Module):
    architecture: Architecture
    dtype: Any
    program: str

    @nn.compact
    def __call__(self, x_BxTxD, cos_sin, segments_BxT, cache, columns_B, windows):
        a = self.architecture
        B, T, _ = x_BxTxD.shape

        def project(name, heads):
            return _dense(heads * a.head_dim, a.qkv_bias, self.dtype, name)(x_BxTxD).reshape(B, T, heads, a.head_dim)

        q, k, v = project("q_proj", a.num_heads), project("k_proj", a.num_kv_heads), project("v_proj", a.num_kv_heads)
        q, k = rope.rotate(q, *cos_sin), rope.rotate(k, *cos_sin)
        if cache is None:
            out = attention.attend(self.program, q, k, v, segments_BxT)
            cache = (k.transpose(0, 2, 3, 1), v.swapaxes(1, 2))
        else:
            cache = (write_columns(cache[0], k.transpose(0, 2, 3, 1), columns_B, axis=3),
                     write_columns(cache[1], v.swapaxes(1, 2), columns_B, axis=2))
            out = attend_one(q, *cache, columns_B, windows)
        out = out.reshape(B, T, a.num_heads * a.head_dim)
        return _dense(a.hidden_size, a.output_bias, self.dtype, "o_proj")(out), cache


def write_columns(cache, new, columns_B, axis: int):
    """Puts one new key or value a row into that row's column of the cache. `axis`: the columns', of length 1 in `new`."""
    write = jax.vmap(lambda cache, new, at: jax.lax.dynamic_update_slice_in_dim(cache, new, at, axis=axis - 1))
    return write(cache, new.astype(cache.dtype), columns_B)


def attend_one(q_Bx1xHxd, keys_BxKxdxS, values_BxKxSxd, columns_B, windows=()):
    """Attention of one new token a row to the cache up to its own column: two products that transpose nothing.

    Args:
      windows: increasing, the last S. Only the first so many columns are read, as few as hold every row's; (): all S.
    """
    windows = windows or (values_BxKxSxd.shape[2],)

    def read(width, q, keys, values):
        return _attend_one(q, keys[..., :width], values[:, :, :width], jnp.arange(width) <= columns_B[:, None])

    enough = jnp.sum(columns_B.max() >= jnp.array(windows[:-1], jnp.int32))
    return jax.lax.switch(enough, [functools.partial(read, width) for width in windows], q_Bx1xHxd, keys_BxKxdxS,
                          values_BxKxSxd)


def _attend_one(q_Bx1xHxd, keys_BxKxdxS, values_BxKxSxd, readable_BxS):
    B, K, d, _ = keys_BxKxdxS.shape
    q_BxKxGxd = (q_Bx1xHxd * d**-0.5).reshape(B, K, -1, d)
    scores_BxKxGxS = jnp.einsum("bkgd,bkds->bkgs", q_BxKxGxd, keys_BxKxdxS, preferred_element_type=jnp.float32)
    weights_BxKxGxS = jax.nn.softmax(jnp.where(readable_BxS[:, None, None], scores_BxKxGxS, -1e30), axis=-1)
    return jnp.einsum("bkgs,bksd->bkgd", weights_BxKxGxS.astype(values_BxKxSxd.dtype), values_BxKxSxd)


class MLP(nn.Module):
    architecture: Architecture
    dtype: Any

    @nn.compact
    def __call__(self, x):
        a = self.architecture
        gate = _dense(a.intermediate_size, a.mlp_bias, self.dtype, "gate_proj")(x)
        up = _dense(a.intermediate_size, a.mlp_bias, self.dtype, "up_proj")(x)
        return _dense(a.hidden_size, a.mlp_bias, self.dtype, "down_proj")(nn.silu(gate) * up)


class Layer(nn.Module):
    architecture: Architecture
    dtype: Any
    attention: str
    keep_cache: bool  # a scan would stack the keys and values that nobody reads

    @nn.compact
    def __call__(self, x, cos_sin, segments_BxT, cache=None, columns_B=None, windows=()):
        a = self.architecture
        attend, mlp = Attention(a, self.dtype, self.attention, name="attention"), MLP(a, self.dtype, name="mlp")
        attended, cache = attend(RMSNorm(a.norm_epsilon, name="input_norm")(x), cos_sin, segments_BxT, cache, columns_B,
                                 windows)
        x = x + attended
        x = x + mlp(RMSNorm(a.norm_epsilon, name="post_attention_norm")(x))
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
      attention: the program for whole sequences, one of attention.py's. Decoding has its own.
    """

    architecture: Architecture
    dtype: Any = jnp.float32
    remat: bool = False
    unrolled: bool = False
    attention: str = "xla"

    @nn.compact
    def __call__(self, tokens_BxT, positions_BxT, segments_BxT=None, *, cache=None, windows=()):
        """Runs tokens through the layers.

        Args:
          tokens_BxT: int32 token ids.
          positions_BxT: int32, each token's place in its own sequence, from 0.
          segments_BxT: int32; a token sees those before it in the row that have the same segment. None: the row is one
            segment. Not with a cache.
          cache: for one new token a row (T = 1, unrolled): keys [B, kv heads, head_dim, S] and values [B, kv heads, S,
            head_dim] of each layer. The token at position i of a sequence has column i; the new token goes into its own
            and sees those up to it.
          windows: static, with a cache: see `attend_one`.

        Returns:
          hidden states after the last norm, [B, T, D] in `dtype`, and, unrolled, keys and values: of these tokens, laid out
          as in a cache with S = T, or with a cache the cache with the new token in it. None when not unrolled.
        """
        a = self.architecture
        embedding = self.param("embed", _embedding, a.vocab_size, a.hidden_size)["embedding"]
        x = embedding[tokens_BxT].astype(self.dtype)
        rotation = rope.cos_sin(a, positions_BxT)
        x, cache = self._layers(x, rotation, segments_BxT, cache, positions_BxT[:, 0], windows)
        return RMSNorm(a.norm_epsilon, name="norm")(x), cache

    def _layers(self, x, rotation, segments_BxT, cache, columns_B, windows):
        layers = self.architecture.num_layers
        in_loop = not self.unrolled and layers > FEW_LAYERS
        layer = nn.remat(Layer, prevent_cse=not in_loop) if self.remat else Layer
        if not self.unrolled:
            stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast,
                            length=layers, unroll=1 if in_loop else layers)
            return stack(self.architecture, self.dtype, self.attention, keep_cache=False, name="layers")(
                x, rotation, segments_BxT)
        new_cache = []
        for i in range(layers):
            own = None if cache is None else cache[i]
            block = layer(self.architecture, self.dtype, self.attention, keep_cache=True, name=f"layer_{i}")
            x, own = block(x, rotation, segments_BxT, own, columns_B, windows)
            new_cache.append(own)
        return x, tuple(new_cache)


def _embedding(key, rows, width):
    return {"embedding": nn.initializers.normal(0.02)(key, (rows, width), jnp.float32)}


def unroll(params: dict, dtype=None) -> dict:
    """Parameters for `Transformer(unrolled=True)` from the stacked ones, cast to `dtype` if given. Heads come along."""
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    layers = params["layers"]
    count = jax.tree.leaves(layers)[0].shape[0]
    unstacked = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count)}
    return {name: value for name, value in params.items() if name != "layers"} | unstacked
