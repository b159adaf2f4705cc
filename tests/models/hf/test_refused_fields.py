"""What the decoder does not compute is refused by the name of the field, family by family."""

import pytest

import hf_reference as reference
from family_variants import DEEPSEEK_V2, DEEPSEEK_V3, EXPERTS, GEMMA_4, QWEN_3_5
from jax_ppo.errors import UserError
from jax_ppo.models.hf.config import from_hf_config
from jax_ppo.models.hf.families import FAMILIES

BASES = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "gemma4_text": GEMMA_4,
    "qwen3_5_text": QWEN_3_5,
    "qwen3_moe": EXPERTS,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}
YARN = {"rope_type": "yarn", "rope_theta": 9.0, "factor": 2.0}
REFUSED = {
    "llama": [
        ({"model_type": "lama"}, f"model_type 'lama' is not supported, only {', '.join(FAMILIES)} "
            "and multimodal models of these are; the nearest is llama"),
        ({"hidden_size": True}, "hidden_size must be a whole number; it is True"),
        ({"num_hidden_layers": 10**8}, "must be a whole number from 1 to 10000; it is 100000000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 must divide hidden_size=32"),
        ({"head_dim": 7}, "head_dim 7 is not supported, only even numbers are"),
        ({"tie_word_embeddings": "false"}, "must be true or false; it is 'false'"),
        ({"is_causal": False}, "is_causal False is not supported, only True is"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id must be a token id or a list of them"),
        ({"pad_token_id": 97}, "pad_token_id must be a whole number from -1 to 96; it is 97"),
        ({"num_key_value_head": 2}, "num_key_value_head is an unknown field, which might change "
            "what the model computes: remove it if it does not; the nearest known field is "
            "num_key_value_heads"),
        ({"sliding_window": 4}, "sliding_window 4 is not supported, only None is"),
        ({"hidden_act": "relu"}, "'relu' is not supported, only 'silu', 'gelu_pytorch_tanh', "),
        ({"use_sliding_window": True}, "is not supported with model_type 'llama'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'] are not supported"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be an object; it is ['linear']"),
        ({"rope_scaling": LINEAR, "rope_parameters": DEFAULT_ROPE}, "rope_parameters differ"),
        ({"rope_theta": 5e5, "rope_parameters": DEFAULT_ROPE},
            "rope_theta=500000.0 and rope_parameters.rope_theta=10000.0 differ"),
        ({"rope_scaling": LINEAR | {"factor": "2"}},
            "rope_scaling.factor must be a finite number; it is '2'"),
        ({"rope_scaling": LINEAR | {"beta": 3}}, "rope_scaling.beta is an unknown field"),
        ({"rope_scaling": LONGROPE}, "short_factor must be a list of 4 numbers; it is [1.0]"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope' is not supported, only default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "is not supported, only 1 is"),
        ({"rope_parameters": {"full_attention": {}}},
            "for each layer type (full_attention) are not supported"),
    ],
    "mistral": [
        ({"layer_types": ["full_attention"] * 2},
            "only sliding_attention is with model_type 'mistral'"),
    ],
    "qwen3": [
        ({"layer_types": ["sliding_attention"]}, "must be num_hidden_layers=2 words"),
        ({"layer_types": ["chunked_attention"] * 2}, "full_attention or sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 2},
            "sliding_window must be a whole number; it is None"),
    ],
    "gemma3_text": [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping of model_type 'gemma3_text'"),
        ({"rope_parameters": {"rope_type": "default"}}, "must name layer types"),
        ({"rope_parameters": {"sliding_attention": LINEAR}},
            "sliding_attention with rope_type 'linear' are not supported"),
    ],
    "gemma4_text": [
        ({"enable_moe_block": True}, "enable_moe_block True is not supported, only False is"),
        ({"num_experts": 8}, "num_experts of model_type 'gemma4_text' is not supported: experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
        ({"global_head_dim": 15}, "global_head_dim 15 is not supported, only even numbers are"),
        ({"num_global_key_value_heads": 3}, "=3 must divide num_attention_heads=4"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers=5: must leave a layer of each"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers must be a whole number from 0 to 5"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input=9 must be vocab_size=97"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types must end with full_attention"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, "must have full_attention"),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE}},
            "is not supported, only default, linear, dynamic, llama3, proportional are"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config must have the same"),
    ],
    "qwen3_moe": [
        ({"decoder_sparse_step": 3}, "decoder_sparse_step=3 leave no layer with experts"),
        ({"mlp_only_layers": [0, 1]}, "decoder_sparse_step=1 leave no layer with experts"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of whole numbers; it is 1"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok=6: there are only 5 experts"),
        ({"num_local_experts": 8}, "num_experts and num_local_experts must be equal"),
    ],
    "qwen3_5_text": [
        ({"layer_types": ["linear_attention"] * 2}, "at least one of num_hidden_layers=2"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "or linear_attention"),
        ({"linear_num_key_heads": 4}, "linear_num_key_heads=4 must divide"),
        ({"attn_output_gate": False}, "attn_output_gate False is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    ],
    "deepseek_v3": [
        ({"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads=4"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 is not supported, only even"),
        ({"head_dim": 8}, "head_dim must be 4, as qk_rope_head_dim=4"),
        ({"n_group": 4}, "n_group=4 must divide the number of experts=6"),
        ({"topk_group": 1}, "num_experts_per_tok=3 in topk_group of them"),
        ({"topk_group": 4}, "n_group=3 and topk_group=4 do not fit 6 experts"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace=3: must be less than"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported, only 1 is"),
    ],
    # What transformers does not compute.
    "deepseek_v2": [
        ({"topk_method": "noaux_tc"}, "'noaux_tc' is not supported, only 'greedy' and"),
        ({"norm_topk_prob": True}, "norm_topk_prob True is not supported, only False is"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported, only 'softmax' is"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
    ],
    "gpt2": [
        ({"n_embd": 30}, "n_head=4 must divide n_embd=30"),
        ({"scale_attn_by_inverse_layer_idx": True}, "only False is"),
        ({"scale_attn_weights": False}, "only True is"),
        ({"add_cross_attention": True}, "only False is"),
        ({"hidden_size": 64}, "hidden_size is an unknown field"),
    ],
    "gpt_neox": [
        ({"rotary_pct": 0.4}, "rotary_pct=0.4 with heads of 8 numbers rotates 3"),
        ({"rope_theta": 300}, "rope_theta=300 differs from the 10000.0 of rotary_emb"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is an unknown field"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [(family, *row) for family, rows in REFUSED.items() for row in rows],
)
def test_what_is_not_computed_is_refused_by_its_field(family, changes, message):
    config = reference.fields(family, reference.SIZES | BASES.get(family, {}))
    config["model_type"] = family
    from_hf_config(config)
    with pytest.raises(UserError) as caught:
        from_hf_config(config | changes)
    text = str(caught.value)
    assert message in text and text.startswith("config.json: ") and "\n" not in text
