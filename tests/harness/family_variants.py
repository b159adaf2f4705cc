"""Forms of each family, whose numbers test_families.py compares; the first of a family is plain.

Sequences of the tests are longer than the windows, soft caps have a visible effect, and the scale
of queries is not that of head_dim.
"""

import hf_reference as reference
from jax_ppo.models.layer_stack import MAX_UNROLLED_LAYERS

WINDOW = 5
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": WINDOW} | {
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.5,
}
GEMMA_3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 9,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
}
GEMMA_4 = reference.GEMMA_4 | {
    "final_logit_softcapping": 1.5,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 500.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.3} | {
    "residual_multiplier": 0.22,
    "logits_scaling": 2.0,
}
QWEN_3_5 = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
        | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    ),
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24} | {
    "head_dim": 8,
    "num_key_value_heads": 1,
}
# Wider queries than keys, and more heads of values than of keys, which Qwen3-Next interleaves.
SHARED_EXPERT = QWEN_3_5 | (
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 24}
)
# A scale of scores and weights that YaRN changes.
DEEPSEEK_V3 = reference.DEEPSEEK | {
    "n_shared_experts": 2,
    "rope_parameters": (
        {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0}
        | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
    ),
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
}
VARIANTS = {
    "llama": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2, local layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, local layers": (
        "qwen3",
        (
            {"head_dim": 16, "attention_bias": True, "use_sliding_window": True}
            | {"sliding_window": WINDOW, "max_window_layers": 1}
        ),
    ),
    "qwen3_5": ("qwen3_5_text", QWEN_3_5),
    "qwen3_5, as many key heads": (
        "qwen3_5_text",
        QWEN_3_5
        | (
            {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
            | {"num_hidden_layers": 3, "linear_num_value_heads": 2}
            | {"linear_conv_kernel_dim": 2, "attention_bias": True}
            | {"tie_word_embeddings": True}
        ),
    ),
    "qwen3_5, in a loop": (
        "qwen3_5_text",
        QWEN_3_5 | {"num_hidden_layers": 12, "layer_types": None},
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", SHARED_EXPERT),
    "qwen3_next": ("qwen3_next", SHARED_EXPERT),
    "qwen3_next, weights as they are": (
        "qwen3_next",
        SHARED_EXPERT
        | {"norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True}
        | {"full_attention_interval": 2, "layer_types": None},
    ),
    "qwen3_next, layers without experts": (
        "qwen3_next",
        SHARED_EXPERT
        | {"mlp_only_layers": [1, 2], "num_hidden_layers": 4}
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 10, "conv_L_cache": 4},
    ),
    "lfm2, untied": (
        "lfm2",
        {"full_attn_idxs": [0], "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}
        | {"tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK_V2),
    "deepseek_v2, without groups": (
        "deepseek_v2",
        DEEPSEEK_V2
        | {"topk_method": "greedy", "n_group": None, "topk_group": None, "q_lora_rank": None}
        | {"first_k_dense_replace": 0, "num_hidden_layers": 2, "attention_bias": True}
        | {"rope_parameters": None, "num_key_value_heads": None, "num_experts_per_tok": 4},
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek_v3, in a loop": (
        "deepseek_v3",
        DEEPSEEK_V3
        | {"num_hidden_layers": 2 * MAX_UNROLLED_LAYERS + 3, "first_k_dense_replace": 10}
        | {"q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False}
        | {"attention_bias": True, "n_group": 1, "topk_group": 1, "v_head_dim": 16}
        # Every expert has tokens.
        | {"num_experts_per_tok": 5}
        | {"routed_scaling_factor": 0.3, "tie_word_embeddings": True, "rope_parameters": None},
    ),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40},
    ),
    "qwen2_moe, normalized": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 8, "norm_topk_prob": True, "qkv_bias": False}
        | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen2_moe, layers without experts": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 8, "mlp_only_layers": [1], "num_hidden_layers": 3},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3_moe, weights as they are": (
        "qwen3_moe",
        EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW, "attention_bias": True},
    ),
    "qwen3_moe, experts in every second layer": (
        "qwen3_moe",
        # Every expert has tokens.
        EXPERTS
        | {
            "num_experts": 3,
            "decoder_sparse_step": 2,
            "num_hidden_layers": MAX_UNROLLED_LAYERS + 2,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 3, "sliding_window": WINDOW}),
    "mixtral, in a loop": (
        "mixtral",
        # With one expert per token its weight is 1, and the router's gradient rounding alone.
        {"num_local_experts": 4, "num_experts_per_tok": 3}
        | {"num_hidden_layers": MAX_UNROLLED_LAYERS + 1, "tie_word_embeddings": True},
    ),
    "gpt_oss": (
        "gpt_oss",
        (
            {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
            | {"head_dim": 16, "swiglu_limit": 0.6, "swiglu_alpha": 1.3}
        ),
    ),
    "gpt_oss, in a loop": (
        "gpt_oss",
        (
            {"num_hidden_layers": MAX_UNROLLED_LAYERS + 1, "num_local_experts": 5}
            | {"num_experts_per_tok": 3, "num_key_value_heads": 1, "attention_bias": False}
            | {"head_dim": 8}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
            | {"sliding_window": WINDOW}
        ),
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi3, longrope": (
        "phi3",
        {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": (
                {"rope_type": "longrope", "rope_theta": 1e4}
                | {"short_factor": [1, 1.1, 1.3, 1.7], "long_factor": [1, 2, 3, 4]}
            ),
        },
    ),
    "phi3, part of each head": (
        "phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.75,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1, 1.1, 1.3, 1.7, 1.9, 2],
                "long_factor": [1, 2, 3, 4, 5, 6],
            },
        },
    ),
    "ministral": ("ministral", {"sliding_window": WINDOW, "head_dim": 16}),
    "ministral, local layers": (
        "ministral",
        (
            {"sliding_window": 3, "head_dim": 8, "num_hidden_layers": 3}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        ),
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": (
                {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0}
                | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.4}
                | {"mscale": 1.0, "mscale_all_dim": 1.0}
            ),
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "smollm3, in a loop": (
        "smollm3",
        {"num_hidden_layers": MAX_UNROLLED_LAYERS + 1, "mlp_bias": True},
    ),
    "granite": ("granite", GRANITE | {"tie_word_embeddings": True}),
    "granite, biases": ("granite", GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2, one key head": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": (
                {"rope_type": "yarn", "factor": 4.0}
                | {"original_max_position_embeddings": 16, "attention_factor": 1.2}
            ),
        },
    ),
    "olmo3, in a loop": (
        "olmo3",
        {
            "num_hidden_layers": MAX_UNROLLED_LAYERS + 1,
            "num_key_value_heads": 1,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
    ),
    "glm": ("glm", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 8, "attention_bias": False}),
    "glm4, a quarter of each head": (
        "glm4",
        {"head_dim": 16, "num_key_value_heads": 1, "partial_rotary_factor": 0.25},
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2, biases, no caps": (
        "gemma2",
        GEMMA
        | (
            {"attention_bias": True, "attn_logit_softcapping": None}
            | {"final_logit_softcapping": None, "tie_word_embeddings": False}
        ),
    ),
    "gemma2, in a loop": ("gemma2", GEMMA | {"num_hidden_layers": MAX_UNROLLED_LAYERS + 1}),
    "gemma3": ("gemma3_text", GEMMA_3),
    "gemma3, last logits capped": ("gemma3_text", GEMMA_3 | {"final_logit_softcapping": 1.5}),
    "gemma3, in a loop": (
        "gemma3_text",
        GEMMA_3 | {"num_hidden_layers": MAX_UNROLLED_LAYERS + 1, "layer_types": None},
    ),
    "gemma4": ("gemma4_text", GEMMA_4),
    "gemma4, in a loop": (
        "gemma4_text",
        GEMMA_4
        # transformers' gradients of deeper layers or wider heads are rounded beyond comparison.
        | {"head_dim": 4, "global_head_dim": 8}
        | {"num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6}
        | {"use_double_wide_mlp": False, "attention_k_eq_v": False, "attention_bias": True}
        | {"num_global_key_value_heads": None},
    ),
    "gemma4, without further embeddings": (
        "gemma4_text",
        GEMMA_4
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "rope_parameters": None}
        | {"num_hidden_layers": 2, "layer_types": None, "tie_word_embeddings": False},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2, odd heads, untied": (
        "gpt2",
        (
            {"hidden_size": 21, "num_attention_heads": 3, "n_inner": None}
            | {"tie_word_embeddings": False, "activation_function": "gelu"}
            | {"reorder_and_upcast_attn": True}
        ),
    ),
    "gpt2, in a loop": (
        "gpt2",
        {"num_hidden_layers": MAX_UNROLLED_LAYERS + 1, "num_attention_heads": 1},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, one after the other": (
        "gpt_neox",
        {
            "hidden_size": 30,
            "num_attention_heads": 3,
            "intermediate_size": 31,
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rope_parameters": (
                {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}
                | {"partial_rotary_factor": 0.8}
            ),
        },
    ),
    "gpt_neox, in a loop": (
        "gpt_neox",
        {"num_hidden_layers": MAX_UNROLLED_LAYERS + 1, "attention_bias": False},
    ),
    "mistral, in a loop": (
        "mistral",
        {"sliding_window": WINDOW, "num_hidden_layers": MAX_UNROLLED_LAYERS + 1},
    ),
}
