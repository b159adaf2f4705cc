"""What one decoder differs from another in. hf_config.py reads and writes it as Hugging Face's config.json."""

import dataclasses
from typing import Any

# The kinds of rotary position embedding (rope.py), with the parameters that each cannot do without.
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor",),
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder's shape. Hashable: it is a static argument of compiled functions.

    Attributes:
      family: Hugging Face's `model_type`.
      vocab_size: V, rows of the embedding.
      hidden_size: D.
      intermediate_size: width of the gated MLP.
      num_layers, num_heads, num_kv_heads, head_dim: attention; num_kv_heads divides num_heads.
      qkv_bias, output_bias, mlp_bias: which projections have a bias.
      activation: of the MLP's gate, "silu" or "gelu_pytorch_tanh".
      scaled_embedding: the input embedding is multiplied by sqrt(D).
      norm_epsilon: RMSNorm.
      norm_plus_one: RMSNorms multiply by 1 + scale.
      qk_norm: queries and keys are normed head by head before they are turned.
      post_norms: what attention and MLP give is normed too, before it is added.
      query_pre_attn_scalar: queries are multiplied by this to the power -1/2; None: by head_dim to that power.
      attention_softcap, logit_softcap: c for scores and for the last logits, which become c tanh(x / c); None: they stay.
      sliding_window: in local layers a token sees so many, the last of them itself.
      local_layers: which layers are local; (): none.
      rope_theta: base of the rotary frequencies.
      rope_scaling: sorted (name, value) pairs of Hugging Face's rope parameters besides the base, lists as tuples.
      local_rope_theta: base in local layers, whose frequencies are not scaled; None: they turn as the others do.
      max_position_embeddings: longest sequence it was made for, tokens.
      tied: the output embedding is the input embedding.
      bos_id, eos_ids, pad_id: token ids; None or () where the checkpoint has none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    scaled_embedding: bool = False
    norm_epsilon: float = 1e-6
    norm_plus_one: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    query_pre_attn_scalar: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    local_layers: tuple[bool, ...] = ()
    rope_theta: float = 10_000.0
    rope_scaling: tuple[tuple[str, Any], ...] = (("rope_type", "default"),)
    local_rope_theta: float | None = None
    max_position_embeddings: int = 2048
    tied: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    @property
    def attention_scale(self) -> float:
        """The factor on the product of a query and a key."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def layers_are_local(self) -> tuple[bool, ...]:
        """`local_layers`, one a layer."""
        return self.local_layers or (False,) * self.num_layers
