"""Layers with heads of two widths that share keys and values (Gemma 4): files, adapters, layouts.

That they compute transformers' numbers is the subject of test_families.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_reference as reference
import tiny
from family_variants import GEMMA_4
from jax_ppo.models import heads
from jax_ppo.models.hf.config import from_hf_config, text_config
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.lora import Lora
from jax_ppo.models.rope import inverse_frequencies
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.parallelism.vocabulary import embedding_layouts
from jax_ppo.sampler.decoding_weights import shape_decoding_weights
from jax_ppo.training.networks import existing_targets

FIELDS = reference.SIZES | GEMMA_4 | {"model_type": "gemma4_text"}
# What devices of a mesh of two or four can split.
ARCHITECTURE = from_hf_config(FIELDS | {"vocab_size": 64, "vocab_size_per_layer_input": 64})
# The first files on the hub name the sizes of heads, transformers writes them for each layer.
E2B = {
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": None,
    "num_attention_heads": 8,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": True,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
}


def test_a_configuration_of_the_hub():
    a = from_hf_config(E2B)
    assert (a.kv_heads(True), a.kv_heads(False)) == ((1, 256), (1, 512))
    assert (a.intermediate_size, a.dense_size) == (6144, 12_288)
    assert a.dense_layers == (False,) * 15 + (True,) * 20
    assert a.attention_scale == 1 and a.local_rope_theta == 1e4
    stacks = {name: sum(owners) for name, owners in a.partial_stacks.items()}
    assert {name: stacks[name] for name in stacks if "attention" in name} == {
        "local_attention": 12,
        "attention": 3,
        "local_shared_attention": 16,
        "shared_attention": 4,
    }
    # Nothing is remembered for layers that read the memory of others.
    assert a.cache_heads == (*[(1, 256)] * 4, (1, 512)) * 3


def test_layers_that_share_keys_have_their_own_stack_of_equal_mlps():
    """One stack would be cut in two for the two loops, and copied."""
    a = from_hf_config(FIELDS | {"use_double_wide_mlp": False})
    assert a.intermediate_size == a.dense_size == 48
    assert [sum(a.partial_stacks[name]) for name in ("mlp", "dense_mlp")] == [4, 2]
    assert to_hf_config(a)["use_double_wide_mlp"] is False
    assert to_hf_config(ARCHITECTURE)["use_double_wide_mlp"] is True
    alone = from_hf_config(FIELDS | {"num_kv_shared_layers": 0})
    assert "dense_mlp" not in alone.partial_stacks and alone.intermediate_size == 48


def test_the_first_pairs_of_a_wide_head_alone_are_rotated():
    """One in two of eight pairs: the frequencies are those of a whole head of 16."""
    inverse, factor = inverse_frequencies(ARCHITECTURE)
    np.testing.assert_allclose(inverse[:4], [500 ** (-2 * i / 16) for i in range(4)], rtol=1e-6)
    assert factor == 1 and len(inverse) == 8 and not np.any(inverse[4:])
    assert len(inverse_frequencies(ARCHITECTURE, local=True)[0]) == 4


@pytest.mark.slow
def test_adapters_are_pefts(tmp_path):
    model = reference.save(tmp_path / "base", "gemma4_text", **GEMMA_4)
    architecture, params = reference.load(tmp_path / "base")
    lora = Lora(3, 6.0, existing_targets("q_proj,k_proj,v_proj,o_proj,up_proj", architecture))
    reference.assert_adapters_are_pefts(tmp_path / "adapter", model, architecture, params, lora)


def test_shared_layers_have_no_columns():
    model = Transformer(ARCHITECTURE, unrolled=True)

    def run(ids):
        params = heads.init_params(Transformer(ARCHITECTURE), jax.random.key(0), "lm")
        flat = unroll_params(params, partial_stacks=ARCHITECTURE.partial_stacks)
        return model.apply({"params": flat}, ids, ids).cache

    cache = jax.eval_shape(run, np.zeros((2, 7), jnp.int32))
    assert [keys.shape for keys, _ in cache] == [(2, 2, 8, 7), (2, 1, 16, 7)] * 2


def test_sizes_of_heads_are_named_once_or_for_each_layer():
    """transformers writes numbers of equal length, and reads these first."""
    sizes = {"head_dim": 16, "num_key_value_heads": 1}
    listed = {"per_layer_config": dict.fromkeys(("01", "03", "05"), sizes), "global_head_dim": 99}
    assert from_hf_config(FIELDS | listed) == from_hf_config(FIELDS)
    whole = {"model_type": "gemma4", "text_config": FIELDS}
    assert from_hf_config(text_config(whole)) == from_hf_config(FIELDS)
    # It writes none where all heads are alike, and then reads no other name either.
    for overrides in ({}, None):
        equal = from_hf_config(FIELDS | {"per_layer_config": overrides, "global_head_dim": 99})
        assert equal.kv_heads(False) == equal.kv_heads(True) == (2, 8)
    # Without the switch, the number of heads is the usual one.
    own = from_hf_config(FIELDS | {"attention_k_eq_v": False})
    assert own.kv_heads(False) == (2, 16) and not own.keys_as_values


def test_a_copy_in_int8_has_a_layout():
    """The small projections of further embeddings are not rounded."""
    model = Transformer(ARCHITECTURE, jnp.bfloat16, quantized=True)
    shapes = heads.param_shapes(model, "lm")
    mesh = tiny.make_mesh(2, data=1, model=2)
    layer = shape_decoding_weights(mesh, model, shapes)["layer_0"]
    assert layer["mlp"]["up_proj"]["kernel"].dtype == jnp.int8
    for name in ("per_layer_input_gate", "per_layer_projection"):
        assert {key: x.dtype for key, x in layer[name].items()} == {"kernel": jnp.bfloat16}


def test_the_table_of_further_embeddings_is_moved_as_the_vocabularys():
    model = Transformer(ARCHITECTURE)
    shapes = heads.param_shapes(model, "lm")
    layouts = embedding_layouts(tiny.make_mesh(4, data=2, model=2), shapes)
    moved = {name for name, own in layouts.items() if jax.tree.leaves(own)}
    assert moved == {"embed", "embed_per_layer"}


def test_the_default_pattern_ends_with_a_layer_without_a_window():
    few = FIELDS | {"layer_types": None, "num_hidden_layers": 8, "num_kv_shared_layers": 1}
    local = (True,) * 5 + (False, True, False)
    assert from_hf_config(few).local_layers == local
