"""DeBERTa-v2 and v3 with the head of a reward model (He et al. 2021, "DeBERTa: Decoding-enhanced BERT with disentangled
attention", https://arxiv.org/abs/2006.03654; v3: https://arxiv.org/abs/2111.09543).

An encoder: each token sees all of its text. What a token j is to a token i is a sum of three products, of which two know how
far apart they stand: with delta(i, j) the bucket of i - j, K^r and Q^r projections of one table of relative positions,

    A_ij = (Q_i . K_j  +  Q_i . K^r_delta(i,j)  +  K_j . Q^r_delta(i,j)) / sqrt(3 d)

Parameters, a nested dict (L: the stacked layers; S: the relative span; what stands in brackets only where config.json has it):
    words/embedding [V, E], (places/embedding [positions, E]), (embed_proj/kernel [E, D]), embed_norm/{scale, bias} [D]
    relative/embedding [2 S, D], (relative_norm/{scale, bias} [D])
    layers/attention/{q_proj, k_proj, v_proj, o_proj, (pos_k_proj, pos_q_proj)}/{kernel [L, D, D], bias [L, D]}
    layers/mlp/{up_proj, down_proj}/{kernel [L, in, out], bias [L, out]}
    layers/{attention_norm, mlp_norm}/{scale, bias} [L, D]
    (conv/{kernel [taps, D, D], bias [D]}, conv_norm/{scale, bias} [D])
    pooler/{kernel [D, D], bias [D]}, score/{kernel [D, 1], bias [1]}
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.models.deberta.architecture import DebertaArchitecture

ACTIVATIONS = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu,
    "relu": nn.relu,
    "silu": nn.silu,
    "tanh": nn.tanh,
}


def layer_norm(x, scale, bias, epsilon: float):
    """LayerNorm over the last axis, computed in float32; the result has x's type."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _norm_params(module, name, width):
    return module.param(name, lambda _: {"scale": jnp.ones(width), "bias": jnp.zeros(width)})


def _table(module, name, rows, width):
    return module.param(
        name, lambda key: {"embedding": nn.initializers.normal(0.02)(key, (rows, width))}
    )["embedding"]


def relative_buckets(distance: np.ndarray, a: DebertaArchitecture) -> np.ndarray:
    """Which rows of the table of relative positions these distances have, int32.

    With log_buckets a distance up to S / 2 has a row of its own; beyond, rows cover distances that grow geometrically up to
    max_relative_distance, and what is farther has the last one.
    """
    span, bucket = a.relative_span, distance
    if a.log_buckets:
        near = span // 2
        far = np.maximum(np.abs(distance), near).astype(np.float32) / np.float32(near)
        # float32, as the weights were trained with: another rounding of the logarithm may be another bucket.
        share = np.log(far) / np.log(np.float32((a.max_relative_distance - 1) / near))
        beyond = np.ceil(share * np.float32(near - 1)).astype(np.int32) + near
        bucket = np.where(np.abs(distance) <= near, distance, beyond * np.sign(distance))
    return np.clip(bucket + span, 0, 2 * span - 1).astype(np.int32)


def align_distances(by_distance):
    """[..., T, 2T] -> [..., T, T]: entry (i, j) is what stood at (i, j - i + T - 1).

    Not a gather: read as rows that are one shorter, each begins one column further left than the one before.
    """
    *lead, T, _ = by_distance.shape
    flat = by_distance.reshape(*lead, 2 * T * T)[..., T - 1 : -1]
    return flat.reshape(*lead, T, 2 * T - 1)[..., :T]


class Attention(nn.Module):
    architecture: DebertaArchitecture
    dtype: Any

    @nn.compact
    def __call__(self, x_BxTxD, relative_2SxD, visible_BxTxT):
        a, T = self.architecture, x_BxTxD.shape[1]
        of_positions = ("q_proj", "k_proj") if a.share_keys else ("pos_q_proj", "pos_k_proj")
        dense = {
            name: nn.Dense(a.hidden_size, dtype=self.dtype, name=name)
            for name in dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", *of_positions))
        }

        def project(name, x):
            return dense[name](x).reshape(*x.shape[:-1], a.num_heads, a.head_dim)

        def product(axes, left, right):
            return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)

        scale = 1 / math.sqrt(a.head_dim * (1 + a.content_to_position + a.position_to_content))
        q, k, v = (project(name, x_BxTxD) for name in ("q_proj", "k_proj", "v_proj"))
        scores_BxHxTxT = product("bihd,bjhd->bhij", q * scale, k)
        column = np.arange(2 * T)  # f of the products below
        if a.content_to_position:  # f = j - i + T - 1
            keys = project(of_positions[1], relative_2SxD)[relative_buckets(T - 1 - column, a)]
            scores_BxHxTxT += align_distances(product("bihd,fhd->bhif", q * scale, keys))
        if a.position_to_content:  # f = i - j + T - 1
            queries = project(of_positions[0], relative_2SxD)[relative_buckets(column - (T - 1), a)]
            scores_BxHxTxT += align_distances(
                product("bjhd,fhd->bhjf", k * scale, queries)
            ).swapaxes(-1, -2)
        weights = jax.nn.softmax(
            jnp.where(visible_BxTxT[:, None], scores_BxHxTxT, -1e30), axis=-1
        ).astype(v.dtype)
        out = jnp.einsum("bhij,bjhd->bihd", weights, v)
        return dense["o_proj"](out.reshape(x_BxTxD.shape))


class MLP(nn.Module):
    architecture: DebertaArchitecture
    dtype: Any

    @nn.compact
    def __call__(self, x):
        a = self.architecture
        x = ACTIVATIONS[a.activation](
            nn.Dense(a.intermediate_size, dtype=self.dtype, name="up_proj")(x)
        )
        return nn.Dense(a.hidden_size, dtype=self.dtype, name="down_proj")(x)


class Layer(nn.Module):
    architecture: DebertaArchitecture
    dtype: Any

    @nn.compact
    def __call__(self, x, first, relative, visible, conv, conv_norm):
        """`first`: bool, whether it is the first layer, which the convolution's output `conv` is added behind."""
        a = self.architecture
        attended = Attention(a, self.dtype, name="attention")(x, relative, visible)
        x = layer_norm(
            x + attended,
            **_norm_params(self, "attention_norm", a.hidden_size),
            epsilon=a.norm_epsilon,
        )
        x = layer_norm(
            x + MLP(a, self.dtype, name="mlp")(x),
            **_norm_params(self, "mlp_norm", a.hidden_size),
            epsilon=a.norm_epsilon,
        )
        if conv is not None:
            x = jnp.where(first, layer_norm(x + conv, **conv_norm, epsilon=a.norm_epsilon), x)
        return x, None


class Convolution(nn.Module):
    """Of each token with its neighbours in its own text."""

    architecture: DebertaArchitecture
    dtype: Any

    @nn.compact
    def __call__(self, x_BxTxD, segments_BxT):
        a, T = self.architecture, x_BxTxD.shape[1]
        taps, width = a.conv_kernel_size, a.hidden_size
        kernel = self.param("kernel", nn.initializers.normal(0.02), (taps, width, width)).astype(
            self.dtype
        )
        out = self.param("bias", nn.initializers.zeros, (width,)).astype(self.dtype)
        reach = taps // 2
        x = jnp.pad(x_BxTxD, ((0, 0), (reach, reach), (0, 0)))
        segments = jnp.pad(segments_BxT, ((0, 0), (reach, reach)), constant_values=-2)  # of nobody
        for tap in range(taps):
            same = (segments[:, tap : tap + T] == segments_BxT)[..., None]
            out = out + jnp.where(same, x[:, tap : tap + T], 0) @ kernel[tap]
        return ACTIVATIONS[a.conv_activation](out)


class Deberta(nn.Module):
    """The encoder with its pooler and a score.

    Attributes:
      architecture: the shape.
      dtype: of the computation; parameters may be of any type.
    """

    architecture: DebertaArchitecture
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens_BxT, positions_BxT, segments_BxT):
        """Scores texts, several of which may stand in a row.

        Args:
          tokens_BxT: int32 token ids.
          positions_BxT: int32, each token's place in its own text, from 0.
          segments_BxT: int32; a token sees those in the row that have the same segment. A text's tokens stand together.

        Returns:
          float32 [B, T]: at each text's first token its score. Elsewhere it means nothing.
        """
        a = self.architecture
        x = self._embed(tokens_BxT, positions_BxT)
        relative = _table(self, "relative", 2 * a.relative_span, a.hidden_size).astype(self.dtype)
        if a.norm_relative:
            relative = layer_norm(
                relative,
                **_norm_params(self, "relative_norm", a.hidden_size),
                epsilon=a.norm_epsilon,
            )
        conv = conv_norm = None
        if a.conv_kernel_size:
            conv = Convolution(a, self.dtype, name="conv")(x, segments_BxT)
            conv_norm = _norm_params(self, "conv_norm", a.hidden_size)
        visible = segments_BxT[:, :, None] == segments_BxT[:, None]
        stack = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, *[nn.broadcast] * 4),
            length=a.num_layers,
        )
        first = jnp.arange(a.num_layers) == 0
        x, _ = stack(a, self.dtype, name="layers")(x, first, relative, visible, conv, conv_norm)
        x = ACTIVATIONS[a.pooler_activation](
            nn.Dense(a.hidden_size, dtype=self.dtype, name="pooler")(x)
        )
        return nn.Dense(1, dtype=jnp.float32, name="score")(x)[..., 0]

    def _embed(self, tokens, positions):
        a = self.architecture
        x = _table(self, "words", a.vocab_size, a.embedding_size)[tokens].astype(self.dtype)
        if a.absolute_positions:
            x += _table(self, "places", a.max_position_embeddings, a.embedding_size)[
                positions
            ].astype(self.dtype)
        if a.embedding_size != a.hidden_size:
            x = nn.Dense(a.hidden_size, use_bias=False, dtype=self.dtype, name="embed_proj")(x)
        return layer_norm(
            x, **_norm_params(self, "embed_norm", a.hidden_size), epsilon=a.norm_epsilon
        )


def init_deberta_params(model: Deberta, key) -> dict:
    """Random parameters."""
    one = jnp.zeros((1, 1), jnp.int32)
    return model.init(key, one, one, one)["params"]
