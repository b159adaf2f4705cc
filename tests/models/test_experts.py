"""Experts: routing worked by hand, int8, adapters, layouts, and checkpoints with many tensors."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hf_reference as reference
import recorded
from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError
from jax_ppo.memory.step_flops import count_forward_flops
from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.experts import balance_losses, run_experts, select_experts
from jax_ppo.models.hf import weight_files
from jax_ppo.models.hf.config import from_hf_config
from jax_ppo.models.hf.files import SafetensorsCheckpoint
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.names import adapter_tensor_table
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding
from jax_ppo.runtime.meshes import make_mesh, validate_architecture
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.training.networks import existing_targets
from jax_ppo.types import Prompts
from tiny_actor import sample_on_mesh

ARCHITECTURE = Architecture(
    family="mixtral",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_experts=4,
    experts_per_token=2,
    normalized_expert_weights=True,
)
# Biases of experts and routers, and attention sinks of query heads that two devices pad.
BIASED = dataclasses.replace(
    ARCHITECTURE,
    family="gpt_oss",
    mlp_bias=True,
    swiglu_limit=1.0,
    attention_sinks=True,
    num_heads=3,
    num_kv_heads=1,
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MXFP4 = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}


def make_params(architecture):
    init = jax.jit(lambda key: heads.init_params(Transformer(architecture), key, "lm"))
    rng = np.random.default_rng(0)

    def enlarge(path, x):
        if path[-1].key in ("bias", "sinks"):
            return jnp.asarray(rng.normal(size=x.shape), x.dtype)
        return 8 * x if x.ndim > 1 else x

    return jax.tree_util.tree_map_with_path(enlarge, init(jax.random.key(0)))


def random_projections(rng, experts, width, inner):
    return {
        "gate_proj": {"kernel": rng.normal(size=(experts, width, inner)).astype(np.float32)},
        "up_proj": {"kernel": rng.normal(size=(experts, width, inner)).astype(np.float32)},
        "down_proj": {"kernel": rng.normal(size=(experts, inner, width)).astype(np.float32)},
    }


@pytest.mark.parametrize(
    "chosen", [[[0, 2], [2, 1], [1, 0]], [[1, 2], [1, 2], [1, 2]]], ids=["spread", "two of them"]
)
def test_each_token_gets_the_weighted_outputs_of_its_experts_and_none_is_dropped(chosen):
    rng = np.random.default_rng(0)
    projections = random_projections(rng, experts=4, width=3, inner=5)
    x = rng.normal(size=(1, 3, 3)).astype(np.float32)
    weights = rng.uniform(size=(1, 3, 2)).astype(np.float32)
    out = run_experts(
        x,
        weights,
        np.array([chosen]),
        projections,
        dtype=jnp.float32,
        gate=lambda gate, up: jax.nn.relu(gate) * up,
    )
    for token in range(3):
        expected = 0
        for weight, expert in zip(weights[0, token], chosen[token], strict=True):
            gate, up, down = (projections[name]["kernel"][expert] for name in projections)
            hidden = np.maximum(x[0, token] @ gate, 0) * (x[0, token] @ up)
            expected = expected + weight * (hidden @ down)
        np.testing.assert_allclose(out[0, token], expected, rtol=1e-5, atol=1e-5)


def test_weights_are_probabilities_that_may_be_divided_by_their_sum():
    probabilities = np.array([[[0.1, 0.5, 0.15, 0.25]]])
    weights, experts = select_experts(probabilities, 2, is_normalized=False)
    np.testing.assert_array_equal(experts, [[[1, 3]]])
    np.testing.assert_allclose(weights, [[[0.5, 0.25]]])
    weights, _ = select_experts(probabilities, 2, is_normalized=True)
    np.testing.assert_allclose(weights, [[[2 / 3, 1 / 3]]], rtol=1e-6)


def test_the_router_loss_of_a_packed_sequence_is_transformers_loss_of_it_alone():
    """transformers' loss of one layer is a mean over its tokens; empty places are a segment."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, 12, 4)).astype(np.float32)
    segments = np.array([[5] * 3 + [2] * 7 + [-1] * 2, [2] * 12])

    @jax.jit
    def measure(logits):
        probabilities = jax.nn.softmax(logits)
        _, experts = select_experts(probabilities, 2, is_normalized=True)
        return balance_losses(probabilities, experts, segments)

    losses = np.asarray(measure(logits))
    sequences = ((0, 0, 3), (0, 3, 10), (1, 0, 12))

    def theirs():
        import torch
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        alone = [torch.from_numpy(logits[row, first:last]) for row, first, last in sequences]
        return [float(load_balancing_loss_func((x,), 4, 2)) for x in alone]

    expected = recorded.value("losses", theirs, logits, sequences)
    for (row, first, last), loss in zip(sequences, expected, strict=True):
        assert losses[row, first:last].mean() == pytest.approx(loss, rel=1e-5)
    # Experts that are used alike: k.
    even = balance_losses(
        np.full((1, 2, 4), 0.25, np.float32),
        np.array([[[0, 1], [2, 3]]]),
        np.zeros((1, 2), np.int32),
    )
    np.testing.assert_allclose(even, [[2.0, 2.0]])


def dequantize(params):
    """Return stacked parameters with the values that the int8 kernels stand for."""

    def rounded(path, x):
        names = [part.key for part in path]
        if names[0] != "layers" or names[-1] != "kernel" or "router" in names:
            return x
        scale = np.abs(x).max(-2, keepdims=True) / 127
        return np.round(x / scale) * scale

    return jax.tree_util.tree_map_with_path(rounded, jax.tree.map(np.asarray, params))


@pytest.mark.parametrize(
    ("architecture", "quantized"),
    [
        pytest.param(ARCHITECTURE, False, marks=pytest.mark.exhaustive),
        pytest.param(ARCHITECTURE, True, marks=pytest.mark.slow),
        pytest.param(BIASED, False, marks=pytest.mark.exhaustive),
    ],
)
def test_an_engine_samples_the_same_on_several_devices(architecture, quantized):
    """Each device has half of the experts, and its part of their width."""
    params = make_params(architecture)
    options = SamplingOptions(8, 1.0, eos_ids=(3,), slots=4, returns_routed_experts=True)
    prompts = Prompts(np.arange(24, dtype=np.int32).reshape(8, 3), np.full(8, 3, np.int32))

    def sample(shape, model, weights):
        mesh = make_mesh(MeshShape(**shape), jax.devices()[: np.prod(list(shape.values()))])
        return sample_on_mesh(mesh, model, weights, prompts, options)

    model = Transformer(architecture)
    one_device = {"data": 1, "fsdp": 1, "model": 1}
    expected = sample(one_device, model, dequantize(params) if quantized else params)
    shape = {"data": 1, "fsdp": 2, "expert": 2, "model": 2}
    rollout = sample(shape, model.clone(quantized=quantized), params)
    np.testing.assert_array_equal(rollout.responses, expected.responses)
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_array_equal(rollout.routed_experts, expected.routed_experts)


def test_attention_sinks_need_whole_sequences():
    mesh = make_mesh(MeshShape(data=1, fsdp=1, context=2), jax.devices()[:2])
    with pytest.raises(UserError, match=r"config\.mesh\.context=2: must be 1, .* attention sinks"):
        validate_architecture(mesh, BIASED)
    validate_architecture(mesh, dataclasses.replace(BIASED, attention_sinks=False))


def test_all_linear_leaves_experts_out_and_naming_them_is_refused():
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert existing_targets("all-linear", ARCHITECTURE) == attention
    assert existing_targets("v_proj, q_proj", ARCHITECTURE) == ("q_proj", "v_proj")
    with pytest.raises(UserError, match=r"lora\.targets='q_proj,up_proj': .* belong to experts"):
        existing_targets("q_proj,up_proj", ARCHITECTURE)
    rows = adapter_tensor_table(ARCHITECTURE, 2, attention, "lm")
    assert {path[2] for path in rows} == set(attention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 3}, "decoder_sparse_step=3 leave no layer with experts"),
        ({"mlp_only_layers": [0, 1]}, "decoder_sparse_step=1 leave no layer with experts"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of whole numbers; it is 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5: there are only 4 experts"),
        ({"num_local_experts": 8}, "num_experts and num_local_experts must be equal"),
        ({"num_experts": 0}, "num_experts must be a whole number from 1"),
    ],
)
def test_other_mixtures_are_refused_by_the_name_of_the_field(changes, message):
    config = reference.SIZES | {"model_type": "qwen3_moe"} | EXPERTS
    assert from_hf_config(config).num_experts == 4
    with pytest.raises(UserError) as caught:
        from_hf_config(config | changes)
    assert message in str(caught.value)


def test_a_checkpoint_has_a_tensor_per_expert_and_may_be_split_anywhere(tmp_path, monkeypatch):
    """Also between the experts of a layer; progress counts each of them."""
    reference.save(tmp_path / "theirs", "qwen3_moe", shard_bytes=20_000, **EXPERTS)
    counts = []
    architecture, params = reference.load(
        tmp_path / "theirs", progress=lambda *count: counts.append(count)
    )
    total = 3 + 2 * (2 + 6 + 1 + 3 * 4)  # norms, attention with its norms, router, experts
    assert counts == [(i, total) for i in range(1, total + 1)]
    kernel = params["layers"]["mlp"]["experts"]["up_proj"]["kernel"]
    tensors = {}
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        tensors |= load_file(file)
    for expert in range(4):
        stored = tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        np.testing.assert_array_equal(kernel[1, expert], stored.T)
    monkeypatch.setattr(weight_files, "MAX_SHARD_BYTES", 20_000)
    export_checkpoint(params, architecture, tmp_path / "ours")
    index = "model.safetensors.index.json"
    theirs, ours = (
        json.loads((tmp_path / folder / index).read_text())["weight_map"]
        for folder in ("theirs", "ours")
    )
    assert ours.keys() == theirs.keys() and len(set(ours.values())) > 3
    jax.tree.map(np.testing.assert_array_equal, reference.load(tmp_path / "ours")[1], params)


def test_split_over_devices_they_are_read_and_written_as_they_are(tmp_path):
    reference.save(tmp_path / "theirs", "qwen3_moe", **EXPERTS, vocab_size=96)
    architecture, params = reference.load(tmp_path / "theirs")
    mesh = make_mesh(MeshShape(data=1, fsdp=2, expert=4), jax.devices())
    where = sharding.tree_shardings(mesh, params, sharding.TRAIN_RULES)
    split = load_checkpoint(tmp_path / "theirs", architecture, where)
    kernel = split["layers"]["mlp"]["experts"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 1, 16, 24)
    jax.tree.map(np.testing.assert_array_equal, split, params)
    export_checkpoint(split, architecture, tmp_path / "ours")
    jax.tree.map(np.testing.assert_array_equal, reference.load(tmp_path / "ours")[1], params)
    with pytest.raises(UserError, match=r"expert=4: must divide .* number of experts \(6\)"):
        validate_architecture(mesh, dataclasses.replace(architecture, num_experts=6))


def test_a_token_costs_the_experts_that_it_passes_through():
    """Three matrices of 16 x 8 in each of two experts, and the router's of 16 x 4."""
    single = dataclasses.replace(ARCHITECTURE, num_experts=0, experts_per_token=0)
    extra = count_forward_flops(ARCHITECTURE, np.array([1])) - count_forward_flops(
        single, np.array([1])
    )
    assert extra == 2 * 2 * (3 * 16 * 8 + 16 * 4)


def test_experts_in_mxfp4_are_read_as_transformers_dequantizes_them(tmp_path):
    """As gpt-oss is published: two numbers of four bits per byte, the lower bits first."""
    reference.save(tmp_path, "gpt_oss", **MXFP4)
    tensors = load_file(tmp_path / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(118, 126, shape, np.uint8)
    first = "model.layers.0.mlp.experts.down_proj"
    # The bits 1010 stand for -1 and 0011 for 1.5, and 128 for a factor of 2.
    tensors[f"{first}_blocks"][1, 5, 0, 3] = 0b0011_1010
    tensors[f"{first}_scales"][1, 5, 0] = 128
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    architecture, params = reference.load(tmp_path)
    kernel = params["layers"]["mlp"]["experts"]["down_proj"]["kernel"]
    assert kernel.shape == (2, 3, 32, 64) and kernel[0, 1, 6:8, 5].tolist() == [-2.0, 3.0]
    ids = reference.tokens()
    ours = reference.our_logits(architecture, params, ids)
    reference.assert_their_logits(ours, reference.reload(tmp_path), ids, rtol=1e-4)
    export_checkpoint(params, architecture, tmp_path / "out", source_folder=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, reference.load(tmp_path / "out")[1], params)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_tensors_that_only_look_like_mxfp4_are_not_joined(tmp_path):
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    save_file({"a_blocks": blocks, "a_scales": blocks}, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == {"a_blocks", "a_scales"}
