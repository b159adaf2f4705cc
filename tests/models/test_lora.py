"""Adapters change nothing at first, learn by the chain rule, and are exported in both formats."""

import collections
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import config_sweep
import hf_reference as reference
import recorded
import tiny
from jax_ppo.config import parsing
from jax_ppo.errors import UserError
from jax_ppo.models import heads
from jax_ppo.models.hf.peft import (
    load_adapters,
    read_adapter_config,
    save_adapters,
    validate_adapters,
)
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.hf.weight_files import merge_adapters
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.layers import Dense
from jax_ppo.models.lora import Lora, init_adapters, join_params, merge_kernel
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding

ARCHITECTURE = dataclasses.replace(tiny.ARCHITECTURE, num_layers=2)
ALL = Lora(4, 6.0, parsing.LORA_TARGETS)
TWO = Lora(3, 6.0, ("q_proj", "v_proj"))
ONE = Lora(2, 3.0, ("q_proj",))


def random_adapters(architecture, shape, head="lm", seed=5):
    """Return adapters that contain no zero matrix."""
    shapes = jax.eval_shape(lambda: init_adapters(architecture, shape, jax.random.key(0), head))
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (rng.random(x.shape, np.float32) - np.float32(0.5)) * np.float32(0.35), shapes
    )


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, ids):
    return model.apply(
        {"params": params}, ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    ).hidden


def logits(architecture, params, ids, shape=None, dtype=jnp.float32, **options):
    hidden = apply(Transformer(architecture, dtype, lora=shape, **options), params, ids)
    return np.asarray(heads.compute_logits(architecture, params, hidden))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a Qwen2 as transformers writes it, its folder, architecture and parameters.

    It has biases and a separate output embedding.
    """
    folder = tmp_path_factory.mktemp("base")
    model = reference.save(folder, "qwen2")
    return model, folder, *reference.load(folder)


def test_a_projection_worked_by_hand():
    """x W + alpha / r (x A) B = (1, 2) + 3/2 (3, 4).

    x = (1, 2), W = ((1, 0), (0, 1)), A = (1, 1)', B = (3, 4), alpha / r = 1/2.
    """
    params = {"kernel": jnp.eye(2), "lora_a": jnp.ones((2, 1)), "lora_b": jnp.array([[3.0, 4.0]])}
    out = Dense(2, False, jnp.float32, 0.5).apply({"params": params}, jnp.array([[[1.0, 2.0]]]))
    np.testing.assert_array_equal(out, [[[5.5, 8.0]]])
    np.testing.assert_array_equal(merge_kernel(*params.values(), 0.5), [[2.5, 2.0], [1.5, 3.0]])
    assert Lora(8, 4.0, ()).scale == 0.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("unrolled", [False, True])
def test_new_adapters_change_not_a_bit(checkpoint, dtype, unrolled):
    architecture, params = checkpoint[2:]
    adapters = init_adapters(architecture, ALL, jax.random.key(0), "lm")
    form = unroll_params if unrolled else lambda tree: tree
    base = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    ids, options = reference.tokens(), {"dtype": dtype, "unrolled": unrolled}
    bare = logits(architecture, form(base), ids, **options)
    new, moved = (
        logits(architecture, form(join_params(base, tree)), ids, ALL, **options)
        for tree in (adapters, random_adapters(architecture, ALL))
    )
    np.testing.assert_array_equal(new, bare)
    assert np.abs(moved - bare).max() > 0.1


def test_a_is_drawn_as_peft_draws_it():
    params = init_adapters(
        ARCHITECTURE, Lora(64, 16.0, parsing.LORA_TARGETS), jax.random.key(0), "scalar"
    )
    for inputs, path in ((16, ("attention", "q_proj")), (32, ("mlp", "down_proj"))):
        pair = params["layers"][path[0]][path[1]]
        a = np.asarray(pair["lora_a"])
        assert np.abs(a).max() <= inputs**-0.5 and a.std() == pytest.approx(
            (3 * inputs) ** -0.5, rel=0.05
        )
        assert not np.any(pair["lora_b"])
    flat = [np.asarray(x).ravel()[:8] for x in jax.tree.leaves(params) if np.any(x)]
    assert len({x.tobytes() for x in flat}) == len(flat) == 7  # each from different random numbers
    assert params["score"]["kernel"].shape == (16, 1) and not np.any(params["score"]["kernel"])


def test_the_gradient_is_that_of_the_merged_kernels(checkpoint):
    """dA = s dW B' and dB = s A' dW, where dW is the gradient of the merged kernel."""
    architecture, params = checkpoint[2:]
    adapters, ids = random_adapters(architecture, ALL), reference.tokens()

    def loss(tree, shape):
        out = apply(Transformer(architecture, lora=shape), tree, ids)
        return jnp.sum(jnp.sin(heads.compute_logits(architecture, tree, out)))

    def adapter_loss(adapters):
        return loss(join_params(params, adapters), ALL)

    adapters_gradient = jax.jit(jax.grad(adapter_loss))(adapters)
    merged = jax.tree.map(jnp.asarray, params)
    for module, projections in adapters["layers"].items():
        for name, pair in projections.items():
            entry = merged["layers"][module][name]
            entry["kernel"] = merge_kernel(
                entry["kernel"], pair["lora_a"], pair["lora_b"], ALL.scale
            )
    merged_gradient = jax.jit(jax.grad(lambda tree: loss(tree, None)))(merged)
    for module, projections in adapters["layers"].items():
        for name, pair in projections.items():
            dw = merged_gradient["layers"][module][name]["kernel"]
            pair_gradient = adapters_gradient["layers"][module][name]
            expected = {
                "lora_a": ALL.scale * dw @ pair["lora_b"].swapaxes(1, 2),
                "lora_b": ALL.scale * pair["lora_a"].swapaxes(1, 2) @ dw,
            }
            for part, value in expected.items():
                atol = 1e-4 * np.abs(value).max()
                np.testing.assert_allclose(pair_gradient[part], value, 1e-3, atol, err_msg=name)


@pytest.mark.parametrize("shape", [ALL, TWO])
def test_merged_and_in_pefts_format_it_is_the_same_model(checkpoint, shape, tmp_path):
    """Three ways give the same logits.

    They are separate adapters, the merged export in transformers, and PEFT. The export has the
    numbers of W + alpha / r B A of PEFT's tensors.
    """
    base, folder, architecture, params = checkpoint
    adapters, ids = random_adapters(architecture, shape), reference.tokens()
    ours = logits(architecture, join_params(params, adapters), ids, shape)
    assert np.abs(ours - logits(architecture, params, ids)).max() > 0.1
    merged = merge_adapters(params, adapters, architecture, shape)
    export_checkpoint(merged, architecture, tmp_path / "merged")
    merged = reference.reload(tmp_path / "merged")
    reference.assert_their_logits(ours, merged, ids, rtol=1e-4, is_computed=True)
    again, loaded = reference.load(tmp_path / "merged")
    np.testing.assert_allclose(logits(again, loaded, ids), ours, rtol=1e-5, atol=1e-5)

    save_adapters(adapters, architecture, shape, tmp_path / "adapter", ("some/base", None))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    weights, sums = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "merged"))
    written = (config["peft_type"], config["task_type"], config["modules_to_save"])
    assert written == ("LORA", "CAUSAL_LM", None)
    assert len(tensors) == 2 * 2 * len(config["target_modules"])
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert module.rpartition(".")[2] in config["target_modules"]
        a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        assert a.shape[0] == b.shape[1] == config["r"]
        weights[f"{module}.weight"] += config["lora_alpha"] / config["r"] * (b @ a)
    for name, tensor in weights.items():
        np.testing.assert_allclose(sums[name], tensor, rtol=1e-5, atol=1e-6, err_msg=name)
    theirs = reference.peft_logits(base, tmp_path / "adapter", ids)
    np.testing.assert_allclose(ours[..., ::4], theirs, rtol=1e-4, atol=1e-4)


def shardings(tree, mesh=None):
    return sharding.tree_shardings(mesh or tiny.make_mesh(), tree, sharding.TRAIN_RULES)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_there_and_back(head, tmp_path):
    """Split over eight devices as well; a head is loaded, or zero if it is not requested."""
    shape, architecture = Lora(2, 3.0, ("v_proj", "down_proj")), ARCHITECTURE
    adapters = random_adapters(architecture, shape, head)
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    split = jax.jit(lambda tree: tree, out_shardings=shardings(adapters, mesh))(adapters)
    save_adapters(split, architecture, shape, tmp_path / "out", ("some/model", None))
    assert read_adapter_config(tmp_path / "out", architecture) == (shape, "some/model")
    validate_adapters(tmp_path / "out", architecture, shape, "reward" if head == "scalar" else "lm")
    reported = []
    options = {"progress": lambda *at: reported.append(at)}
    options |= {"head": "reward" if head == "scalar" else "lm"}
    source = (tmp_path / "out", architecture, shape)
    loaded = load_adapters(*source, shardings(adapters, mesh), **options)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)
    assert reported[-1] == (len(reported), len(reported))
    assert len(reported) == 8 + (head == "scalar")
    kernel = loaded["layers"]["mlp"]["down_proj"]
    # [2, 32, 2] over model 2.
    assert kernel["lora_a"].addressable_shards[0].data.shape == (2, 16, 2)
    assert kernel["lora_b"].addressable_shards[0].data.shape == (2, 2, 8)  # [2, 2, 16] over fsdp 2
    if head == "scalar":
        names = load_file(tmp_path / "out/adapter_model.safetensors")
        assert names["base_model.model.score.weight"].shape == (1, 16)
        config = json.loads((tmp_path / "out/adapter_config.json").read_text())
        assert config["modules_to_save"] == ["score"]
        fresh = load_adapters(*source, shardings(adapters), head="scalar")
        assert not np.any(fresh["score"]["kernel"])
        jax.tree.map(np.testing.assert_array_equal, fresh["layers"], adapters["layers"])


@pytest.mark.parametrize("unit", ["Sequence", "Token"])
def test_what_peft_saves_of_our_reward_model_or_critic_is_read(checkpoint, unit, tmp_path):
    _, folder, architecture, _ = checkpoint
    adapters = random_adapters(architecture, TWO, "scalar")
    source, base = (adapters, architecture, TWO), ("some/base", None)
    unit_of_critic = {} if unit == "Token" else None
    save_adapters(*source, tmp_path / "ours", base, critic_unit=unit_of_critic)

    def theirs():
        import peft

        model_class = recorded.model_class(f"AutoModelFor{unit}Classification")
        base = model_class.from_pretrained(folder, num_labels=1)
        model = peft.PeftModel.from_pretrained(base, str(tmp_path / "ours"))
        model.save_pretrained(tmp_path / "theirs")
        tensors = load_file(tmp_path / "theirs/adapter_model.safetensors")
        return reference.read_adapters(tmp_path / "theirs"), tensors

    # PEFT adds its own names for a classifier to the parameters that are saved completely.
    config, tensors = recorded.value("adapters", theirs, folder, tmp_path / "ours")
    (tmp_path / "again").mkdir()
    (tmp_path / "again/adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "again/adapter_model.safetensors")
    assert read_adapter_config(tmp_path / "again", architecture) == (TWO, "some/base")
    again = load_adapters(tmp_path / "again", architecture, TWO, shardings(adapters), head="reward")
    jax.tree.map(np.testing.assert_array_equal, again, adapters)


def test_where_decoding_has_them():
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    adapters = random_adapters(ARCHITECTURE, ALL)

    def build():
        base = tiny.init_params(Transformer(ARCHITECTURE), jax.random.key(0), "lm")
        return unroll_params(join_params(base, adapters))

    flat = jax.eval_shape(build)
    layer = sharding.tree_shardings(mesh, flat, sharding.DECODE_RULES)["layer_1"]
    split = jax.tree.map(lambda place, x: place.shard_shape(x.shape), layer, flat["layer_1"])
    q, down = split["attention"]["q_proj"], split["mlp"]["down_proj"]
    assert (q["lora_a"], q["lora_b"]) == ((16, 4), (4, 8))
    assert (down["lora_a"], down["lora_b"]) == ((16, 4), (4, 16))


@pytest.fixture
def saved(tmp_path):
    adapters = random_adapters(ARCHITECTURE, ONE)
    save_adapters(adapters, ARCHITECTURE, ONE, tmp_path / "adapter", ("some/model", None))
    return tmp_path / "adapter"


def edit_folder(folder, tensors=lambda tensors: tensors, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    save_file(
        tensors(load_file(folder / "adapter_model.safetensors")),
        folder / "adapter_model.safetensors",
    )


def read_all(folder):
    shape, _ = read_adapter_config(folder, ARCHITECTURE)
    tree = jax.eval_shape(lambda: init_adapters(ARCHITECTURE, shape, jax.random.key(0), "lm"))
    return shape, load_adapters(folder, ARCHITECTURE, shape, shardings(tree))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported, only 'LORA' is"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"use_a_later_kind": {"blocks": 1}}, "use_a_later_kind=.* is not supported, only None is"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"r": None}, "adapter_config.json: r must be a whole number; it is None"),
        ({"use_rslora": "false"}, "use_rslora must be true or false; it is 'false'"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path must be a string; it is 3"),
        (
            {"r": 4},
            r"q_proj\.lora_A\.weight has shape \[2, 16\], adapter_config\.json makes it \[4, 16\]",
        ),
    ],
)
def test_what_would_change_the_numbers_is_refused(saved, changes, message):
    edit_folder(saved, **changes)
    with pytest.raises(UserError, match=message):
        read_all(saved)


def test_every_change_of_a_field_is_read_or_refused_in_one_line(saved):
    path = saved / "adapter_config.json"
    config = json.loads(path.read_text())
    outcomes = collections.Counter()
    for description, changed in config_sweep.change_each_field(config, config):
        path.write_text(json.dumps(changed))
        try:
            shape, _ = read_adapter_config(saved, ARCHITECTURE)
            assert shape.rank == changed["r"], description
            outcomes["read"] += 1
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 500, description
            outcomes["refused"] += 1
    assert outcomes["read"] > 50 and outcomes["refused"] > 50


def test_tensors_that_are_missing_or_too_many_are_named(saved):
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    edit_folder(
        saved, lambda tensors: {key: value for key, value in tensors.items() if key != name}
    )
    with pytest.raises(UserError, match=f"{name} is missing"):
        read_all(saved)
    other = "base_model.model.model.embed_tokens.lora_embedding_A"
    further = {name: np.zeros((16, 2), np.float32), other: np.zeros((2, 32), np.float32)}
    edit_folder(saved, lambda tensors: tensors | further)
    with pytest.raises(UserError, match="would not use: .*lora_embedding_A"):
        read_all(saved)


def test_pickles_and_other_folders_are_refused(saved, tmp_path):
    with pytest.raises(UserError, match="has no adapter_config.json"):
        read_adapter_config(tmp_path, ARCHITECTURE)
    with pytest.raises(UserError, match="holds adapters, which belong to another model's weights"):
        reference.load(saved)
    (saved / "adapter_model.safetensors").rename(saved / "adapter_model.bin")
    with pytest.raises(UserError, match="adapter_model.bin is a pickle, and is not read"):
        read_adapter_config(saved, ARCHITECTURE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    adapters = random_adapters(ARCHITECTURE, ONE)
    with pytest.raises(UserError, match="mine exists and holds something other than an export"):
        save_adapters(adapters, ARCHITECTURE, ONE, tmp_path / "mine", ("some/model", None))


def test_rank_stabilised_adapters_count_by_the_root_of_the_rank(saved):
    edit_folder(saved, use_rslora=True)
    assert read_all(saved)[0].scale == pytest.approx(3 / 2**0.5)
