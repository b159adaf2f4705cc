"""Experts: routing worked by hand, adapters, layouts, and checkpoints with many tensors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hf_reference as reference
import recorded
import tiny
from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError
from jax_ppo.models.experts import balance_losses, run_experts, select_experts
from jax_ppo.models.hf import weight_files
from jax_ppo.models.hf.files import SafetensorsCheckpoint
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.names import adapter_tensor_table
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.runtime import sharding
from jax_ppo.runtime.meshes import make_mesh
from jax_ppo.training.networks import existing_targets

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MXFP4 = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}


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


def test_all_linear_leaves_experts_out_and_naming_them_is_refused():
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert existing_targets("all-linear", tiny.MIXTURE) == attention
    assert existing_targets("v_proj, q_proj", tiny.MIXTURE) == ("q_proj", "v_proj")
    with pytest.raises(UserError, match=r"lora\.targets='q_proj,up_proj': .* belong to experts"):
        existing_targets("q_proj,up_proj", tiny.MIXTURE)
    rows = adapter_tensor_table(tiny.MIXTURE, 2, attention, "lm")
    assert {path[2] for path in rows} == set(attention)


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
