"""Layers of the decoder: norms, dense layers with adapters, attention and the MLP."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_ppo.models import rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import Segments, run_attention, run_attention_over_parts
from jax_ppo.models.cache import Columns, LayerCache, attend_to_cache, write_tokens
from jax_ppo.models.experts import ExpertMLP
from jax_ppo.models.lora import Lora
from jax_ppo.models.quantization import converted_kernel
from jax_ppo.runtime.parallelism.split_attention import (
    copy_kv_heads,
    drop_padded_heads,
    num_row_parts,
    pad_query_heads,
)

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu_pytorch_tanh": nn.gelu,
    "gelu": functools.partial(nn.gelu, approximate=False),
}

# Name of the output of attention, [B, T, H, d], for policies of gradient checkpointing.
ATTENTION_OUTPUT = "attention_output"
# A property of a layer: known when the program is traced, or an input of the loop over layers.
Flag = bool | jax.Array
Auxiliary = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """The computation of a decoder's layers. Hashable."""

    architecture: Architecture
    dtype: DTypeLike = jnp.float32  # of the computation; parameters may have any type
    attention: str = "xla"  # program for whole sequences, one of attention.py's
    decoding: str = "cpu"  # program for a new token, one of cache.py's; decides the cache's layout
    lora: Lora | None = None  # shape of the adapters in the parameters (lora.join_params)
    router_loss: bool = False  # the loss of the routers is returned, for training with experts
    returns_routed_experts: bool = False  # the experts that each token passes through are returned


class LayerKind(NamedTuple):
    """The properties in which layers of a model may differ."""

    is_local: Flag  # it has a sliding window
    is_rotated: Flag  # it has a rotary embedding
    is_linear: bool = False  # it has a Gated DeltaNet or a short convolution in place of attention
    is_dense: bool = False  # it has one of the MLPs of `Architecture.dense_layers`
    is_shared: bool = False  # it reads the keys and values of an earlier layer


class LayerInputs(NamedTuple):
    """Inputs of a layer besides hidden states: arrays with an entry for each token."""

    routed_experts: jax.Array | None = None  # [B, T, k], recorded (experts.select_experts)
    embedding: jax.Array | None = None  # for this layer, [B, T, per_layer_size]


NO_INPUTS = LayerInputs()


def layer_kinds(architecture: Architecture) -> tuple[LayerKind, ...]:
    """Return the kind of each layer."""
    a = architecture
    dense = a.dense_layers or (False,) * a.num_layers
    flags = (a.layers_are_local, a.layers_are_rotated, a.layers_are_linear, dense)
    return tuple(map(LayerKind, *flags, a.layers_are_shared))


def multiply(x: jax.Array, factor: float) -> jax.Array:
    """Return `x` times a factor that is not rounded to the type of `x`, as in transformers."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def normalize(x: jax.Array, epsilon: float) -> jax.Array:
    """Return `x` divided by its root mean square over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)


def layer_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], bias: Float[Array, " D"], epsilon: float
) -> Float[Array, "... D"]:
    """Apply LayerNorm over the last axis in float32 and return the type of `x`."""
    wide = x.astype(jnp.float32)
    wide = normalize(wide - wide.mean(axis=-1, keepdims=True), epsilon)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last axis."""

    architecture: Architecture
    epsilon: float | None = None  # `None`: the model's

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize `x`, rounding to its type at the same points as transformers."""
        a = self.architecture
        init = nn.initializers.zeros if a.norm_plus_one else nn.initializers.ones
        scale = self.param("scale", init, (x.shape[-1],), jnp.float32).astype(x.dtype)
        wide = normalize(x, a.norm_epsilon if self.epsilon is None else self.epsilon)
        # Some families round after the multiplication, others before it.
        if a.norm_plus_one or a.norm_in_float32:
            return (wide * (scale.astype(jnp.float32) + a.norm_plus_one)).astype(x.dtype)
        return scale * wide.astype(x.dtype)


class LayerNorm(nn.Module):
    """Normalization to mean 0 and variance 1 over the last axis (Ba et al. 2016)."""

    architecture: Architecture

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize `x` in float32, rounding to its type at the end, as transformers does."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)
        rounded = (scale.astype(x.dtype), bias.astype(x.dtype))
        return layer_norm(x, *rounded, self.architecture.norm_epsilon)


class Dense(nn.Module):
    """A projection [..., in] -> [..., features], with adapters if the parameters have them.

    The leading axes are merged in the product, so that its gradient needs no transposed copies. An
    int8 kernel has a scale per column (quantization.py).
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
        # Parameters are float32 while they are trained; products are in the computation dtype.
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        out = jax.lax.dot(flat, converted_kernel(kernel, flat, self.dtype))
        if self.has_variable("params", "kernel_scale"):
            scale: jax.Array = self.get_variable("params", "kernel_scale")
            out = (out * scale).astype(self.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            out += bias.astype(self.dtype)
        if self.has_variable("params", "lora_a"):
            assert self.lora_scale is not None, "adapters without their shape"
            lora_a: jax.Array = self.get_variable("params", "lora_a").astype(self.dtype)
            lora_b: jax.Array = self.get_variable("params", "lora_b").astype(self.dtype)
            # scale (x A) B, where the scale itself is not rounded.
            low_rank = jax.lax.dot(flat, lora_a, preferred_element_type=jnp.float32)
            out += jax.lax.dot((self.lora_scale * low_rank).astype(self.dtype), lora_b)
        return out.reshape(*x.shape[:-1], self.features)


class DecoderModule(nn.Module):
    """A part of a decoder that has projections."""

    options: LayerOptions

    def create_dense(
        self, name: str, features: int, has_bias: bool = False, create: type[Dense] = Dense
    ) -> Dense:
        """Return a projection."""
        scale = None if self.options.lora is None else self.options.lora.scale
        return create(features, has_bias, self.options.dtype, scale, name=name)

    def project(self, name: str, features: int, x: jax.Array, has_bias: bool = False) -> jax.Array:
        """Return the projection of `x`, [..., features]."""
        return self.create_dense(name, features, has_bias)(x)


class Attention(DecoderModule):
    """Attention with its projections and rotary embeddings."""

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
        """Return the output [B, T, D], and keys and values or the cache with these tokens.

        A layer that shares keys and values gets the earlier layer's as its cache; for whole
        sequences these are [B, T, K, d], and `columns_B` is `None`.
        """
        a = self.options.architecture
        is_shared = a.shared_layers > 0 and kind.is_shared
        num_kv_heads, width = a.kv_heads(kind.is_local)
        q, gate = self._queries(x_BxTxD, num_kv_heads, width)
        cos, sin = self._rotation(kind, rotations)
        of_queries = rotations[1] if a.query_growth else (cos, sin)
        q = rope.rotate(q, *of_queries, a.rope_interleaved)
        if not is_shared:
            k, v = self._keys_and_values(x_BxTxD, kind)
            k = rope.rotate(k, cos, sin, a.rope_interleaved)
            # The mesh may split more finely than there are heads: copies give each device some.
            k, v = copy_kv_heads(k), copy_kv_heads(v)
        factors: dict[str, Any] = {"scale": a.attention_scale, "softcap": a.attention_softcap}
        if a.attention_sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (a.num_heads,), jnp.float32)
            padded = pad_query_heads(sinks[None, None, :, None], num_kv_heads)
            factors["sinks"] = padded.reshape(-1).astype(jnp.float32)
        if cache is None or columns_B is None:
            # Keys are cached after rotation: it depends on their position only.
            cache = cache if is_shared and cache is not None else (k, v)
            out = self._attend_to_sequences(q, *cache, kind.is_local, segments_BxT, factors)
        else:
            if not is_shared:
                cache = write_tokens(self.options.decoding, cache, k, v, columns_B)
            out = attend_to_cache(
                self.options.decoding,
                q,
                cache,
                columns_B,
                # Decoding is unrolled, so `is_local` is a Python bool here.
                sliding_window=a.sliding_window if kind.is_local else None,
                **factors,
            )
        out = checkpoint_name(drop_padded_heads(out, a.num_heads, num_kv_heads), ATTENTION_OUTPUT)
        if gate is not None:
            out *= nn.sigmoid(gate)
        out = out.reshape(*x_BxTxD.shape[:2], a.num_heads * width)
        return self.project("o_proj", a.hidden_size, out, a.output_bias), cache

    def _queries(
        self, x_BxTxD: jax.Array, num_kv_heads: int, width: int
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return queries [B, T, H, d], and gates like them, `None` if there are none.

        If the mesh cannot split the query heads, heads of zeros are added, but not to gates.
        """
        a = self.options.architecture
        gate = None
        if a.output_gate:
            both = self._project_to_heads(x_BxTxD, "q_proj", a.num_heads, 2 * width)
            q, gate = jnp.split(both, 2, axis=-1)
        else:
            q = self._project_to_heads(x_BxTxD, "q_proj", a.num_heads, width, "q_norm")
        # Before a norm per head and the rotation, which then run on the heads of each device.
        q = pad_query_heads(q, num_kv_heads)
        return self._normalize_heads("q_norm", q), gate

    def _keys_and_values(self, x_BxTxD: jax.Array, kind: LayerKind) -> tuple[jax.Array, jax.Array]:
        a = self.options.architecture
        heads = a.kv_heads(kind.is_local)
        k = self._project_to_heads(x_BxTxD, "k_proj", *heads, "k_norm")
        v = k
        if not a.keys_as_values or kind.is_local:
            v = self._project_to_heads(x_BxTxD, "v_proj", *heads)
        if a.value_norm:
            v = normalize(v, a.norm_epsilon).astype(v.dtype)
        return self._normalize_heads("k_norm", k), v

    def _project_to_heads(
        self, x_BxTxD: jax.Array, name: str, heads: int, width: int, norm: str = ""
    ) -> jax.Array:
        a = self.options.architecture
        out = self.project(name, heads * width, x_BxTxD, a.qkv_bias)
        if norm and a.qk_norm_over_heads:
            out = RMSNorm(a, name=norm)(out)
        return out.reshape(*x_BxTxD.shape[:2], heads, width)

    def _normalize_heads(self, norm: str, x: jax.Array) -> jax.Array:
        a = self.options.architecture
        return RMSNorm(a, name=norm)(x) if a.qk_norm and not a.qk_norm_over_heads else x

    def _rotation(self, kind: LayerKind, rotations: tuple[rope.Rotation, ...]) -> rope.Rotation:
        a = self.options.architecture
        # The first rotation is that of global layers; local ones may have another base.
        cos, sin = rotations[0]
        if a.local_rope_theta is not None:
            if isinstance(kind.is_local, bool):
                cos, sin = rotations[kind.is_local]
            else:
                both = zip(rotations[1], rotations[0], strict=True)
                cos, sin = (jnp.where(kind.is_local, local, other) for local, other in both)
        if a.unrotated_layers:
            cos = jnp.where(kind.is_rotated, cos, 1)  # a rotation by zero changes no bit
            sin = jnp.where(kind.is_rotated, sin, 0)
        return cos, sin

    def _attend_to_sequences(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        is_local: Flag,
        segments_BxT: Segments,
        factors: dict[str, Any],
    ) -> jax.Array:
        """Return the attention of whole sequences, [B, T, H, d]."""
        window = self.options.architecture.sliding_window
        # Parameters are created from one token, which has no parts.
        parts = 1 if self.is_initializing() else num_row_parts()
        run: Callable[..., jax.Array] = run_attention_over_parts if parts > 1 else run_attention

        def attend(window: int | None) -> jax.Array:
            program = self.options.attention
            return run(program, q, k, v, segments_BxT, sliding_window=window, **factors)

        # A window that holds the whole row changes nothing.
        if window is None or q.shape[1] * parts <= window:
            return attend(None)
        if isinstance(is_local, bool):
            return attend(window if is_local else None)
        # Both are compiled.
        return jax.lax.cond(is_local, lambda: attend(window), lambda: attend(None))


def apply_gate(architecture: Architecture, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return the input of the MLP's last projection."""
    a = architecture
    if a.swiglu_limit is None:
        return ACTIVATION_FUNCTIONS[a.activation](gate) * up
    gate = jnp.minimum(gate, a.swiglu_limit)
    up = jnp.clip(up, -a.swiglu_limit, a.swiglu_limit)
    return gate * nn.sigmoid(a.swiglu_slope * gate) * (up + 1)


class MLP(DecoderModule):
    """The MLP, or the expert that every token passes through."""

    width: int
    has_output_gate: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, Auxiliary]:
        """Return the output [..., D] and auxiliary outputs, of which this block has none."""
        a = self.options.architecture
        up = self.project("up_proj", self.width, x, a.mlp_bias)
        if "gate_proj" in a.mlp_projections:
            gate = self.project("gate_proj", self.width, x, a.mlp_bias)
            hidden = apply_gate(a, gate, up)
        else:
            hidden = ACTIVATION_FUNCTIONS[a.activation](up)
        out = self.project("down_proj", a.hidden_size, hidden, a.mlp_bias)
        if self.has_output_gate:
            out *= nn.sigmoid(self.project("shared_expert_gate", 1, x, a.mlp_bias))
        return out, {}


class Layer(DecoderModule):
    """One layer: attention and MLP, each with its norms and a residual connection."""

    attention_class: ClassVar[type[DecoderModule]] = Attention
    norm_class: ClassVar[type[nn.Module]] = RMSNorm

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
        a = self.options.architecture
        is_dense = bool(a.dense_layers) and kind.is_dense

        def norm(name: str, x: jax.Array) -> jax.Array:
            create: Callable[..., Callable[..., jax.Array]] = self.norm_class
            return create(a, name=name)(x)

        run_mlp: Callable[[jax.Array], tuple[jax.Array, Auxiliary]]
        if a.num_experts and not is_dense:
            experts = ExpertMLP(
                architecture=a,
                dtype=self.options.dtype,
                gate=functools.partial(apply_gate, a),
                router_loss=self.options.router_loss,
                returns_routed_experts=self.options.returns_routed_experts,
                name="mlp",
            )
            run_mlp = functools.partial(
                experts, segments_RxL=segments_BxT, routed_experts_RxLxk=inputs.routed_experts
            )
        else:
            width, name = (a.dense_size, "dense_mlp") if is_dense else (a.intermediate_size, "mlp")
            run_mlp = MLP(self.options, width, name=name)
        normed = norm("input_norm", x) if a.pre_norms else x
        attended, cache = self._attend(normed, kind, rotations, segments_BxT, cache, columns_B)
        # The names are Hugging Face's; with post_norms, post_attention_norm is in another place.
        if a.post_norms:
            attended = norm("post_attention_norm", attended)
        attended = multiply(attended, a.residual_multiplier)
        residual = x + attended
        mlp_input = x if a.parallel_residual else residual
        if a.pre_norms and a.post_norms:
            mlp_input = norm("pre_feedforward_norm", mlp_input)
        elif a.pre_norms:
            mlp_input = norm("post_attention_norm", mlp_input)
        out, auxiliary = run_mlp(mlp_input)
        if a.shared_expert_size and not is_dense:
            sizes = (a.shared_expert_size, a.shared_expert_gate)
            out += MLP(self.options, *sizes, name="shared_expert")(mlp_input)[0]
        if a.post_norms:
            out = norm("post_feedforward_norm", out)
        out = multiply(out, a.residual_multiplier)
        # In the order in which transformers adds and rounds.
        x = out + attended + x if a.parallel_residual else residual + out
        if inputs.embedding is not None:
            gate = self.project("per_layer_input_gate", a.per_layer_size, x)
            gated = ACTIVATION_FUNCTIONS[a.activation](gate) * inputs.embedding
            out = self.project("per_layer_projection", a.hidden_size, gated)
            x += norm("post_per_layer_input_norm", out)
        if a.layer_scalars:
            scalar = self.param("layer_scalar", nn.initializers.ones, (1,), jnp.float32)
            x *= jax.lax.stop_gradient(scalar).astype(x.dtype)
        return x, cache, auxiliary

    def _attend(self, x: jax.Array, *inputs: Any) -> tuple[jax.Array, LayerCache | None]:
        kind: LayerKind = inputs[0]
        name = self.options.architecture.attention_module(kind.is_local, kind.is_shared)
        attention: Callable[..., tuple[jax.Array, LayerCache | None]]
        attention = self.attention_class(self.options, name=name)
        return attention(x, *inputs)


class UngatedLayer(Layer):
    """A layer of the first decoders: LayerNorm and an MLP without a gate."""

    norm_class = LayerNorm
