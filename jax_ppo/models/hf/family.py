"""The contents of an entry of the table of model families."""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of decoders, identified by the `model_type` of its config.json."""

    # The classes in transformers.
    class_prefix: str  # of {class_prefix}ForCausalLM
    classifier_prefix: str = ""  # of ...ForSequenceClassification; "": `class_prefix`
    has_token_classifier: bool = True  # there is ...ForTokenClassification with a head `score`
    decoder_class: str = ""  # the language model's class; "": {class_prefix}ForCausalLM

    # Fields of config.json, by the family's names: here those that differ, by Llama's name.
    field_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    absent: Set[str] = frozenset()  # fields of Llama that the family lacks
    # Fields of `Architecture` that are the same in all models of the family.
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Further fields, and the only value of each that is supported.
    neutral: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Fields and what each one sets in `Architecture`, besides those that all families have.
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Boolean fields, `False` by default, and the switches of `Architecture` that each turns on.
    bias_fields: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # Values that transformers uses for missing fields.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    nullable: Set[str] = frozenset()  # sizes and numbers that transformers accepts as null
    # Refused unless null, and the reason.
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)

    # Experts.
    # Names of their number, of which one is read and the first is written; (): a single MLP.
    expert_fields: tuple[str, ...] = ()
    expert_width: str = "intermediate_size"  # field of the width of an expert
    # Boolean field: the weights of a token's experts are divided by their sum; "": always.
    expert_weights_field: str = ""
    # Field of the number of experts that every token passes through, which are one MLP as wide as
    # all of them; "": another field has its width, or there is none.
    shared_experts_field: str = ""
    # Field of the number of first layers with an MLP of `intermediate_size`, not experts; "": none.
    first_dense_field: str = ""
    # Layers in `mlp_only_layers` have such an MLP, and all but every `decoder_sparse_step`-th.
    lists_dense_layers: bool = False
    has_router_groups: bool = False  # tokens select groups of experts first
    stacked_experts: bool = False  # a tensor of the checkpoint holds all experts of a layer

    # Which layers have a sliding window. "none": no layer; "refused": no layer, but config.json may
    # have a window that is not used; "all": every layer, if config.json has a `sliding_window`;
    # "switched": the same, if `use_sliding_window` is set; "last": the layers from
    # `max_window_layers` on, if `use_sliding_window` is set; "pattern": all layers except every
    # n-th; "listed": those in `layer_types`, or every layer. With the last three, `layer_types`
    # decides if there is one.
    sliding_windows: str = "none"
    window_period: int = 1  # with "pattern", n
    window_period_field: str = ""  # with "pattern", the field that overrides n; "": none
    # Layers without a sliding window, of which the last one is one, have heads of another width,
    # and the last layers may share keys and values (Gemma 4).
    has_global_heads: bool = False

    # Fields that name the activation of the MLP, of which the first is read and all are written.
    activation_fields: tuple[str, ...] = ("hidden_act",)
    activation: str = "silu"  # the default
    # The family's names of activations, and the usual names.
    activation_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    # Positions.
    learned_positions: bool = False  # they are embedded instead of rotated
    rope_theta: float = 10_000.0  # base of the rotary embedding unless config.json has one
    # Share of a head that is rotated unless config.json says so; `None`: it cannot.
    partial_rotary_factor: float | None = None
    # Every n-th layer has no rotary embedding unless `no_rope_layers` lists others; 0: all have.
    unrotated_period: int = 0
    # The family's names of rotary embeddings, and the usual names.
    rope_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Base of layers with a sliding window, if separate and config.json has none; `None`: shared.
    local_rope_theta: float | None = None
    # Further numbers among the rotary parameters, which then describe YaRN.
    rope_numbers: tuple[str, ...] = ()
    # The rotary parameters unless config.json has some.
    rope_parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_length_outside: bool = False  # `original_max_position_embeddings` is not among them

    # What `layer_types` calls a layer of `Architecture.linear_layers`; "": no layer is one.
    linear_word: str = ""
    # With n, all layers but every n-th one are such, unless config.json has another
    # `full_attention_interval` or lists `layer_types`; 0: those outside `full_attn_idxs` are.
    linear_period: int = 0
    # The MLP is two thirds as wide, rounded up, unless `block_auto_adjust_ff_dim` is false.
    adjusted_width: bool = False

    # Tensors of the checkpoint.
    # Projections that are stored as one tensor, and its name.
    fused_projections: Mapping[tuple[str, ...], str] = dataclasses.field(default_factory=dict)
    fused_by_head: bool = False  # it holds all projections of one head, then of the next
    # Projections that PEFT takes for routed experts', wherever they are.
    expert_names_in_peft: tuple[str, ...] = ()
    input_first: bool = False  # kernels are stored [in, out] instead of [out, in]
    # Names of modules by Llama's, where they differ: {"self_attn.o_proj": "self_attn.dense"}.
    module_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Prefixes of tensors in other files on the hub, and the usual prefixes.
    older_prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Add the defaults that all families share."""
        epsilon = self.field_names.get("rms_norm_eps", "rms_norm_eps")
        object.__setattr__(self, "defaults", {epsilon: 1e-6, **self.defaults})

    def tensor_name(self, name: str) -> str:
        """Return the usual name of a tensor."""
        return replace_prefix(name, self.older_prefixes)


# The decoder's tensors in files of transformers and on the hub, and those that are left out.
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PREFIXES = (
    *("vision_tower.", "multi_modal_projector.", "visual.", "image_newline"),
    *("audio_tower.", "embed_vision.", "embed_audio."),
)


@dataclasses.dataclass(frozen=True)
class Multimodal:
    """A family of models of which only the text decoder is read, from `text_config` or the top."""

    # The decoder's `model_type` where `FAMILIES` lacks it, and the equivalent one of these.
    text_families: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # By that `model_type`, values of fields that are missing.
    defaults: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    tied: bool = False  # the output embedding is the input's unless config.json says so
    is_text: bool = False  # there is nothing but the decoder, under another `model_type`
    # The decoder in what transformers' AutoModelForCausalLM, or ...ForImageTextToText, loads.
    decoder_module: str = "model.language_model"

    def tensor_name(self, name: str) -> str:
        """Return a tensor's name in the decoder's family; "" if it is left out."""
        if name.removeprefix("model.").startswith(_OTHER_PREFIXES):
            return ""
        return replace_prefix(name, TEXT_PREFIXES)


def replace_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with what replaces the first of the prefixes that it has."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name
