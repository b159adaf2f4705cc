"""Unusual configurations and the reward models of all families compute transformers' numbers."""

import jax
import pytest
from test_families import VARIANTS, assert_close

import hf_reference as reference
from jax_ppo.models import heads
from jax_ppo.models.hf.families import FAMILIES
from jax_ppo.models.hf.load import read_reward_architecture
from jax_ppo.models.hf.save import export_checkpoint

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT = {"rope_type": "default", "rope_theta": 50.0}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "rope_theta": 300.0,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "attention_factor": 0.7,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 5e3,
    "original_max_position_embeddings": 16,
}
# Widths that no power of 2 divides.
ONE_KEY_HEAD = {
    "hidden_size": 22,
    "intermediate_size": 37,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
}
# PyTorch's product of experts takes multiples of 4 only.
WIDTHS_OF_EXPERTS = {"hidden_size": 20, "intermediate_size": 28}
ONE_HEAD = {
    "hidden_size": 18,
    "intermediate_size": 7,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
LAYERS_OF_GEMMA_3 = {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "head_dim": 6}
UNUSUAL = (
    ("llama", {"rope_parameters": DYNAMIC, **ONE_KEY_HEAD, "hidden_size": 21}),
    ("mistral", {"sliding_window": 2, "rope_parameters": LINEAR, **ONE_KEY_HEAD}),
    (
        "mixtral",
        {"sliding_window": 4, "rope_parameters": LLAMA3, "num_local_experts": 3}
        | ONE_KEY_HEAD
        | WIDTHS_OF_EXPERTS,
    ),
    (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
        | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
        | {"rope_parameters": YARN}
        | ONE_KEY_HEAD
        | WIDTHS_OF_EXPERTS,
    ),
    ("ministral", {"sliding_window": 1, "layer_types": None, **ONE_KEY_HEAD}),
    ("ministral", {"sliding_window": 7, "rope_parameters": YARN, "head_dim": 8}),
    ("smollm3", {"no_rope_layers": [0, 0]}),
    ("smollm3", {"no_rope_layer_interval": 1, **ONE_HEAD}),
    ("smollm3", {"no_rope_layer_interval": 2, "rope_parameters": LLAMA3, "hidden_act": "gelu"}),
    (
        "granite",
        {"embedding_multiplier": 0.7, "attention_multiplier": 1.0, "logits_scaling": 0.3}
        | {"residual_multiplier": 1.5, "rope_parameters": YARN}
        | ONE_HEAD,
    ),
    ("granite", {"rope_parameters": DYNAMIC, "num_key_value_heads": None}),
    ("olmo2", {"rope_parameters": LINEAR, **ONE_HEAD}),
    ("glm", {"head_dim": 8, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    (
        "glm4",
        {"head_dim": 10, "partial_rotary_factor": 0.4, "hidden_size": 21, "intermediate_size": 13}
        | {"num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    (
        "phi3",
        {"sliding_window": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"partial_rotary_factor": 0.5},
    ),
    ("gemma2", {"sliding_window": 1, "head_dim": 6, "num_key_value_heads": 1}),
    (
        "gemma3_text",
        {"sliding_window": 1, "query_pre_attn_scalar": 5, "num_key_value_heads": 1}
        | LAYERS_OF_GEMMA_3,
    ),
    (
        "gemma3_text",
        {"sliding_window": 7, "rope_parameters": {FULL: LLAMA3, SLIDING: DEFAULT}}
        | LAYERS_OF_GEMMA_3,
    ),
    ("gpt_neox", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    (
        "gpt_neox",
        {"hidden_size": 10, "num_attention_heads": 1, "intermediate_size": 3}
        | {"rope_parameters": DEFAULT | {"partial_rotary_factor": 1.0}},
    ),
    ("gpt2", {"hidden_size": 9, "num_attention_heads": 9, "intermediate_size": 5}),
    (
        "gpt2",
        {"hidden_size": 7, "num_attention_heads": 1, "max_position_embeddings": 24}
        | {"activation_function": "gelu_pytorch_tanh"},
    ),
    (
        "olmo3",
        {"sliding_window": 7, "rope_parameters": {FULL: YARN, SLIDING: DEFAULT}, **ONE_HEAD},
    ),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", range(len(UNUSUAL)))
def test_unusual_configurations_in_shards_of_mixed_types(index, tmp_path):
    """Sequences are longer than the windows and than what RoPE was first trained with."""
    family, changes = UNUSUAL[index]
    mixed = {"dtypes": ("bfloat16", "float32", "float32"), "shard_bytes": 20_000}
    model, ids = reference.save(tmp_path / "in", family, **mixed, **changes), reference.tokens()
    expected = reference.their_logits(model, ids, every=4)
    with jax.default_matmul_precision("highest"):
        architecture, params = reference.load(tmp_path / "in")
        assert_close(reference.our_logits(architecture, params, ids)[..., ::4], expected)
    export_checkpoint(params, architecture, tmp_path / "out")
    reference.assert_same_logits(reference.reload(tmp_path / "out"), model, ids, atol=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        family
        if family in ("gpt2", "gpt_neox")
        else pytest.param(family, marks=pytest.mark.exhaustive)
        for family in FAMILIES
    ],
)
def test_reward_models_score_as_in_transformers(family, tmp_path):
    changes = next(changes for other, changes in VARIANTS.values() if other == family)
    model = reference.save(tmp_path, family, "SequenceClassification", num_labels=1, **changes)
    architecture = read_reward_architecture(tmp_path)
    again, params = reference.load(tmp_path, "reward")
    assert architecture == again
    ids = reference.tokens()
    with jax.default_matmul_precision("highest"):
        scores = heads.compute_scalars(params, reference.hidden(architecture, params, ids))
    # transformers scores the last token that is not padding.
    assert_close(scores[:, -1], reference.their_logits(model, ids)[:, 0])
