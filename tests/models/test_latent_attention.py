"""Latent attention and routers with a correction: decoding, adapters, files of the hub.

That DeepSeek's models compute transformers' numbers is the subject of test_families.py.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hf_reference as reference
import tiny
from family_variants import DEEPSEEK_V3
from jax_ppo.errors import UserError
from jax_ppo.models import heads
from jax_ppo.models.experts import limit_to_groups, select_experts
from jax_ppo.models.hf.config import from_hf_config, text_config
from jax_ppo.models.hf.load import describe_unread_parts
from jax_ppo.models.hf.peft import peft_obstacle
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.lora import Lora
from jax_ppo.models.quantization import quantize_kernels, round_parameters
from jax_ppo.models.transformer import Transformer
from jax_ppo.training.networks import existing_targets

# With as much as an expert that every token passes through, as config.json counts.
ARCHITECTURE = dataclasses.replace(tiny.LATENT, shared_expert_size=32)


def random_params():
    params = tiny.random_params(ARCHITECTURE, 0, 0, "lm")
    bias = np.random.default_rng(1).normal(size=params["layers"]["mlp"]["correction_bias"].shape)
    params["layers"]["mlp"]["correction_bias"] = bias.astype(np.float32)
    return params


def test_logits_are_transformers(tmp_path):
    """Gradients, decoding and exports are compared in test_families.py."""
    model = reference.save(tmp_path, "deepseek_v3", **DEEPSEEK_V3)
    architecture, params = reference.load(tmp_path)
    ids = reference.tokens()
    ours = reference.our_logits(architecture, params, ids)
    reference.assert_their_logits(ours, model, ids, atol=1e-5)


def test_experts_are_selected_by_corrected_scores_and_weighed_by_bare_ones():
    scores = jnp.array([[[0.9, 0.5, 0.6, 0.1]]])
    correction = jnp.array([0.0, 0.5, 0.0, 0.7])
    weights, experts = select_experts(scores, 2, is_normalized=False, correction=correction)
    np.testing.assert_array_equal(experts, [[[1, 0]]])
    np.testing.assert_allclose(weights, [[[0.5, 0.9]]])

    def total(scores, correction):
        return select_experts(scores, 2, is_normalized=True, correction=correction)[0][0, 0, 0]

    of_scores, of_correction = jax.grad(total, (0, 1))(scores, correction)
    assert np.abs(of_scores).max() > 0.1 and not np.any(of_correction)


@pytest.mark.parametrize(("counted", "kept"), [(1, (0, 1, 4, 5)), (2, (2, 3, 4, 5))])
def test_a_group_is_valued_by_its_best_experts(counted, kept):
    """The first group has the best expert of all but one, the second one the better pair."""
    scores = jnp.array([[[0.8, 0.1, 0.5, 0.6, 0.7, 0.9]]])
    limited = limit_to_groups(scores, groups=3, selected=2, counted=counted)[0, 0]
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(limited)), kept)
    np.testing.assert_array_equal(limited[np.array(kept)], scores[0, 0, np.array(kept)])


def test_the_cache_has_latents_and_what_is_rotated():
    model = Transformer(ARCHITECTURE, unrolled=True)

    def run(ids):
        params = heads.init_params(Transformer(ARCHITECTURE), jax.random.key(0), "lm")
        flat = unroll_params(params, partial_stacks=ARCHITECTURE.partial_stacks)
        return model.apply({"params": flat}, ids, ids).cache[0]

    keys, values = jax.eval_shape(run, np.zeros((2, 7), np.int32))
    assert keys.shape == (2, 1, 8 + 4, 7) and values.shape == (2, 1, 7, 8 + 4)


@pytest.mark.slow
def test_the_correction_is_never_rounded(tmp_path):
    """Corrections of real models are large beside what they decide between."""
    params = random_params()
    exact = params["layers"]["mlp"]["correction_bias"]
    flat = unroll_params(params, partial_stacks=ARCHITECTURE.partial_stacks)
    for decoded in (round_parameters(flat, jnp.bfloat16), quantize_kernels(flat, jnp.bfloat16)):
        np.testing.assert_array_equal(decoded["layer_1"]["mlp"]["correction_bias"], exact[0])
        assert decoded["layer_1"]["mlp"]["router"]["kernel"].dtype == jnp.bfloat16
    export_checkpoint(params, ARCHITECTURE, tmp_path / "out", dtype="bfloat16")
    _, loaded = reference.load(tmp_path / "out", dtype=jnp.bfloat16)
    np.testing.assert_array_equal(loaded["layers"]["mlp"]["correction_bias"], exact)
    assert loaded["layers"]["mlp"]["router"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_recorded_experts_are_those_of_the_layers_that_have_some():
    model = Transformer(ARCHITECTURE, returns_routed_experts=True, router_loss=True)
    params = random_params()
    ids = np.arange(20, dtype=np.int32).reshape(2, 10)
    inputs = (np.broadcast_to(np.arange(10), ids.shape), np.zeros_like(ids))
    first = model.apply({"params": params}, ids, *inputs)
    routed = jnp.moveaxis(first.auxiliary["routed_experts"], 0, 2)
    assert routed.shape == (2, 10, 1, 2) and first.auxiliary["router_loss"].shape == (1, 2, 10)
    # Other corrections select other experts, unless these are recorded.
    params["layers"]["mlp"]["correction_bias"] = -3 * params["layers"]["mlp"]["correction_bias"]
    other = model.apply({"params": params}, ids, *inputs)
    assert np.abs(other.hidden - first.hidden).max() > 0.01
    for unrolled in (False, True):
        tree = unroll_params(params, partial_stacks=ARCHITECTURE.partial_stacks)
        again = model.clone(unrolled=unrolled).apply(
            {"params": tree if unrolled else params}, ids, *inputs, routed_experts=routed
        )
        np.testing.assert_allclose(again.hidden, first.hidden, atol=1e-5)
        recorded = jnp.moveaxis(again.auxiliary["routed_experts"], 0, 2)
        np.testing.assert_array_equal(recorded, routed)


@pytest.mark.slow
def test_adapters_are_pefts(tmp_path):
    """PEFT takes the projections of an MLP or a shared expert for those of routed experts."""
    model = reference.save(tmp_path / "base", "deepseek_v3", **DEEPSEEK_V3)
    architecture, params = reference.load(tmp_path / "base")
    every = Lora(3, 6.0, existing_targets("all-linear", architecture))
    assert {"q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "down_proj"} <= set(every.targets)
    assert peft_obstacle(architecture, every).startswith("PEFT takes gate_proj, up_proj, down_proj")
    attention = "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"
    lora = Lora(3, 6.0, existing_targets(attention, architecture))
    assert not peft_obstacle(architecture, lora)
    reference.assert_adapters_are_pefts(tmp_path / "adapter", model, architecture, params, lora)


@pytest.mark.slow
def test_files_of_the_hub_have_a_layer_more_and_kimis_have_another_name(tmp_path):
    """The layer predicts the token after the next; transformers leaves it out, too."""
    model = reference.save(tmp_path / "in", "deepseek_v3", **DEEPSEEK_V3)
    architecture, params = reference.load(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    scaling = config.pop("rope_parameters")
    theta = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    for name in ("head_dim", "qk_head_dim", "rope_interleave"):
        config.pop(name)
    hub = {"rope_scaling": scaling, "rope_theta": theta, "auto_map": {}, "aux_loss_alpha": 0.001}
    hub |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    hub |= {"ep_size": 1, "seq_aux": True, "num_nextn_predict_layers": 1, "pretraining_tp": 1}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_text(json.dumps(config | hub | {"model_type": "kimi_k2"}))
    tensors = load_file(tmp_path / "in/model.safetensors")
    further = {
        name.replace("layers.2.", "layers.3."): x for name, x in tensors.items() if ".2." in name
    }
    further["model.layers.3.eh_proj.weight"] = np.ones((32, 64), np.float32)
    save_file(tensors | further, tmp_path / "hub/model.safetensors")
    read, loaded = reference.load(tmp_path / "hub")
    assert read == architecture
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    (line,) = describe_unread_parts(tmp_path / "hub")
    assert "further tokens than the next are neither read nor exported" in line
    export_checkpoint(loaded, read, tmp_path / "out", source_folder=tmp_path / "hub")
    reference.assert_same_logits(reference.reload(tmp_path / "out"), model, reference.tokens())
    # A layer that is not such a one is not left out.
    del further["model.layers.3.eh_proj.weight"]
    save_file(tensors | further, tmp_path / "hub/model.safetensors")
    with pytest.raises(UserError, match="tensors that this model would not use"):
        reference.load(tmp_path / "hub")


def test_kimi_k2_is_deepseek_v3_of_other_sizes():
    fields = reference.SIZES | DEEPSEEK_V3 | {"model_type": "kimi_k2"}
    assert from_hf_config(text_config(fields)) == from_hf_config(
        fields | {"model_type": "deepseek_v3"}
    )
