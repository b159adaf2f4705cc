"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are computed from a short vector of each token, its latent, and one
rotated part is a key of all heads. Whole sequences compute keys and values; decoding keeps latents
and rotated parts alone, and moves the projection of a latent to the other side of each product:

    q (c W_k) = (q W_k^T) c        sum of p (c W_v) = (sum of p c) W_v

Its parameters are, per layer,

    attention/{q_a_proj, q_b_proj} or q_proj, {kv_a_proj_with_mqa, kv_b_proj, o_proj}/kernel
    attention/{q_a_norm, kv_a_norm}/scale

A head of `q_b_proj` has first the numbers that are not rotated, then the others; a head of
`kv_b_proj` has its key, then its value.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jax_ppo.models import rope
from jax_ppo.models.attention import Segments
from jax_ppo.models.cache import Columns, attend_to_cache, write_tokens
from jax_ppo.models.layers import ATTENTION_OUTPUT, Attention, Dense, Layer, LayerKind, RMSNorm
from jax_ppo.models.quantization import converted_kernel
from jax_ppo.runtime.parallelism.split_attention import (
    copy_kv_heads,
    drop_padded_heads,
    pad_query_heads,
)

LATENT_EPSILON = 1e-6  # the epsilon of the norms of latents, which config.json does not change


class LatentDense(Dense):
    """The projection from latents [..., c] to numbers of H heads, also without its product."""

    def to_latents(self, x_BxHxn: Float[Array, "B H n"], first: int) -> Float[Array, "B H c"]:
        """Return each head's product with the transpose of its n columns from the `first` on."""
        out: Any = 0
        for weights, scale in self._factors(x_BxHxn, first):
            product = x_BxHxn if scale is None else (x_BxHxn * scale).astype(self.dtype)
            for matrix in reversed(weights):
                axes = "bhn,chn->bhc" if matrix.ndim == 3 else "bhn,cn->bhc"
                product = jnp.einsum(axes, product, matrix)
            out += product
        return out

    def from_latents(
        self, x_BxHxc: Float[Array, "B H c"], first: int, width: int
    ) -> Float[Array, "B H n"]:
        """Return the `width` columns of each head from the `first` on, of separate latents."""
        out: Any = 0
        for weights, scale in self._factors(x_BxHxc, first, width):
            product = x_BxHxc
            for matrix in weights:
                axes = "bhc,chn->bhn" if matrix.ndim == 3 else "bhc,cn->bhn"
                product = jnp.einsum(axes, product, matrix)
            out += product if scale is None else (product * scale).astype(self.dtype)
        return out

    def _factors(
        self, x_BxHxn: jax.Array, first: int, width: int | None = None
    ) -> Iterator[tuple[tuple[jax.Array, ...], Any]]:
        """Yield the matrices of each summand, the last one by heads, and a factor of its result."""
        H, n = x_BxHxn.shape[1], width or x_BxHxn.shape[2]

        def columns(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:-1], H, -1)[..., first : first + n]

        params = self.variables["params"]
        kernel = converted_kernel(params["kernel"], x_BxHxn, self.dtype)
        scale = params.get("kernel_scale")
        yield (columns(kernel),), None if scale is None else columns(scale)
        if "lora_a" in params:
            factors = (params["lora_a"], columns(params["lora_b"]))
            yield tuple(x.astype(self.dtype) for x in factors), self.lora_scale


class LatentAttention(Attention):
    """Attention to keys and values of latents; attributes and arguments as for `Attention`."""

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        kind: LayerKind,
        rotations: tuple[rope.Rotation, ...],
        segments_BxT: Segments,
        cache: Columns | None,
        columns_B: jax.Array | None,
    ) -> tuple[jax.Array, Columns]:
        """Return the output [B, T, D], and the cache of these tokens or with these tokens."""
        a = self.options.architecture
        B, T = x_BxTxD.shape[:2]
        unrotated, width = a.head_dim - a.rope_head_dim, a.value_head_dim

        def rotate(x: jax.Array) -> jax.Array:
            return rope.rotate(x, *rotations[0], a.rope_interleaved)

        queries, name = x_BxTxD, "q_proj"
        if a.query_latent_size:
            queries = self.project("q_a_proj", a.query_latent_size, queries, a.qkv_bias)
            queries, name = RMSNorm(a, LATENT_EPSILON, name="q_a_norm")(queries), "q_b_proj"
        q = self.project(name, a.num_heads * a.head_dim, queries).reshape(B, T, a.num_heads, -1)
        q, q_rotated = q[..., :unrotated], rotate(q[..., unrotated:])
        width_of_both = a.latent_size + a.rope_head_dim
        both = self.project("kv_a_proj_with_mqa", width_of_both, x_BxTxD, a.qkv_bias)
        latents = RMSNorm(a, LATENT_EPSILON, name="kv_a_norm")(both[..., : a.latent_size])
        rotated = rotate(both[..., None, a.latent_size :])
        columns = jnp.concatenate([latents[:, :, None], rotated], axis=-1)
        columns = copy_kv_heads(columns)
        features = a.num_heads * (unrotated + width)
        to_heads: Any = self.create_dense("kv_b_proj", features, create=LatentDense)
        if cache is None or columns_B is None:
            keys_and_values = to_heads(latents).reshape(B, T, a.num_heads, -1)
            k, v = keys_and_values[..., :unrotated], keys_and_values[..., unrotated:]
            k = jnp.concatenate([k, jnp.broadcast_to(rotated, (*k.shape[:3], a.rope_head_dim))], -1)
            q = jnp.concatenate([q, q_rotated], axis=-1)
            out = self._attend_to_heads(q, k, v, kind, segments_BxT)
            cache = columns, columns
        else:
            q = to_heads.to_latents(q[:, 0], 0)[:, None]
            q = pad_query_heads(jnp.concatenate([q, q_rotated], axis=-1), 1)
            decoding = self.options.decoding
            cache = write_tokens(decoding, cache, columns, columns, columns_B)
            out = attend_to_cache(decoding, q, cache, columns_B, scale=a.attention_scale)
            out = drop_padded_heads(out, a.num_heads, 1)[:, 0, :, : a.latent_size]
            out = to_heads.from_latents(out, unrotated, width)[:, None]
        out = checkpoint_name(out, ATTENTION_OUTPUT).reshape(B, T, a.num_heads * width)
        return self.project("o_proj", a.hidden_size, out, a.output_bias), cache

    def _attend_to_heads(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kind: LayerKind, segments_BxT: Segments
    ) -> jax.Array:
        """Return the attention of whole sequences, [B, T, H, value_head_dim]."""
        a = self.options.architecture
        q, k, v = (  # programs take heads of one width: zeros change neither logits nor sums
            jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, a.attended_width - x.shape[-1])))
            for x in (q, k, v)
        )
        q = pad_query_heads(q, a.num_heads)
        k, v = copy_kv_heads(k), copy_kv_heads(v)
        factors = {"scale": a.attention_scale}
        out = self._attend_to_sequences(q, k, v, kind.is_local, segments_BxT, factors)
        return drop_padded_heads(out, a.num_heads, a.num_heads)[..., : a.value_head_dim]


class LatentLayer(Layer):
    """A layer with multi-head latent attention."""

    attention_class = LatentAttention
