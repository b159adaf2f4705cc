"""Layers of the decoder: norms, dense layers with adapters, attention and the MLP."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_ppo.models import cache as whole_cache
from jax_ppo.models import rope, split_cache
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import PrefixedSegments, Segments, run_attention
from jax_ppo.models.attention_over_parts import run_attention_over_parts
from jax_ppo.models.cache import Columns, LayerCache, cache_layout
from jax_ppo.models.experts import ExpertMLP
from jax_ppo.models.quantization import converted_kernel
from jax_ppo.runtime.parallelism.context import num_cache_parts, num_row_parts
from jax_ppo.runtime.parallelism.heads import copy_kv_heads, drop_padded_heads, pad_query_heads

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


class LayerKind(NamedTuple):
    """The properties in which layers of a model may differ.

    Attributes:
      is_local: whether the layer has a sliding window.
      is_rotated: whether it has a rotary embedding.
      is_linear: whether it has a Gated DeltaNet in place of attention; always a bool.
      is_dense: whether it has a single MLP in place of experts; always a bool.
    """

    is_local: Flag
    is_rotated: Flag
    is_linear: Flag = False
    is_dense: Flag = False


def layer_kinds(architecture: Architecture) -> tuple[LayerKind, ...]:
    """Return the kind of each layer."""
    a = architecture
    flags = (a.layers_are_local, a.layers_are_rotated, a.layers_are_linear, a.layers_are_dense)
    return tuple(map(LayerKind, *flags))


def multiply(x: jax.Array, factor: float) -> jax.Array:
    """Return `x` times a factor that is not rounded to the type of `x`, as in transformers."""
    if factor == 1:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last axis.

    With `epsilon=None` the epsilon is the model's.
    """

    architecture: Architecture
    epsilon: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize `x`, rounding to its type at the same points as transformers."""
        a = self.architecture
        init = nn.initializers.zeros if a.norm_plus_one else nn.initializers.ones
        scale = self.param("scale", init, (x.shape[-1],), jnp.float32).astype(x.dtype)
        wide = x.astype(jnp.float32)
        epsilon = a.norm_epsilon if self.epsilon is None else self.epsilon
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
        # Families with 1 + scale round after the multiplication, the others before it.
        if a.norm_plus_one:
            return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return scale * wide.astype(x.dtype)


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
      architecture: the architecture.
      dtype: type of the computation.
      program: program for whole sequences, one of attention.py's.
      decoding: program for new tokens, one of cache.py's.
      lora_scale: scale of the adapters, if there are any.
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
        kind: LayerKind,
        rotations: tuple[rope.Rotation, ...],
        segments_BxT: Segments,
        cache: Columns | None,
        columns_B: jax.Array | None,
    ) -> tuple[jax.Array, Columns]:
        """Return the output [B, T, D], and the cache of these tokens or with these tokens."""
        a = self.architecture
        q, k, v, gate = self._project(x_BxTxD)
        cos, sin = self._rotation(kind, rotations)
        of_queries = rotations[1] if a.query_growth else (cos, sin)
        q = rope.rotate(q, *of_queries, a.rope_interleaved)
        k = rope.rotate(k, cos, sin, a.rope_interleaved)
        # The mesh may split more finely than there are heads: copies give each device its own.
        k = copy_kv_heads(k)
        v = copy_kv_heads(v)
        options: dict[str, Any] = {"scale": a.attention_scale, "softcap": a.attention_softcap}
        if a.attention_sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (a.num_heads,), jnp.float32)
            padded = pad_query_heads(sinks[None, None, :, None], a.num_kv_heads)
            options["sinks"] = padded.reshape(-1).astype(jnp.float32)
        if cache is None or columns_B is None:
            out = self._attend_to_sequences(q, k, v, kind.is_local, segments_BxT, options)
            # Keys are cached after rotation: it depends on their own position only.
            cache = cache_layout(self.decoding, k, v)
        else:
            layout = split_cache if num_cache_parts() > 1 else whole_cache
            cache = layout.write_tokens(self.decoding, cache, k, v, columns_B)
            out = layout.attend_to_cache(
                self.decoding,
                q,
                cache,
                columns_B,
                # Decoding is unrolled, so `is_local` is a Python bool here.
                sliding_window=a.sliding_window if kind.is_local else None,
                **options,
            )
        out = drop_padded_heads(out, a.num_heads, a.num_kv_heads)
        out = checkpoint_name(out, ATTENTION_OUTPUT)
        if gate is not None:
            out *= nn.sigmoid(gate)
        out = out.reshape(*x_BxTxD.shape[:2], a.num_heads * a.head_dim)
        project = Dense(a.hidden_size, a.output_bias, self.dtype, self.lora_scale, name="o_proj")
        return project(out), cache

    def _project(
        self, x_BxTxD: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return queries [B, T, H, d], keys and values [B, T, K, d], and gates like queries.

        If the mesh cannot split the query heads, there are more of them, of zeros; not of gates,
        which are `None` if the architecture has none.
        """
        a = self.architecture
        gate = None

        def project(name: str, heads: int, norm: str = "", width: int = a.head_dim) -> jax.Array:
            dense = Dense(heads * width, a.qkv_bias, self.dtype, self.lora_scale, name=name)
            out = dense(x_BxTxD)
            if norm and a.qk_norm_over_heads:
                out = RMSNorm(a, name=norm)(out)
            return out.reshape(*x_BxTxD.shape[:2], heads, width)

        if a.output_gate:
            q, gate = jnp.split(project("q_proj", a.num_heads, width=2 * a.head_dim), 2, axis=-1)
        else:
            q = project("q_proj", a.num_heads, "q_norm")
        # Before a norm per head and the rotation, which then run on each device's own heads.
        q = pad_query_heads(q, a.num_kv_heads)
        k = project("k_proj", a.num_kv_heads, "k_norm")
        v = project("v_proj", a.num_kv_heads)
        if a.qk_norm and not a.qk_norm_over_heads:
            q = RMSNorm(a, name="q_norm")(q)
            k = RMSNorm(a, name="k_norm")(k)
        return q, k, v, gate

    def _rotation(self, kind: LayerKind, rotations: tuple[rope.Rotation, ...]) -> rope.Rotation:
        """Return cos and sin for a layer of this kind."""
        # The first rotation is that of global layers; local ones may have a base of their own.
        cos, sin = rotations[0]
        if self.architecture.local_rope_theta is not None:
            local_cos, local_sin = rotations[1]
            cos = jnp.where(kind.is_local, local_cos, cos)
            sin = jnp.where(kind.is_local, local_sin, sin)
        if self.architecture.unrotated_layers:
            # A rotation by zero changes no bit.
            cos = jnp.where(kind.is_rotated, cos, 1)
            sin = jnp.where(kind.is_rotated, sin, 0)
        return cos, sin

    def _attend_to_sequences(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        is_local: Flag,
        segments_BxT: Segments,
        options: dict[str, Any],
    ) -> jax.Array:
        """Return the attention of whole sequences, [B, T, H, d]."""
        a = self.architecture
        # Parameters are created from one token, which has no parts.
        parts = 1 if self.is_initializing() else num_row_parts()
        run: Callable[..., jax.Array]
        run = run_attention_over_parts if parts > 1 else run_attention

        def attend(sliding_window: int | None) -> jax.Array:
            return run(
                self.program,
                q,
                k,
                v,
                segments_BxT,
                sliding_window=sliding_window,
                **options,
            )

        # A window that holds the whole row changes nothing.
        if a.sliding_window is None or q.shape[1] * parts <= a.sliding_window:
            return attend(None)
        return _if_local(is_local, lambda: attend(a.sliding_window), lambda: attend(None))


def _if_local(
    is_local: Flag, local: Callable[[], jax.Array], other: Callable[[], jax.Array]
) -> jax.Array:
    """Return local() or other(); if `is_local` is traced, both are compiled."""
    if not isinstance(is_local, bool):
        return jax.lax.cond(is_local, local, other)
    if is_local:
        return local()
    return other()


def apply_gate(architecture: Architecture, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return the input of the MLP's last projection."""
    a = architecture
    if a.swiglu_limit is None:
        return ACTIVATION_FUNCTIONS[a.activation](gate) * up
    gate = jnp.minimum(gate, a.swiglu_limit)
    up = jnp.clip(up, -a.swiglu_limit, a.swiglu_limit)
    return gate * nn.sigmoid(a.swiglu_slope * gate) * (up + 1)


class MLP(nn.Module):
    """The gated MLP, or the expert that every token passes through.

    Attributes:
      architecture: the architecture.
      dtype: type of the computation.
      lora_scale: scale of the adapters, if there are any.
      width: number of its hidden units.
      has_output_gate: whether its output has a gate.
    """

    architecture: Architecture
    dtype: DTypeLike
    lora_scale: float | None
    width: int
    has_output_gate: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, Auxiliary]:
        """Return the output [..., D] and auxiliary outputs, of which this block has none."""
        a = self.architecture

        def project(name: str, features: int, x: jax.Array) -> jax.Array:
            return Dense(features, a.mlp_bias, self.dtype, self.lora_scale, name=name)(x)

        gate = project("gate_proj", self.width, x)
        hidden = apply_gate(a, gate, project("up_proj", self.width, x))
        out = project("down_proj", a.hidden_size, hidden)
        if self.has_output_gate:
            out *= nn.sigmoid(project("shared_expert_gate", 1, x))
        return out, {}


class Layer(nn.Module):
    """One layer: attention and MLP, each with its norms and a residual connection.

    Attributes:
      architecture: the architecture.
      dtype: type of the computation.
      attention: program for whole sequences, one of attention.py's.
      decoding: program for new tokens, one of cache.py's.
      lora_scale: scale of the adapters, if there are any.
      router_loss: whether experts return the loss of their router.
      returns_routed_experts: whether they return which of them each token passes through.
    """

    architecture: Architecture
    dtype: DTypeLike
    attention: str
    decoding: str
    lora_scale: float | None
    router_loss: bool = False
    returns_routed_experts: bool = False

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
        is_dense = bool(a.dense_layers) and kind.is_dense

        def norm(name: str, x: jax.Array) -> jax.Array:
            return RMSNorm(a, name=name)(x)

        run_mlp: Callable[[jax.Array], tuple[jax.Array, Auxiliary]]
        if a.num_experts and not is_dense:
            experts = ExpertMLP(
                architecture=a,
                dtype=self.dtype,
                gate=functools.partial(apply_gate, a),
                router_loss=self.router_loss,
                returns_routed_experts=self.returns_routed_experts,
                name="mlp",
            )
            # The routers' loss, which alone reads them, is refused where samples share prompts.
            own = segments_BxT.own if isinstance(segments_BxT, PrefixedSegments) else segments_BxT
            run_mlp = functools.partial(
                experts, segments_RxL=own, routed_experts_RxLxk=routed_experts_BxTxk
            )
        else:
            width, name = (a.dense_size, "dense_mlp") if is_dense else (a.intermediate_size, "mlp")
            run_mlp = MLP(a, self.dtype, self.lora_scale, width, name=name)
        normed = norm("input_norm", x) if a.pre_norms else x
        attended, cache = self._attend(normed, kind, rotations, segments_BxT, cache, columns_B)
        # The names are Hugging Face's; with post_norms, post_attention_norm is in another place.
        if a.post_norms:
            attended = norm("post_attention_norm", attended)
        x = x + multiply(attended, a.residual_multiplier)
        mlp_input = x
        if a.pre_norms and a.post_norms:
            mlp_input = norm("pre_feedforward_norm", x)
        elif a.pre_norms:
            mlp_input = norm("post_attention_norm", x)
        out, auxiliary = run_mlp(mlp_input)
        if a.shared_expert_size and not is_dense:
            sizes = (a.shared_expert_size, a.shared_expert_gate)
            shared = MLP(a, self.dtype, self.lora_scale, *sizes, name="shared_expert")
            out += shared(mlp_input)[0]
        if a.post_norms:
            out = norm("post_feedforward_norm", out)
        return x + multiply(out, a.residual_multiplier), cache, auxiliary

    def _attend(self, x: jax.Array, *inputs: Any) -> tuple[jax.Array, LayerCache | None]:
        """Return the output of the layer's attention; `inputs` as for `Attention`."""
        attention = Attention(
            architecture=self.architecture,
            dtype=self.dtype,
            program=self.attention,
            decoding=self.decoding,
            lora_scale=self.lora_scale,
            name="attention",
        )
        return attention(x, *inputs)
