"""Table of the supported model families: how each one's config.json and tensors map to ours.

No other file names families. A family that the decoder can compute is one entry in `FAMILIES`; a
feature that the decoder lacks becomes a field of `Architecture` first.
"""

import dataclasses
from typing import Any

from jax_ppo.models.architecture import QUERY_GROWTH
from jax_ppo.models.hf.family import Family, Multimodal

# fmt: off
# Without the formatter, as in config/schema.py: an entry is read as a paragraph of its class, what
# its config.json says and leaves out, its layers, its positions and the names of its tensors.

# Facts that several families share.
GELU_TANH = "gelu_pytorch_tanh"
_ATTENTION_BIAS = {"attention_bias": ("qkv_bias", "output_bias")}
_BIASES = _ATTENTION_BIAS | {"mlp_bias": ("mlp_bias",)}
_QKV = ("q_proj", "k_proj", "v_proj")
_UNGATED = {"block": "ungated", "mlp_bias": True}

_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
    "max_position_embeddings": 32_768}
_ROPE_OF_TEXT = {"mrope": "default"}  # the three positions of a token of text are equal
_QWEN: dict[str, Any] = {"nullable": {"num_key_value_heads"}, "sliding_windows": "last",
    "rope_aliases": _ROPE_OF_TEXT}

_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
_SHARED_EXPERT = {"shared_expert_intermediate_size": "shared_expert_size"}
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_QWEN_EXPERTS: dict[str, Any] = {"expert_fields": _NUM_EXPERTS,
    "expert_width": "moe_intermediate_size", "expert_weights_field": "norm_topk_prob",
    "lists_dense_layers": True, "expert_names_in_peft": _EXPERT_NAMES}

_DELTA_FIELDS = {"linear_num_key_heads": "delta_key_heads",
    "linear_num_value_heads": "delta_value_heads", "linear_key_head_dim": "delta_key_dim",
    "linear_value_head_dim": "delta_value_dim", "linear_conv_kernel_dim": "delta_window"}
_DELTA_DEFAULTS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "head_dim": 256, "max_position_embeddings": 32_768}
_DELTA_EXPERTS = _DELTA_DEFAULTS | {"num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512}
_DELTA: dict[str, Any] = {
    "fixed": {"block": "delta", "qk_norm": True, "norm_plus_one": True, "output_gate": True},
    "bias_fields": _ATTENTION_BIAS, "linear_word": "linear_attention", "linear_period": 4,
    "partial_rotary_factor": 0.25}

_LATENT_DEFAULTS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128}
_LATENT: dict[str, Any] = {
    "absent": {"head_dim"}, "nullable": {"num_key_value_heads", "q_lora_rank"},
    "fields": {"kv_lora_rank": "latent_size", "q_lora_rank": "query_latent_size",
        "qk_rope_head_dim": "rope_head_dim", "v_head_dim": "value_head_dim",
        "routed_scaling_factor": "routed_scale"},
    "expert_width": "moe_intermediate_size", "expert_weights_field": "norm_topk_prob",
    "shared_experts_field": "n_shared_experts", "first_dense_field": "first_k_dense_replace",
    "has_router_groups": True, "expert_names_in_peft": _EXPERT_NAMES,
    "module_names": {
        f"mlp.shared_expert.{name}": f"mlp.shared_experts.{name}" for name in _EXPERT_NAMES}}

_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096,
    "max_position_embeddings": 131_072}

_GRANITE_FACTORS = {"embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_multiplier", "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logit_divisor"}

_OLMO_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_OLMO: dict[str, Any] = {"has_token_classifier": False, "bias_fields": _ATTENTION_BIAS,
    "fixed": {"qk_norm": True, "qk_norm_over_heads": True, "pre_norms": False, "post_norms": True},
    "nullable": {"num_key_value_heads"}}

_GLM: dict[str, Any] = {
    "bias_fields": {"attention_bias": ("qkv_bias",)},
    "defaults": {"rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128,
        "attention_bias": True, "max_position_embeddings": 131_072},
    "partial_rotary_factor": 0.5, "fused_projections": {("gate_proj", "up_proj"): "gate_up_proj"}}

_GEMMA_FIXED = {"scaled_embedding": True, "norm_plus_one": True}
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16,
    "max_position_embeddings": 8192}
_GEMMA_2_DEFAULTS = _GEMMA_DEFAULTS | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256,
    "sliding_window": 4096}
_SOFTCAPS = {"attn_logit_softcapping", "final_logit_softcapping"}
_GEMMA_2: dict[str, Any] = {
    "fields": {"query_pre_attn_scalar": "query_pre_attn_scalar",
        "attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"},
    "bias_fields": _ATTENTION_BIAS, "nullable": _SOFTCAPS, "sliding_windows": "pattern",
    "activation_fields": ("hidden_activation", "hidden_act"), "activation": GELU_TANH}
_EXPERTS_BESIDE_THE_MLP = "experts beside the MLP (enable_moe_block) are not supported"

FAMILIES = {
    "llama": Family("Llama",
        bias_fields=_BIASES, defaults={"max_position_embeddings": 2048},
        nullable={"num_key_value_heads", "head_dim"}),
    "qwen2": Family("Qwen2", **_QWEN,
        fixed={"qkv_bias": True}, defaults=_QWEN_DEFAULTS),
    "qwen3": Family("Qwen3", **_QWEN,
        fixed={"qk_norm": True}, bias_fields=_ATTENTION_BIAS,
        defaults=_QWEN_DEFAULTS | {"head_dim": 128}),
    "qwen3_5_text": Family("Qwen3_5", "Qwen3_5Text", **_DELTA, has_token_classifier=False,
        fields=_DELTA_FIELDS, defaults=_DELTA_DEFAULTS | {"num_key_value_heads": 4},
        rope_aliases=_ROPE_OF_TEXT),
    "qwen3_5_moe_text": Family("Qwen3_5Moe", "Qwen3_5MoeText", **_DELTA, has_token_classifier=False,
        absent={"intermediate_size"}, fields=_DELTA_FIELDS | _SHARED_EXPERT,
        defaults=_DELTA_EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
        expert_fields=_NUM_EXPERTS, expert_width="moe_intermediate_size",
        rope_aliases=_ROPE_OF_TEXT),
    "qwen3_next": Family("Qwen3Next", **_DELTA, **_QWEN_EXPERTS,
        fields=_DELTA_FIELDS | _SHARED_EXPERT,
        defaults=_DELTA_EXPERTS | {"num_experts": 512, "num_experts_per_tok": 10,
            "norm_topk_prob": True, "decoder_sparse_step": 1},
        fused_projections={("in_proj_qkv", "in_proj_z"): "in_proj_qkvz",
            ("in_proj_b", "in_proj_a"): "in_proj_ba"}),
    "lfm2": Family("Lfm2", has_token_classifier=False,
        field_names={"rms_norm_eps": "norm_eps"}, absent={"head_dim"},
        fixed={"block": "convolution", "qk_norm": True}, fields={"conv_L_cache": "delta_window"},
        defaults={"norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
            "tie_word_embeddings": True, "conv_L_cache": 3, "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0},
        linear_word="conv", adjusted_width=True, rope_theta=1_000_000.0,
        module_names={"model.norm": "model.embedding_norm", "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "self_attn.out_proj",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm", "mlp.gate_proj": "feed_forward.w1",
            "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3"}),
    "deepseek_v2": Family("DeepseekV2", **_LATENT, has_token_classifier=False,
        fixed={"block": "latent", "rope_interleaved": True, "shared_expert_gate": False},
        # transformers does not divide the weights of experts by their sum, whatever the field says.
        neutral={"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
        bias_fields=_ATTENTION_BIAS,
        defaults=_LATENT_DEFAULTS | {"moe_intermediate_size": 1407, "n_routed_experts": 64,
            "n_shared_experts": 2, "topk_method": "greedy", "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0, "max_position_embeddings": 2048},
        expert_fields=("n_routed_experts", "num_experts")),
    "deepseek_v3": Family("DeepseekV3", **_LATENT,
        fixed={"block": "latent", "sigmoid_router": True, "shared_expert_gate": False},
        # Fields of the first files, and what they say there.
        neutral={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        bias_fields=_ATTENTION_BIAS | {"rope_interleave": ("rope_interleaved",)},
        defaults=_LATENT_DEFAULTS | {"num_key_value_heads": 128, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
            "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "rope_interleave": True,
            "max_position_embeddings": 4096},
        expert_fields=("n_routed_experts", "num_local_experts")),
    "mistral": Family("Mistral",
        defaults=_MISTRAL_DEFAULTS, nullable={"head_dim"}, sliding_windows="all"),
    "qwen2_moe": Family("Qwen2Moe", **_QWEN_EXPERTS,
        fields=_SHARED_EXPERT, bias_fields={"qkv_bias": ("qkv_bias",)},
        defaults={"num_key_value_heads": 16, "max_position_embeddings": 32_768,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
            "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
            "qkv_bias": True},
        nullable={"num_key_value_heads"}, sliding_windows="refused"),
    "qwen3_moe": Family("Qwen3Moe", **_QWEN_EXPERTS,
        fixed={"qk_norm": True}, bias_fields=_ATTENTION_BIAS,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096,
            "max_position_embeddings": 32_768, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "decoder_sparse_step": 1},
        sliding_windows="switched"),
    "mixtral": Family("Mixtral",
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8,
            "max_position_embeddings": 131_072, "num_local_experts": 8, "num_experts_per_tok": 2},
        nullable={"head_dim", "num_key_value_heads"},
        expert_fields=("num_local_experts", "num_experts"), sliding_windows="all",
        rope_theta=1_000_000.0,
        module_names={"mlp.gate": "block_sparse_moe.gate",
            "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
            "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3"}),
    "gpt_oss": Family("GptOss",
        fixed={"attention_sinks": True, "mlp_bias": True},
        fields={"swiglu_limit": "swiglu_limit", "swiglu_alpha": "swiglu_slope"},
        bias_fields=_ATTENTION_BIAS,
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64,
            "attention_bias": True, "max_position_embeddings": 131_072, "sliding_window": 128,
            "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702},
        nullable={"head_dim", "num_key_value_heads"},
        expert_fields=("num_local_experts", "num_experts"), stacked_experts=True,
        sliding_windows="pattern", window_period=2, rope_theta=150_000.0,
        rope_parameters={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096},
        module_names={"mlp.gate": "mlp.router"}),
    "phi3": Family("Phi3",
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096},
        nullable={"num_key_value_heads"}, sliding_windows="all", partial_rotary_factor=1.0,
        rope_aliases={"su": "longrope", "yarn": "longrope"}, rope_length_outside=True,
        fused_projections={_QKV: "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}),
    "ministral": Family("Ministral",
        defaults=_MISTRAL_DEFAULTS, nullable={"head_dim", "num_key_value_heads"},
        sliding_windows="listed"),
    "ministral3": Family("Ministral3",
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 262_144},
        nullable={"head_dim"}, sliding_windows="all", rope_numbers=(QUERY_GROWTH,),
        rope_parameters={"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0,
            "original_max_position_embeddings": 16_384, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale_all_dim": 1.0, "mscale": 1.0, QUERY_GROWTH: 0.1}),
    "smollm3": Family("SmolLM3",
        bias_fields=_BIASES,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True,
            "max_position_embeddings": 32_768},
        nullable={"num_key_value_heads"}, rope_theta=2_000_000.0, unrotated_period=4),
    "granite": Family("Granite", has_token_classifier=False,
        fields=_GRANITE_FACTORS, bias_fields=_BIASES,
        defaults=dict.fromkeys(_GRANITE_FACTORS, 1.0) | {"max_position_embeddings": 2048},
        nullable={"num_key_value_heads"}),
    "olmo2": Family("Olmo2", **_OLMO,
        defaults=_OLMO_DEFAULTS),
    "olmo3": Family("Olmo3", **_OLMO,
        defaults=_OLMO_DEFAULTS | {"sliding_window": 4096}, sliding_windows="pattern",
        window_period=4, rope_theta=500_000.0, local_rope_theta=500_000.0),
    "glm": Family("Glm", **_GLM,
        fixed={"rope_interleaved": True}),
    "glm4": Family("Glm4", **_GLM,
        fixed={"rope_interleaved": True, "post_norms": True},
        module_names={"post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm"}),
    "gemma": Family("Gemma",
        fixed=_GEMMA_FIXED, bias_fields=_ATTENTION_BIAS, defaults=_GEMMA_DEFAULTS,
        activation_fields=("hidden_act", "hidden_activation"), activation=GELU_TANH,
        # Early configurations name the exact GELU, but the models use its tanh approximation.
        activation_aliases={"gelu": GELU_TANH}),
    "gemma2": Family("Gemma2", **_GEMMA_2,
        fixed=_GEMMA_FIXED | {"post_norms": True},
        defaults=_GEMMA_2_DEFAULTS | {"attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0},
        window_period=2),
    "gemma3_text": Family("Gemma3", "Gemma3Text", **_GEMMA_2, has_token_classifier=False,
        fixed=_GEMMA_FIXED | {"post_norms": True, "qk_norm": True},
        # The text_config of multimodal models leaves out what has its default.
        defaults=_GEMMA_2_DEFAULTS | {"max_position_embeddings": 131_072, "vocab_size": 262_208,
            "num_attention_heads": 8},
        unsupported={"attn_logit_softcapping": "transformers reads it but caps nothing, so it is "
            "unclear whether the weights were trained with it"},
        window_period=6, window_period_field="sliding_window_pattern",
        rope_theta=1_000_000.0, local_rope_theta=10_000.0),
    "gemma4_text": Family("Gemma4", has_token_classifier=False,
        fixed={"scaled_embedding": True, "layer_scalars": True, "norm_in_float32": True,
            "qk_norm": True, "value_norm": True, "post_norms": True, "attention_multiplier": 1.0},
        neutral={"enable_moe_block": False}, fields={"final_logit_softcapping": "logit_softcap"},
        bias_fields=_ATTENTION_BIAS | {"attention_k_eq_v": ("keys_as_values",)},
        defaults={"num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
            "num_kv_shared_layers": 0, "sliding_window": 512, "max_position_embeddings": 131_072,
            "tie_word_embeddings": True},
        nullable=_SOFTCAPS,
        unsupported=dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"),
            _EXPERTS_BESIDE_THE_MLP),
        sliding_windows="pattern", window_period=6, has_global_heads=True,
        activation_fields=("hidden_activation",), activation=GELU_TANH,
        rope_theta=1_000_000.0, local_rope_theta=10_000.0,
        rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.25}),
    "gpt2": Family("GPT2", decoder_class="GPT2LMHeadModel", has_token_classifier=False,
        field_names={"hidden_size": "n_embd", "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon"},
        absent={"head_dim", "num_key_value_heads"},
        fixed=_UNGATED | {"qkv_bias": True, "output_bias": True},
        defaults={"layer_norm_epsilon": 1e-5, "n_positions": 1024, "tie_word_embeddings": True},
        nullable={"n_inner"}, activation_fields=("activation_function",), activation="gelu_new",
        activation_aliases={"gelu_new": GELU_TANH}, learned_positions=True,
        fused_projections={_QKV: "c_attn"}, input_first=True,
        module_names={"model.embed_tokens": "transformer.wte",
            "model.embed_positions": "transformer.wpe", "model.layers": "transformer.h",
            "model.norm": "transformer.ln_f", "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2", "self_attn.c_attn": "attn.c_attn",
            "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj"},
        older_prefixes={  # the first files on the hub hold the model without a head
            prefix: f"transformer.{prefix}" for prefix in ("wte.", "wpe.", "h.", "ln_f.")}),
    "gpt_neox": Family("GPTNeoX", has_token_classifier=False,
        field_names={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct"},
        absent={"head_dim", "num_key_value_heads"}, fixed=_UNGATED,
        bias_fields=_ATTENTION_BIAS | {"use_parallel_residual": ("parallel_residual",)},
        defaults={"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": True,
            "use_parallel_residual": True},
        activation="gelu", activation_aliases={"gelu_new": GELU_TANH}, partial_rotary_factor=0.25,
        fused_projections={_QKV: "query_key_value"}, fused_by_head=True,
        module_names={"model.embed_tokens": "gpt_neox.embed_in", "model.layers": "gpt_neox.layers",
            "model.norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out",
            "self_attn.query_key_value": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h"},
        # transformers 5 calls the head so, but writes its older name. Without a head, the other
        # tensors have no prefix.
        older_prefixes={"lm_head.": "embed_out."} | {
            prefix: f"gpt_neox.{prefix}"
            for prefix in ("embed_in.", "layers.", "final_layer_norm.")}),
}

# Fields that the text_config of the first Llava models lacks.
_LLAVA = Multimodal(defaults={"llama": {"hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32}})
_QWEN_2_VL_TEXT = ("qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl")
_QWEN_2_VL = Multimodal(
    text_families=dict.fromkeys(_QWEN_2_VL_TEXT, "qwen2"),
    defaults=dict.fromkeys(_QWEN_2_VL_TEXT, {"rms_norm_eps": 1e-5, "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0, "max_window_layers": 80}))
MULTIMODAL = {
    "gemma3": Multimodal(tied=True),
    "gemma4": Multimodal(tied=True),
    "internvl": dataclasses.replace(_LLAVA, tied=True),
    "kimi_k2": Multimodal({"kimi_k2": "deepseek_v3"}, is_text=True, decoder_module="model"),
    "llava": _LLAVA,
    "llava_next": _LLAVA,
    "mistral3": dataclasses.replace(_LLAVA, tied=True),
    "qwen2_vl": _QWEN_2_VL,
    "qwen2_5_vl": _QWEN_2_VL,
    "qwen3_5": Multimodal(decoder_module="model"),
    "qwen3_5_moe": Multimodal(decoder_module="model"),
    "qwen3_vl": Multimodal({"qwen3_vl_text": "qwen3"},
        {"qwen3_vl_text": {"rope_theta": 500_000.0, "max_position_embeddings": 128_000}}),
}

# The only encoder (hf/deberta.py): v3 is v2 with another training objective.
DEBERTA = "deberta-v2"
