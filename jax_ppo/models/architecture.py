"""Description of a decoder: everything in which one decoder differs from another."""

import dataclasses
import itertools
from typing import Any, NamedTuple

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")


class Block(NamedTuple):
    """The parameters of a type of layer; `layer_stack.MODULES` computes it."""

    norm_parameters: tuple[str, ...]  # names of the parameters of each norm
    mlp_inputs: tuple[str, ...]  # names of the MLP's projections of its input


BLOCKS = {
    "gated": Block(("scale",), ("gate_proj", "up_proj")),  # Llama's: RMSNorm and a gated MLP
    # That of the first decoders: LayerNorm and an MLP without a gate.
    "ungated": Block(("scale", "bias"), ("up_proj",)),
    # Llama's with a Gated DeltaNet in place of attention in some layers (recurrent_layers.py).
    "delta": Block(("scale",), ("gate_proj", "up_proj")),
    # Llama's with a short convolution in place of attention in some layers (recurrent_layers.py).
    "convolution": Block(("scale",), ("gate_proj", "up_proj")),
    # Llama's with multi-head latent attention (latent_attention.py).
    "latent": Block(("scale",), ("gate_proj", "up_proj")),
}
# The projections of what takes the place of attention in `linear_layers`, by block.
LINEAR_PROJECTIONS = {
    "delta": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "convolution": ("in_proj", "out_proj"),
}
# Kinds of rotary position embeddings (rope.py), and the parameters that each one requires.
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
# The rotary parameter for the length of pretraining, which three of these kinds have.
ORIGINAL_LENGTH = "original_max_position_embeddings"
# The parameter of routers that decides between experts, of which nothing is learned.
CORRECTION_BIAS = "correction_bias"
# Names of parameters that are float32 wherever others are rounded.
EXACT_PARAMETERS = (CORRECTION_BIAS,)
# The rotary parameter b by which queries at position p are multiplied by 1 + b log(1 + p // n),
# where n is the length of pretraining (Llama 4).
QUERY_GROWTH = "llama_4_scaling_beta"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The architecture of a decoder. Hashable: it is a static argument of compiled functions."""

    family: str  # Hugging Face's `model_type` (hf/families.py); only import and export read it
    vocab_size: int  # V, number of rows of the embedding
    hidden_size: int  # D
    intermediate_size: int  # width of the gated MLP, or of each expert
    num_layers: int
    num_heads: int  # H, number of query heads
    num_kv_heads: int  # K, number of key and value heads; it divides `num_heads`
    head_dim: int  # width of a head

    # How many ids the tokenizer has; the rows beyond are never drawn. `None`: V.
    num_ids: int | None = None
    # Heads of layers without a sliding window, if they differ (Gemma 4).
    global_head_dim: int = 0  # 0: they are as wide as the others
    global_kv_heads: int = 0
    keys_as_values: bool = False  # no projection to values: that to keys takes its place
    # How many of the last layers compute no keys and values, and read those of the last earlier
    # layer of their kind: with a sliding window, or without one.
    shared_layers: int = 0

    # Latent blocks (latent_attention.py).
    latent_size: int = 0  # width of what keys and values of a token are computed from
    query_latent_size: int | None = None  # of queries; `None`: they have no latents
    # How many numbers at the end of each head are rotated; all heads of keys share them.
    rope_head_dim: int = 0
    value_head_dim: int = 0

    qkv_bias: bool = False  # projections to queries, keys and values have biases
    output_bias: bool = False  # the output projection of attention has a bias
    mlp_bias: bool = False  # projections of the MLP have biases, with experts the router too

    # Experts (experts.py).
    num_experts: int = 0  # E, in each MLP; 0: the MLP is a single one
    experts_per_token: int = 0  # k, number of experts that each token passes through
    shared_expert_size: int = 0  # width of a further expert, of every token; 0: there is none
    shared_expert_gate: bool = True  # its output is multiplied by the sigmoid of a gate
    # Which layers have a single MLP in place of experts, or an MLP of `dense_size` in a separate
    # stack, one bool per layer; (): none.
    dense_layers: tuple[bool, ...] = ()
    dense_size: int = 0  # width of that MLP
    # An expert's probability is the sigmoid of its logit, and a bias, which no gradient changes, is
    # added to select experts; otherwise it is the softmax over all.
    sigmoid_router: bool = False
    # Groups of consecutive experts; a token first selects groups (experts.limit_to_groups).
    router_groups: int = 1
    groups_per_token: int = 1  # number of groups that each token selects its experts from
    normalized_expert_weights: bool = False  # a token's weights are divided by their sum
    routed_scale: float = 1.0  # factor on these weights

    activation: str = "silu"  # of the MLP, or of its gate, one of `ACTIVATIONS`
    # c of a clamped MLP: gates above c and inputs beyond -c and c are cut, and the MLP multiplies
    # gate * sigmoid(`swiglu_slope` * gate) by 1 + input; `None`: a usual one.
    swiglu_limit: float | None = None
    swiglu_slope: float = 1.0

    scaled_embedding: bool = False  # the input embedding is multiplied by sqrt(D)
    embedding_multiplier: float = 1.0  # factor on the input embedding
    # Width of each token's further embedding for each layer, added at its end; 0: there is none.
    per_layer_size: int = 0
    layer_scalars: bool = False  # layers multiply their output by a number without a gradient
    residual_multiplier: float = 1.0  # factor on what attention and MLP add to the residual stream
    logit_divisor: float = 1.0  # divides the product of hidden states and output embedding

    norm_epsilon: float = 1e-6
    norm_plus_one: bool = False  # RMSNorm multiplies by 1 + scale instead of scale
    norm_in_float32: bool = False  # it multiplies by scale before it rounds
    qk_norm: bool = False  # queries and keys are normalized per head before they are rotated
    qk_norm_over_heads: bool = False  # ... all heads of a token together
    value_norm: bool = False  # values are normalized per head, without a scale
    pre_norms: bool = True  # the inputs of attention and MLP are normalized
    post_norms: bool = False  # their outputs are normalized before they are added to the stream
    parallel_residual: bool = False  # attention and MLP have the same input

    # Queries are multiplied by this number to the power -1/2; `None`: by `head_dim` to that power.
    query_pre_attn_scalar: int | None = None
    attention_multiplier: float | None = None  # factor on query times key in place of that power
    attention_sinks: bool = False  # each head has a learned logit that belongs to no key
    attention_softcap: float | None = None  # c: logits become c tanh(logit / c); `None`: no cap
    logit_softcap: float | None = None  # the same for the final logits
    # Attention's output is multiplied by the sigmoid of a gate, which q_proj computes, too.
    output_gate: bool = False

    sliding_window: int | None = None  # tokens that one attends to in local layers, itself too
    local_layers: tuple[bool, ...] = ()  # which layers are local, one bool per layer; (): none
    # Which layers have a Gated DeltaNet or a short convolution (`block`); (): none.
    linear_layers: tuple[bool, ...] = ()
    delta_key_heads: int = 0  # of queries and keys of a Gated DeltaNet; divides the next number
    delta_value_heads: int = 0
    delta_key_dim: int = 0  # width of its queries and keys
    delta_value_dim: int = 0  # width of its values
    delta_window: int = 0  # tokens that either one's convolution covers, the current one included

    rope_theta: float = 10_000.0  # base of the rotary frequencies
    # Sorted (name, value) pairs of Hugging Face's rotary parameters but the base; lists as tuples.
    rope_scaling: tuple[tuple[str, Any], ...] = (("rope_type", "default"),)
    # Base of local layers, whose frequencies are not scaled; `None`: they rotate like the others.
    local_rope_theta: float | None = None
    partial_rotary_factor: float = 1.0  # rotated share of each head, its first numbers; 0: none
    rope_interleaved: bool = False  # the pairs (2i, 2i + 1) are rotated instead of (i, i + half)
    unrotated_layers: tuple[bool, ...] = ()  # without rotary embedding, one bool per layer
    learned_positions: bool = False  # the embedding of its position is added to a token's
    max_position_embeddings: int = 2048  # longest sequence that the model was made for, in tokens

    tied: bool = False  # the output embedding is the input embedding
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    block: str = "gated"  # type of the layers, one of `BLOCKS`

    @property
    def mlp_projections(self) -> tuple[str, ...]:
        """Return the names of the MLP's projections."""
        return (*BLOCKS[self.block].mlp_inputs, "down_proj")

    @property
    def projections(self) -> tuple[str, ...]:
        """Return the names of projections that may have adapters; routed experts have none."""
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
        if self.latent_size:
            queries = ("q_a_proj", "q_b_proj") if self.query_latent_size else ("q_proj",)
            names = (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        if self.shared_expert_size or self.dense_layers or not self.num_experts:
            names += self.mlp_projections
        if self.shared_expert_size and self.shared_expert_gate:
            names += ("shared_expert_gate",)
        return names + LINEAR_PROJECTIONS[self.block] if self.linear_layers else names

    @property
    def active_width(self) -> int:
        """Return the width of the MLP that a token passes through, or of its experts together."""
        return self.intermediate_size * (self.experts_per_token or 1) + self.shared_expert_size

    @property
    def attention_scale(self) -> float:
        """Return the factor on the product of a query and a key."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def layers_are_local(self) -> tuple[bool, ...]:
        """Return `local_layers` with one entry per layer, also where no layer is local."""
        return self.local_layers or (False,) * self.num_layers

    @property
    def layers_are_rotated(self) -> tuple[bool, ...]:
        """Return whether each layer has a rotary embedding."""
        return tuple(not bare for bare in self.unrotated_layers) or (True,) * self.num_layers

    @property
    def layers_are_linear(self) -> tuple[bool, ...]:
        """Return `linear_layers` with one entry per layer, also where no layer is linear."""
        return self.linear_layers or (False,) * self.num_layers

    @property
    def layers_are_shared(self) -> tuple[bool, ...]:
        """Return which layers are the last `shared_layers`."""
        return (False,) * (self.num_layers - self.shared_layers) + (True,) * self.shared_layers

    @property
    def partial_stacks(self) -> dict[str, tuple[bool, ...]]:
        """Return, for each group of parameters that only some layers have, which layers."""
        stacks: dict[str, tuple[bool, ...]] = {}
        if self.linear_layers:
            attending = tuple(not linear for linear in self.linear_layers)
            stacks |= {"attention": attending}
            stacks |= dict.fromkeys(("delta_net", "short_conv"), self.linear_layers)
        if self.global_head_dim:
            kinds = tuple(zip(self.layers_are_local, self.layers_are_shared, strict=True))
            for wanted in dict.fromkeys(kinds):
                stacks[self.attention_module(*wanted)] = tuple(kind == wanted for kind in kinds)
        if self.dense_layers:
            sparse = tuple(not dense for dense in self.dense_layers)
            stacks |= {"dense_mlp": self.dense_layers, "mlp": sparse, "shared_expert": sparse}
        return stacks

    def attention_module(self, is_local: Any, is_shared: Any) -> str:
        """Return the name of a layer's attention: layers of one name have the same shapes.

        Where all are alike, the arguments may be arrays of a compiled function.
        """
        if not self.global_head_dim:
            return "attention"
        return "local_" * is_local + "shared_" * is_shared + "attention"

    def kv_heads(self, is_local: Any) -> tuple[int, int]:
        """Return number and width of a layer's heads of keys and values."""
        if not self.global_head_dim or is_local:
            return self.num_kv_heads, self.head_dim
        return self.global_kv_heads, self.global_head_dim

    @property
    def cache_heads(self) -> tuple[tuple[int, int] | None, ...]:
        """Return number and width of the heads of a token's keys, and of its values, in the cache.

        One entry for each layer with a memory, `None` for a recurrent state. With latents a token
        has only these and its rotated part, which are both its key and its value.
        """
        if self.latent_size:
            return ((1, self.latent_size + self.rope_head_dim),) * self.num_layers
        kinds = zip(self.layers_are_local, self.layers_are_linear, strict=True)
        return tuple(
            None if linear else self.kv_heads(local)
            for local, linear in itertools.islice(kinds, self.num_layers - self.shared_layers)
        )

    @property
    def attended_width(self) -> int:
        """Return the greatest width of a head in attention to sequences."""
        return max(self.head_dim, self.value_head_dim, self.global_head_dim)

    @property
    def attended_heads(self) -> tuple[tuple[int, int], ...]:
        """Return number and width of each layer's heads of keys in attention to sequences."""
        if self.latent_size:
            return ((self.num_heads, self.attended_width),) * self.num_layers
        return tuple(map(self.kv_heads, self.layers_are_local))

    @property
    def delta_widths(self) -> tuple[int, int, int]:
        """Return the widths of all heads of a Gated DeltaNet's queries, keys and values."""
        keys = self.delta_key_heads * self.delta_key_dim
        return keys, keys, self.delta_value_heads * self.delta_value_dim

    @property
    def query_growth(self) -> float:
        """Return `QUERY_GROWTH`; 0: the size of queries does not depend on their position."""
        return float(dict(self.rope_scaling).get(QUERY_GROWTH, 0))

    @property
    def rotary_dim(self) -> int:
        """Return how many numbers of each head are rotated; of all heads but the wider ones."""
        return self.rope_head_dim or int(self.head_dim * self.partial_rotary_factor)


INTEGER_FIELDS = frozenset(  # fields whose values are whole numbers, or `None`
    field.name for field in dataclasses.fields(Architecture) if field.type in (int, int | None)
)
