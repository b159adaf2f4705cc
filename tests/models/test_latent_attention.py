"""Latent attention and routers with a correction: decoding, adapters, meshes, refusals.

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
from family_variants import DEEPSEEK_V2, DEEPSEEK_V3
from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError
from jax_ppo.memory.step_flops import count_forward_flops
from jax_ppo.models import heads
from jax_ppo.models.experts import limit_to_groups, select_experts
from jax_ppo.models.hf.config import from_hf_config, text_config
from jax_ppo.models.hf.load import describe_unread_parts
from jax_ppo.models.hf.peft import peft_obstacle
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.lora import Lora, init_adapters, join_params
from jax_ppo.models.quantization import quantize_kernels, round_parameters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes
from jax_ppo.runtime.meshes import validate_architecture
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.training.networks import existing_targets
from jax_ppo.types import Prompts
from tiny_actor import ARCHITECTURE as QWEN_2
from tiny_actor import make_prompts, sample_on_mesh

ARCHITECTURE = dataclasses.replace(
    QWEN_2,
    family="deepseek_v3",
    block="latent",
    vocab_size=64,
    num_layers=3,
    num_kv_heads=4,
    head_dim=12,
    latent_size=16,
    query_latent_size=8,
    rope_head_dim=4,
    value_head_dim=6,
    rope_interleaved=True,
    qkv_bias=False,
    intermediate_size=16,
    num_experts=4,
    experts_per_token=2,
    shared_expert_size=16,
    shared_expert_gate=False,
    dense_layers=(True, False, False),
    dense_size=24,
    sigmoid_router=True,
    normalized_expert_weights=True,
    routed_scale=2.5,
)
LENGTHS = (5, 16, 1, 9)


def random_params(architecture=ARCHITECTURE):
    params = tiny.random_params(architecture, 0, 0, "lm")
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
    assert keys.shape == (2, 1, 16 + 4, 7) and values.shape == (2, 1, 7, 16 + 4)


def sample(mesh_shape, params, quantized=False, lora=None, dtype=jnp.float32):
    """Return a rollout of the built-in engine on a mesh."""
    devices = int(np.prod(list(mesh_shape.values())))
    mesh = tiny.make_mesh(devices, **mesh_shape)
    prompts = make_prompts(LENGTHS)
    # Of prompts that are split evenly over four devices.
    prompts = Prompts(np.minimum(prompts.tokens, 63), prompts.lengths)
    model = Transformer(ARCHITECTURE, dtype, quantized=quantized, lora=lora)
    options = SamplingOptions(8, 1.0, eos_ids=(3,), slots=4, n=2)
    return prompts, sample_on_mesh(mesh, model, params, prompts, options)


def scored(params, prompts, rollout, lora=None):
    """Return the log-probs of drawn tokens by passes over whole texts, and where they are."""
    model = Transformer(ARCHITECTURE, lora=lora)
    logprobs = np.zeros_like(rollout.logprobs)
    for i, response in enumerate(rollout.responses):
        prompt = prompts.tokens[i // 2, : prompts.lengths[i // 2]]
        text = np.concatenate([prompt, response])[None]
        positions = np.arange(text.shape[1])[None]
        hidden = model.apply({"params": params}, text, positions).hidden
        logits = heads.compute_logits(ARCHITECTURE, params, hidden)[0, len(prompt) - 1 : -1]
        log_p = jax.nn.log_softmax(logits)
        logprobs[i] = np.take_along_axis(log_p, response[:, None], 1)[:, 0]
    return logprobs, rollout.action_mask


def random_adapters(lora):
    shapes = jax.eval_shape(lambda: init_adapters(ARCHITECTURE, lora, jax.random.key(0), "lm"))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("with_adapters", [False, True], ids=["bare", "adapters"])
def test_the_sampler_computes_what_a_pass_over_the_whole_text_does(with_adapters):
    params, lora = random_params(), None
    if with_adapters:
        lora = Lora(3, 6.0, existing_targets("all-linear", ARCHITECTURE))
        params = join_params(params, random_adapters(lora))
    prompts, rollout = sample({"data": 1}, params, lora=lora)
    expected, is_drawn = scored(params, prompts, rollout, lora)
    assert is_drawn.sum() > 30
    np.testing.assert_allclose(rollout.logprobs[is_drawn], expected[is_drawn], atol=2e-4)


@pytest.mark.parametrize(
    "quantized",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("shape", [{"data": 2, "model": 2}, {"data": 1, "fsdp": 1, "expert": 2}])
def test_an_engine_samples_the_same_on_several_devices(shape, quantized):
    params = random_params()
    _, expected = sample({"data": 1}, params, quantized)
    _, rollout = sample(shape, params, quantized)
    np.testing.assert_array_equal(rollout.responses, expected.responses)
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.slow
def test_int8_decoding_stands_for_the_kernels_that_it_rounds():
    """As for other families: the log-probs are those of the dequantized kernels."""
    params = random_params()
    flat = quantize_kernels(
        unroll_params(params, partial_stacks=ARCHITECTURE.partial_stacks), jnp.float32
    )
    assert flat["layer_0"]["attention"]["kv_b_proj"]["kernel"].dtype == jnp.int8
    assert flat["layer_1"]["mlp"]["router"]["kernel"].dtype == jnp.float32

    def dequantize(tree):
        if "kernel_scale" in tree:
            return {"kernel": tree["kernel"] * tree["kernel_scale"][..., None, :]}
        return {k: dequantize(v) if isinstance(v, dict) else v for k, v in tree.items()}

    prompts, rollout = sample({"data": 1}, params, quantized=True)
    layers = [dequantize(flat[f"layer_{i}"]) for i in range(3)]
    wide = {
        name: jax.tree.map(
            lambda *x: jnp.stack(x), *(layer[name] for layer in layers if name in layer)
        )
        for name in params["layers"]
    }
    expected, is_drawn = scored(params | {"layers": wide}, prompts, rollout)
    np.testing.assert_allclose(rollout.logprobs[is_drawn], expected[is_drawn], atol=2e-4)


@pytest.mark.slow
def test_the_correction_is_never_rounded(tmp_path):
    """Corrections of real models are large beside what they decide between."""
    params = random_params()
    exact = params["layers"]["mlp"]["correction_bias"]
    flat = unroll_params(params, partial_stacks=ARCHITECTURE.partial_stacks)
    for decoded in (round_parameters(flat, jnp.bfloat16), quantize_kernels(flat, jnp.bfloat16)):
        np.testing.assert_array_equal(decoded["layer_2"]["mlp"]["correction_bias"], exact[1])
        assert decoded["layer_2"]["mlp"]["router"]["kernel"].dtype == jnp.bfloat16
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
    assert routed.shape == (2, 10, 2, 2) and first.auxiliary["router_loss"].shape == (2, 2, 10)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads=4"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 is not supported, only even"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim must be a whole number"),
        ({"head_dim": 8}, "head_dim must be 4, as qk_rope_head_dim=4"),
        ({"n_group": 4}, "n_group=4 must divide the number of experts=6"),
        ({"topk_group": 1}, "num_experts_per_tok=3 in topk_group of them"),
        ({"topk_group": 4}, "n_group=3 and topk_group=4 do not fit 6 experts"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace=3: must be less than"),
        ({"n_shared_experts": 0}, "n_shared_experts must be a whole number"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported, only 1 is"),
    ],
)
def test_configurations_are_refused_by_field(changes, message):
    fields = reference.SIZES | DEEPSEEK_V3 | {"model_type": "deepseek_v3"}
    from_hf_config(fields)
    with pytest.raises(UserError, match=message):
        from_hf_config(fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported, only 'greedy' and"),
        ({"norm_topk_prob": True}, "norm_topk_prob True is not supported, only False is"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported, only 'softmax' is"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
    ],
)
def test_what_transformers_does_not_compute_of_deepseek_v2_is_refused(changes, message):
    fields = reference.SIZES | DEEPSEEK_V2 | {"model_type": "deepseek_v2"}
    from_hf_config(fields)
    with pytest.raises(UserError, match=message):
        from_hf_config(fields | changes)


def test_what_cannot_be_split_is_refused_by_name():
    def mesh(**shape):
        return meshes.make_mesh(MeshShape(**{"data": 1, "fsdp": 1} | shape), jax.devices()[:2])

    architecture = dataclasses.replace(
        ARCHITECTURE, num_layers=4, dense_layers=(True,) + (False,) * 3
    )
    for axis in ("context", "model", "fsdp", "expert"):
        validate_architecture(mesh(**{axis: 2}), architecture)
    with pytest.raises(UserError, match=r"^config\.mesh\.stage=2: must be 1, .* have no experts"):
        validate_architecture(mesh(stage=2), architecture)
    with pytest.raises(UserError, match=r"^config\.mesh\.fsdp=2: .*width of the latents \(15\)"):
        validate_architecture(mesh(fsdp=2), dataclasses.replace(architecture, latent_size=15))


def test_operations_by_hand():
    """Of one token: its projections, one pair of tokens, an MLP, and experts in two layers."""
    D, H = 32, 4
    attention = D * 8 + 8 * H * 12 + D * (16 + 4) + 16 * H * (8 + 6) + H * 6 * D + H * (12 + 6)
    dense, sparse = 3 * D * 24, 3 * D * (2 * 16 + 16) + D * 4
    expected = 2 * (3 * attention + dense + 2 * sparse)
    assert count_forward_flops(ARCHITECTURE, np.array([1])) == expected
