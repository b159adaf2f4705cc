"""The ungated block: fused projections, positions that are learned, and files of the hub."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hf_reference as reference
import recorded
import tiny
from jax_ppo.errors import UserError
from jax_ppo.models import heads
from jax_ppo.models.hf.config import from_hf_config
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.models.hf.peft import load_adapters, peft_obstacle, read_adapter_config, save_adapters
from jax_ppo.models.hf.tensors import Fused, TensorMapping
from jax_ppo.models.layers import LayerNorm
from jax_ppo.models.lora import Lora, init_adapters, join_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding
from jax_ppo.training import networks


def test_projections_of_one_head_after_the_other():
    """Two heads of two numbers: the tensor has q0 k0 v0 q1 k1 v1."""
    tensor = np.arange(12)[:, None] * np.ones(3)
    rows = [
        TensorMapping("qkv", (3, 4), transposed=True, fused=Fused(((first, 4),), 12, groups=2))
        for first in (0, 2, 4)
    ]
    whole = (slice(None), slice(None))
    q, k, v = parts = [row.read(tensor.__getitem__, whole) for row in rows]
    assert (q[0].tolist(), k[0].tolist(), v[0].tolist()) == (
        [0, 1, 6, 7],
        [2, 3, 8, 9],
        [4, 5, 10, 11],
    )
    written = None
    for row, part in zip(rows, parts, strict=True):
        written = row.write(part, written)
    np.testing.assert_array_equal(written, tensor)
    # A part of the second head's keys is all that is read.
    read = []
    block = rows[1].read(lambda index: read.append(index) or tensor[index], (slice(0, 2), slice(3)))
    assert block[0].tolist() == [2, 3, 8] and read == [(slice(2, 9), slice(0, 2))]


def test_projections_that_are_stored_input_first():
    tensor = np.arange(12) + np.zeros((3, 1))
    rows = [TensorMapping("qkv", (3, 4), fused=Fused(((first, 4),), 12)) for first in (0, 4, 8)]
    parts = [row.read(tensor.__getitem__, (slice(1), slice(None))) for row in rows]
    assert [part.tolist() for part in parts] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    assert rows[0].hf_shape == (3, 12)


def their_layer_norm(*arrays, dtype):
    def compute():
        import torch

        x, scale, bias = (torch.from_numpy(a).to(getattr(torch, dtype)) for a in arrays)
        return torch.nn.functional.layer_norm(x, scale.shape, scale, bias, 1e-5).float().numpy()

    return recorded.value("normalized", compute, *arrays, dtype)


def test_the_norm_rounds_where_torch_does():
    """Rounding inside the norm, or not rounding its weights, changes a quarter of the numbers."""
    rng = np.random.default_rng(5)
    x, scale, bias = (rng.normal(1, 2, shape).astype(np.float32) for shape in ((64, 96), 96, 96))
    architecture = from_hf_config(
        reference.fields("gpt2", reference.SIZES) | {"model_type": "gpt2"}
    )
    params = {"scale": scale, "bias": bias}
    ours = LayerNorm(architecture).apply({"params": params}, jnp.asarray(x, jnp.bfloat16))
    theirs = their_layer_norm(x, scale, bias, dtype="bfloat16")
    # Sums in another order may round to a neighbour.
    assert (np.asarray(ours, np.float32) != theirs).mean() < 0.01


def test_a_position_beyond_the_table_is_not_a_number():
    """Commands refuse longer sequences; nothing else may look like a result."""
    config = reference.fields("gpt2", reference.SIZES | {"max_position_embeddings": 8})
    model = Transformer(from_hf_config(config | {"model_type": "gpt2"}))
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = {"params": jax.jit(model.init)(jax.random.key(0))}
    run = jax.jit(model.apply)
    inside, outside = (run(params, tokens, tokens + position).hidden for position in (7, 8))
    assert jnp.isfinite(inside).all() and jnp.isnan(outside).all()


@pytest.mark.parametrize(
    "architecture", [tiny.ARCHITECTURE, tiny.UNGATED], ids=["gated", "ungated"]
)
def test_layers_of_a_scan_return_hidden_states_alone(architecture):
    """Keys and values of all layers would be stacked for nothing."""
    model = Transformer(architecture)
    tokens = jnp.zeros((1, 3), jnp.int32)
    params = {"params": jax.eval_shape(model.init, jax.random.key(0))}
    equations = jax.make_jaxpr(model.apply)(params, tokens, tokens).eqns
    scan = next(equation for equation in equations if equation.primitive.name == "scan")
    assert [output.aval.shape for output in scan.outvars] == [(1, 3, architecture.hidden_size)]


@pytest.fixture(scope="module", params=["gpt2", "gpt_neox"])
def checkpoint(request, tmp_path_factory):
    """Return a family, its folder, and the tensors and parameters in it."""
    folder = tmp_path_factory.mktemp("ungated")
    reference.save(folder, request.param, vocab_size=96)
    return request.param, folder, load_file(folder / "model.safetensors"), reference.load(folder)[1]


def test_files_of_the_hub_with_older_names_and_masks(checkpoint, tmp_path):
    """Those of GPT-2 have no prefix; both have masks, in half a dozen types and shapes."""
    family, folder, tensors, params = checkpoint
    mask = np.tril(np.ones((1, 1, 64, 64)))
    for layer in range(2):
        if family == "gpt2":
            prefix = f"transformer.h.{layer}.attn."
            tensors = tensors | {
                f"{prefix}bias": mask.astype(np.float32),
                f"{prefix}masked_bias": np.array(-1e4, np.float16),
            }
        else:
            prefix = f"gpt_neox.layers.{layer}.attention."
            frequencies = np.float32([1.0])
            # -1e9, which was rounded to float16 with some weights.
            masked = [np.array(-1e9, np.float32), np.array(-np.inf, np.float16)][layer]
            tensors = tensors | {
                f"{prefix}bias": mask.astype([bool, np.uint8][layer]),
                f"{prefix}masked_bias": masked,
                f"{prefix}rotary_emb.inv_freq": frequencies,
            }
    if family == "gpt2":
        tensors = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    else:
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, reference.load(tmp_path)[1], params)


def test_files_of_the_model_without_a_head(checkpoint, tmp_path):
    """Their names lack the prefix of transformers' model with a head."""
    family, folder, tensors, params = checkpoint
    prefix, head = {"gpt2": ("transformer.", ""), "gpt_neox": ("gpt_neox.", "embed_out.weight")}[
        family
    ]
    bare = {name.removeprefix(prefix): x for name, x in tensors.items() if name != head}
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    critic = reference.load(tmp_path, "scalar")[1]
    del critic["score"]
    trunk = {name: x for name, x in params.items() if name != "lm_head"}
    jax.tree.map(np.testing.assert_array_equal, critic, trunk)
    if head:
        with pytest.raises(UserError, match="tensor embed_out.weight is missing"):
            reference.load(tmp_path)
    else:
        jax.tree.map(np.testing.assert_array_equal, reference.load(tmp_path)[1], params)


@pytest.mark.parametrize(
    ("end", "values"),
    [
        ("bias", np.ones((1, 1, 64, 64), bool)),
        ("bias", np.tril(np.ones((1, 1, 64, 64), np.float32), -1)),
        ("bias", np.ones(64, np.float32)),
        ("masked_bias", np.array(-1, np.float32)),
    ],
)
def test_a_stored_mask_that_is_not_causal_is_refused(checkpoint, tmp_path, end, values):
    """The model would compute something else than the one that was trained."""
    family, folder, tensors, _ = checkpoint
    attention = {"gpt2": "transformer.h.1.attn", "gpt_neox": "gpt_neox.layers.1.attention"}[family]
    save_file(tensors | {f"{attention}.{end}": values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UserError, match=f"would not use: {attention}.{end}. It is another kind"):
        reference.load(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_types_on_disk(checkpoint, tmp_path, dtype):
    family, _, _, params = checkpoint
    reference.save(tmp_path, family, dtypes=("float32", dtype), shard_bytes=10_000, vocab_size=96)
    loaded = reference.load(tmp_path)[1]
    jax.tree.map(
        lambda ours, exact: np.testing.assert_allclose(ours, exact, rtol=8e-3, atol=1e-6),
        loaded,
        params,
    )


def test_both_spellings_of_rotary_fields_are_read():
    """transformers 4.48 and later write both."""
    config = reference.fields("gpt_neox", reference.SIZES) | {"model_type": "gpt_neox"}
    config |= {"rotary_pct": 0.5, "partial_rotary_factor": 0.5, "rotary_emb_base": 300}
    architecture = from_hf_config(config | {"rope_theta": 300, "rope_scaling": None})
    assert (architecture.rotary_dim, architecture.rope_theta) == (4, 300.0)


PEFT_MODULES = {
    "gpt2": ["c_attn", "attn.c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
    "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
}
PROJECTIONS = {
    "gpt2": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj"),
    "gpt_neox": ("q_proj", "k_proj", "v_proj", "down_proj"),
    "phi3": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
}


def adapted_logits(folder, adapters, lora):
    architecture, params = reference.load(folder)
    ids = reference.tokens(rows=1, length=9)
    positions = jnp.arange(9)[None]
    full = join_params(params, adapters)
    run = jax.jit(Transformer(architecture, lora=lora).apply)
    hidden = run({"params": full}, ids, positions).hidden
    return heads.compute_logits(architecture, full, hidden), ids


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neox", pytest.param("phi3", marks=pytest.mark.exhaustive)]
)
def test_adapters_of_peft_on_fused_projections_are_read(family, tmp_path):
    """PEFT's A of a fused tensor is that of each of its projections, which have their own B."""
    base = reference.save(tmp_path / "base", family)

    def theirs():
        import peft

        config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=PEFT_MODULES[family])
        peft.get_peft_model(base.load(), config).save_pretrained(tmp_path / "theirs")
        tensors = recorded.shapes(tmp_path / "theirs/adapter_model.safetensors")
        return reference.read_adapters(tmp_path / "theirs"), tensors

    config, shapes = recorded.value("adapters", theirs, base.folder)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    tensors = recorded.random_tensors(shapes, std=0.3)
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    architecture = read_architecture(base.folder)
    lora, _ = read_adapter_config(tmp_path / "adapter", architecture)
    assert lora == Lora(3, 5.0, PROJECTIONS[family])
    tree = jax.eval_shape(lambda: init_adapters(architecture, lora, jax.random.key(0), "lm"))
    where = sharding.tree_shardings(tiny.make_mesh(), tree, sharding.TRAIN_RULES)
    adapters = load_adapters(tmp_path / "adapter", architecture, lora, where)
    ours, ids = adapted_logits(base.folder, adapters, lora)
    expected = reference.peft_logits(base, tmp_path / "adapter", ids)
    assert np.abs(expected - reference.their_logits(base, ids, every=4)).max() > 0.5
    np.testing.assert_allclose(ours[..., ::4], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_peft_reads_adapters_on_the_other_projections(family, tmp_path):
    """GPT-2 calls two of them c_proj, and stores kernels input first (fan_in_fan_out)."""
    base = reference.save(tmp_path / "base", family)
    architecture = read_architecture(base.folder)
    assert "q_proj" in peft_obstacle(architecture, Lora(2, 4.0, ("q_proj", "o_proj")))
    lora = Lora(2, 4.0, ("o_proj", "down_proj"))
    assert peft_obstacle(architecture, lora) == ""
    tree = jax.eval_shape(lambda: init_adapters(architecture, lora, jax.random.key(0), "lm"))
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda x: rng.random(x.shape, np.float32) - np.float32(0.5), tree)
    save_adapters(adapters, architecture, lora, tmp_path / "adapter", ("some/base", None))
    assert read_adapter_config(tmp_path / "adapter", architecture) == (lora, "some/base")
    ours, ids = adapted_logits(base.folder, adapters, lora)
    theirs = reference.peft_logits(base, tmp_path / "adapter", ids)
    np.testing.assert_allclose(ours[..., ::4], theirs, rtol=1e-4, atol=1e-4)


def test_adapters_on_a_projection_that_the_model_lacks_are_refused():
    config = reference.fields("gpt2", reference.SIZES) | {"model_type": "gpt2"}
    architecture = from_hf_config(config)
    assert "gate_proj" not in networks.existing_targets("all-linear", architecture)
    with pytest.raises(UserError, match="this model has no gate_proj, only q_proj, k_proj"):
        networks.existing_targets("q_proj,gate_proj", architecture)
