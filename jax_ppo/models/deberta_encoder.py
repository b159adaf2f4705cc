"""DeBERTa-v2 and v3 with the score head of a reward model.

DeBERTa-v2: He et al. 2021, "DeBERTa: Decoding-enhanced BERT with disentangled attention",
https://arxiv.org/abs/2006.03654; v3: https://arxiv.org/abs/2111.09543.

It is an encoder: each token attends to all of its text. The attention logit of tokens i and j is a
sum of three products, two of which depend on their distance. With delta(i, j) the bucket of i - j
and K^r and Q^r projections of one table of relative positions,

    A_ij = (Q_i . K_j  +  Q_i . K^r_delta(i,j)  +  K_j . Q^r_delta(i,j)) / sqrt(3 d)

The projections are those of the content. The parameters are a nested dict (L: stacked layers; S:
relative span; those in parentheses exist only if config.json asks for a convolution):

    {words/embedding [V, D], relative/embedding [2 S, D]}
    {embed_norm, relative_norm}/{scale, bias} [D]
    layers/attention/{q_proj, k_proj, v_proj, o_proj}/{kernel [L, D, D], bias [L, D]}
    layers/mlp/{up_proj, down_proj}/{kernel [L, in, out], bias [L, out]}
    layers/{attention_norm, mlp_norm}/{scale, bias} [L, D]
    (conv/{kernel [taps, D, D], bias [D]}, conv_norm/{scale, bias} [D])
    pooler/{kernel [D, D], bias [D]}, score/{kernel [D, 1], bias [1]}
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_ppo.models.attention import MASKED_LOGIT
from jax_ppo.models.hf.deberta import DebertaArchitecture
from jax_ppo.models.layers import ACTIVATION_FUNCTIONS, layer_norm
from jax_ppo.types import Params

gelu = ACTIVATION_FUNCTIONS["gelu"]


class EncoderModule(nn.Module):
    """A part of the encoder."""

    architecture: DebertaArchitecture
    dtype: DTypeLike = jnp.float32

    def norm_params(self, name: str) -> Params:
        """Return the parameters of a LayerNorm of hidden states."""
        width = self.architecture.hidden_size
        return self.param(name, lambda _: {"scale": jnp.ones(width), "bias": jnp.zeros(width)})

    def apply_norm(self, x: jax.Array, params: Params) -> jax.Array:
        """Return `x` after a LayerNorm."""
        return layer_norm(x, **params, epsilon=self.architecture.norm_epsilon)

    def embedding(self, name: str, rows: int) -> jax.Array:
        """Return a table [rows, D]."""
        init, shape = nn.initializers.normal(0.02), (rows, self.architecture.hidden_size)
        return self.param(name, lambda key: {"embedding": init(key, shape)})["embedding"]


def relative_buckets(distance: np.ndarray, a: DebertaArchitecture) -> np.ndarray:
    """Return the rows of these distances in the table of relative positions, int32.

    Each distance up to S / 2 has a separate row. Beyond, rows cover ranges that grow geometrically
    up to max_position_embeddings, and the last row covers everything farther.
    """
    span = a.relative_span
    middle = span // 2
    ratio = np.maximum(np.abs(distance), middle).astype(np.float32) / np.float32(middle)
    # In float32, as in training: another rounding of the logarithm could be another bucket.
    share = np.log(ratio) / np.log(np.float32((a.max_position_embeddings - 1) / middle))
    far_bucket = np.ceil(share * np.float32(middle - 1)).astype(np.int32) + middle
    is_near = np.abs(distance) <= middle
    bucket = np.where(is_near, distance, far_bucket * np.sign(distance))
    return np.clip(bucket + span, 0, 2 * span - 1).astype(np.int32)


def align_distances(by_distance: Float[Array, "... T twoT"]) -> Float[Array, "... T T"]:
    """Move entry (i, j - i + T - 1) of [..., T, 2T] to (i, j) of [..., T, T].

    This needs no gather: in rows that are one entry shorter, each one begins one column further
    left than the row before.
    """
    *lead, T, _ = by_distance.shape
    # Dropping T - 1 entries in front and one at the end leaves T rows of 2T - 1.
    flat = by_distance.reshape(*lead, 2 * T * T)[..., T - 1 : -1]
    return flat.reshape(*lead, T, 2 * T - 1)[..., :T]


class Attention(EncoderModule):
    """Disentangled attention with its projections."""

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, relative_2SxD: jax.Array, visible_BxTxT: jax.Array
    ) -> jax.Array:
        """Return the output [B, T, D]; `visible_BxTxT` is true where i attends to j."""
        a = self.architecture
        T = x_BxTxD.shape[1]
        dense = {
            name: nn.Dense(a.hidden_size, dtype=self.dtype, name=name)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }

        def project(name: str, x: jax.Array) -> jax.Array:
            return dense[name](x).reshape(*x.shape[:-1], a.num_heads, a.head_dim)

        def product(axes: str, left: jax.Array, right: jax.Array) -> jax.Array:
            return jnp.einsum(axes, left, right, preferred_element_type=jnp.float32)

        q = project("q_proj", x_BxTxD)
        k = project("k_proj", x_BxTxD)
        v = project("v_proj", x_BxTxD)
        scale = 1 / math.sqrt(3 * a.head_dim)
        logits_BxHxTxT = product("bihd,bjhd->bhij", q * scale, k)
        column = np.arange(2 * T)  # f in the products below
        # Content to position: f = j - i + T - 1.
        keys = project("k_proj", relative_2SxD)[relative_buckets(T - 1 - column, a)]
        logits_BxHxTxT += align_distances(product("bihd,fhd->bhif", q * scale, keys))
        # Position to content: f = i - j + T - 1. Here rows are keys, and the result is transposed.
        queries = project("q_proj", relative_2SxD)[relative_buckets(column - (T - 1), a)]
        by_distance = product("bjhd,fhd->bhjf", k * scale, queries)
        logits_BxHxTxT += align_distances(by_distance).swapaxes(-1, -2)
        logits_BxHxTxT = jnp.where(visible_BxTxT[:, None], logits_BxHxTxT, MASKED_LOGIT)
        weights = jax.nn.softmax(logits_BxHxTxT, axis=-1).astype(v.dtype)
        out = jnp.einsum("bhij,bjhd->bihd", weights, v)
        return dense["o_proj"](out.reshape(x_BxTxD.shape))


class MLP(EncoderModule):
    """The MLP of a layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output, [..., D]."""
        a = self.architecture
        x = nn.Dense(a.intermediate_size, dtype=self.dtype, name="up_proj")(x)
        return nn.Dense(a.hidden_size, dtype=self.dtype, name="down_proj")(gelu(x))


class Layer(EncoderModule):
    """One layer: attention and MLP, each followed by a norm of the residual sum."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        is_first: jax.Array,
        relative: jax.Array,
        visible: jax.Array,
        conv: jax.Array | None,
        conv_norm: Params | None,
    ) -> tuple[jax.Array, None]:
        """Return the hidden states; the first layer adds the convolution's output `conv`."""
        a = self.architecture
        attended = Attention(a, self.dtype, name="attention")(x, relative, visible)
        x = self.apply_norm(x + attended, self.norm_params("attention_norm"))
        out = MLP(a, self.dtype, name="mlp")(x)
        x = self.apply_norm(x + out, self.norm_params("mlp_norm"))
        if conv is not None and conv_norm is not None:
            # All layers of the scan run the same code; only the first keeps this result.
            x = jnp.where(is_first, self.apply_norm(x + conv, conv_norm), x)
        return x, None


class Convolution(EncoderModule):
    """Convolution of each token with its neighbours in the same text."""

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, segments_BxT: jax.Array) -> jax.Array:
        """Return the output, [B, T, D]."""
        a = self.architecture
        T = x_BxTxD.shape[1]
        taps = a.conv_kernel_size
        width = a.hidden_size
        kernel = self.param("kernel", nn.initializers.normal(0.02), (taps, width, width))
        bias = self.param("bias", nn.initializers.zeros, (width,))
        out = bias.astype(self.dtype)
        reach = taps // 2
        x = jnp.pad(x_BxTxD, ((0, 0), (reach, reach), (0, 0)))
        # No text has segment -2.
        segments = jnp.pad(segments_BxT, ((0, 0), (reach, reach)), constant_values=-2)
        for tap in range(taps):
            same_text = (segments[:, tap : tap + T] == segments_BxT)[..., None]
            neighbours = jnp.where(same_text, x[:, tap : tap + T], 0)
            out = out + neighbours @ kernel[tap].astype(self.dtype)
        return gelu(out)


class Deberta(EncoderModule):
    """The encoder with its pooler and a score."""

    @nn.compact
    def __call__(
        self, tokens_BxT: Int[Array, "B T"], segments_BxT: Int[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """Score texts; a row may hold several.

        Args:
          tokens_BxT: token ids.
          segments_BxT: a token attends to the tokens in its row that have the same segment. The
            tokens of a text are contiguous.

        Returns:
          The score of each text at its first token, float32. Other entries are meaningless.
        """
        a = self.architecture
        x = self.embedding("words", a.vocab_size)[tokens_BxT].astype(self.dtype)
        x = self.apply_norm(x, self.norm_params("embed_norm"))
        relative = self.embedding("relative", 2 * a.relative_span).astype(self.dtype)
        relative = self.apply_norm(relative, self.norm_params("relative_norm"))
        conv = conv_norm = None
        if a.conv_kernel_size:
            # The convolution reads the embeddings, so it runs once, before the layers.
            conv = Convolution(a, self.dtype, name="conv")(x, segments_BxT)
            conv_norm = self.norm_params("conv_norm")
        visible = segments_BxT[:, :, None] == segments_BxT[:, None]
        stack = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, *[nn.broadcast] * 4),
            length=a.num_layers,
        )
        is_first = jnp.arange(a.num_layers) == 0
        layers = stack(a, self.dtype, name="layers")
        x = layers(x, is_first, relative, visible, conv, conv_norm)[0]
        x = nn.Dense(a.hidden_size, dtype=self.dtype, name="pooler")(x)
        return nn.Dense(1, dtype=jnp.float32, name="score")(gelu(x))[..., 0]


def init_deberta_params(model: Deberta, key: jax.Array) -> Params:
    """Return random parameters."""
    one_token = jnp.zeros((1, 1), jnp.int32)
    return model.init(key, one_token, one_token)["params"]
