"""Checkpoints that do not fit are refused before they are read; the message names the problem."""

import json
import textwrap

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hf_reference as reference
import recorded
from hf_reference import rewrite_tensors
from jax_ppo.errors import UserError
from jax_ppo.models.hf.config import from_hf_config
from jax_ppo.models.hf.fields import NEUTRAL_VALUES
from jax_ppo.models.hf.files import BLOCK_SIZE, SafetensorsCheckpoint, is_finite, write_safetensors
from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.hf.model_folders import INDEX_FILE, resolve_model_folder
from jax_ppo.models.hf.save import export_checkpoint

CONFIG = reference.SIZES | {"model_type": "llama"}


@pytest.fixture
def folder(tmp_path):
    reference.save(tmp_path)
    return tmp_path


def refusal(folder, head="lm"):
    with pytest.raises(UserError) as caught:
        reference.load(folder, head)
    return str(caught.value)


def test_a_missing_tensor(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite_tensors(folder, remove=[name])
    assert f"{folder}: tensor {name} is missing; the nearest there is" in refusal(folder)


def test_another_shape(folder):
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite_tensors(folder, {name: np.zeros((8, 32), np.float32)})
    assert refusal(folder) == (
        f"{folder}/model.safetensors: {name} has shape [8, 32], config.json makes it [16, 32]"
    )


def test_another_type(folder):
    rewrite_tensors(folder, {"model.norm.weight": np.ones(32, np.int8)})
    assert "model.norm.weight is of type I8; only float32, bfloat16 and float16" in refusal(folder)


def test_tensors_that_would_not_be_used(folder):
    name = "model.layers.0.self_attn.q_norm.weight"
    rewrite_tensors(folder, {name: np.ones(8, np.float32)})
    assert f"has 1 tensors that this model would not use: {name}" in refusal(folder)
    gates = [f"model.layers.{i}.mlp.gate.weight" for i in range(10)]
    rewrite_tensors(folder, dict.fromkeys(gates, np.ones(8, np.float32)))
    assert "has 11 tensors" in refusal(folder) and refusal(folder).count("mlp.gate.weight") == 8


INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


def their_frequencies(model):
    return recorded.value(
        "inv_freq", lambda: model.load().model.rotary_emb.inv_freq.numpy(), model.folder
    )


def test_tensors_that_change_nothing_are_ignored(tmp_path):
    model = reference.save(tmp_path, tie_word_embeddings=True)
    frequencies = their_frequencies(model)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite_tensors(
        tmp_path,
        {
            INV_FREQ: frequencies.astype(np.float16),
            "lm_head.weight": tensors["model.embed_tokens.weight"],
            "score.weight": np.ones((1, 32), np.float32),
        },
    )
    ids = reference.tokens()
    architecture, params = reference.load(tmp_path)
    assert architecture.tied
    ours = reference.our_logits(architecture, params, ids)
    reference.assert_their_logits(ours, model, ids)


def test_an_ignored_tensor_must_equal_what_stands_in_for_it(folder):
    frequencies = their_frequencies(reference.reload(folder))
    for wrong in (2 * frequencies, frequencies[:-1], np.ones(4, np.int8)):
        rewrite_tensors(folder, {INV_FREQ: wrong})
        assert f"has 1 tensors that this model would not use: {INV_FREQ}" in refusal(folder)


def test_frequencies_from_before_a_scaling_are_ignored(tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    model = reference.save(tmp_path, rope_parameters=scaling)
    scaled = their_frequencies(model)
    for frequencies in (scaled, 4 * scaled):
        rewrite_tensors(tmp_path, {INV_FREQ: frequencies})
        reference.load(tmp_path)
    rewrite_tensors(tmp_path, {INV_FREQ: 16 * scaled})
    assert f"has 1 tensors that this model would not use: {INV_FREQ}" in refusal(tmp_path)


def test_a_tied_model_with_its_own_head_uses_it_and_exports_it(tmp_path):
    """transformers 5 unties such a model, with a warning."""
    reference.save(tmp_path / "source", tie_word_embeddings=True)
    head = np.random.default_rng(0).normal(size=(97, 32)).astype(np.float32)
    rewrite_tensors(tmp_path / "source", {"lm_head.weight": head})
    ids = reference.tokens()
    theirs = reference.reload(tmp_path / "source")
    architecture, params = reference.load(tmp_path / "source")
    assert not architecture.tied
    reference.assert_their_logits(reference.our_logits(architecture, params, ids), theirs, ids)
    export_checkpoint(params, architecture, tmp_path / "out", source_folder=tmp_path / "source")
    reference.assert_same_logits(reference.reload(tmp_path / "out"), theirs, ids)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_a_tied_model_may_store_its_matrix_as_the_output_embedding_alone(tmp_path, head):
    """Regression: transformers loads it, we missed the input embedding."""
    reference.save(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite_tensors(tmp_path, {"lm_head.weight": embedding}, ["model.embed_tokens.weight"])
    architecture, params = reference.load(tmp_path, head)
    assert architecture.tied
    np.testing.assert_array_equal(params["embed"]["embedding"], embedding)


def test_an_own_head_is_refused_with_an_architecture_that_ties_it(tmp_path):
    reference.save(tmp_path, tie_word_embeddings=True)
    tied = read_architecture(tmp_path)
    rewrite_tensors(tmp_path, {"lm_head.weight": np.zeros((97, 32), np.float32)})
    with pytest.raises(UserError, match="tensors that this model would not use: lm_head.weight"):
        load_checkpoint(tmp_path, tied, reference.one_device(tied, "lm"))


def test_two_files_with_different_copies_of_a_tensor(tmp_path):
    """Equal copies, which some tools write, do no harm."""
    reference.save(tmp_path, shard_bytes=40_000)
    first, *_, last = sorted(tmp_path.glob("*.safetensors"))
    name, values = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: values}, last, {"format": "pt"})
    reference.load(tmp_path)
    changed = values.copy()
    changed.flat[-1] += 1
    for copy in (changed, values[:-1], values.astype(np.float16)):
        save_file(load_file(last) | {name: copy}, last, {"format": "pt"})
        assert refusal(tmp_path) == (
            f"{tmp_path}: {first.name} and {last.name} hold different tensors named {name}, so it "
            "is unclear which one belongs to the model"
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_named(folder, dtype, value):
    name = "model.layers.1.mlp.down_proj.weight"
    weights = load_file(folder / "model.safetensors")[name].astype(dtype)
    weights[0, 0] = np.finfo(np.float16).max  # large, but finite
    rewrite_tensors(folder, {name: weights})
    reference.load(folder)
    weights[-1, 17] = value
    rewrite_tensors(folder, {name: weights})
    assert refusal(folder) == (
        f"{folder}/model.safetensors: {name} has values that are not finite (NaN or infinity)"
    )


def test_values_that_are_not_finite_are_noticed_in_every_block():
    values = np.zeros(2 * BLOCK_SIZE + 5, np.float32)
    assert is_finite(values, "F32")
    for place in (0, BLOCK_SIZE, 2 * BLOCK_SIZE + 4):
        values[place] = -np.inf
        assert not is_finite(values, "F32")
        values[place] = -np.finfo(np.float32).max
    assert is_finite(values, "F32")


def test_heads_that_are_not_there(folder, tmp_path):
    assert (
        "there is no score.weight in it: it is not a sequence-classification checkpoint"
        in refusal(folder, "reward")
    )
    reference.save(tmp_path / "reward", "llama", "SequenceClassification", num_labels=1)
    assert "there is no lm_head.weight in it but score.weight" in refusal(tmp_path / "reward")
    # Regression: a tied critic was read as a policy.
    file = tmp_path / "reward" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    assert "there is no lm_head.weight in it but score.weight" in refusal(tmp_path / "reward")


def test_reward_models_of_another_kind(tmp_path):
    reference.save(tmp_path / "two", "llama", "SequenceClassification", num_labels=2)
    assert "score.weight has 2 labels; a reward model has num_labels = 1" in refusal(
        tmp_path / "two", "reward"
    )
    reference.save(tmp_path / "bias", "llama", "SequenceClassification", num_labels=1)
    rewrite_tensors(tmp_path / "bias", {"score.bias": np.zeros(1, np.float32)})
    reference.load(tmp_path / "bias", "reward")
    rewrite_tensors(tmp_path / "bias", {"score.bias": np.ones(1, np.float32)})
    assert "would not use: score.bias" in refusal(tmp_path / "bias", "reward")


def test_shardings_of_another_structure(folder):
    architecture = read_architecture(folder)
    shardings = reference.one_device(architecture, "lm")
    del shardings["layers"]["mlp"]
    with pytest.raises(
        ValueError,
        match=r"`shardings` .* it lacks layers/mlp/down_proj/kernel, layers/mlp/gate_proj",
    ):
        load_checkpoint(folder, architecture, shardings)


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(UserError) as caught:
        read_architecture(tmp_path)
    message = str(caught.value)
    assert "only in pytorch_model.bin, a pickle" in message and "is not read" in message
    assert f"source = {str(tmp_path)!r}\n    transformers.AutoModelForCausalLM." in message


def test_a_repository_without_safetensors_is_refused_with_the_lines_that_convert_it(tmp_path):
    """Pickles are not downloaded, so that the folder has none."""
    folder = tmp_path / "models--owner--reward-model" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    named = {"architectures": ["LlamaForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(CONFIG | named))
    with pytest.raises(UserError) as caught:
        read_architecture(folder)
    program = textwrap.dedent(str(caught.value).partition("\n")[2])
    compile(program, "program", "exec")
    assert "source = 'owner/reward-model'\n" in program
    assert "transformers.AutoModelForSequenceClassification.from_pretrained(source)" in program


def programs(caught):
    """Return an error's first line and the program below it, which must be Python."""
    message, _, program = str(caught.value).partition("\n")
    compile(textwrap.dedent(program), "program", "exec")
    return message, program


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("fp8", "source, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))."),
        ("mxfp4", "source, quantization_config=transformers.Mxfp4Config(dequantize=True))."),
        ("bitsandbytes", "source).dequantize()."),
    ],
)
def test_a_quantized_checkpoint_is_refused_with_the_lines_that_dequantize_it(
    method, call, tmp_path
):
    quantized = {"quantization_config": {"quant_method": method}}
    for config in (quantized | CONFIG, quantized | {"model_type": "gemma3", "text_config": CONFIG}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError) as caught:
            read_architecture(tmp_path)
        message, program = programs(caught)
        assert f"{tmp_path}: quantization_config {{'quant_method': {method!r}}}" in message
        assert f"source = {str(tmp_path)!r}\n" in program
        assert f'AutoModelForCausalLM.from_pretrained({call}save_pretrained("converted")' in program


@pytest.mark.parametrize("quantization", [{"quant_method": "gptq"}, {"bits": 4}, "int4"])
def test_what_transformers_does_not_dequantize_is_refused_in_a_line(quantization, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": quantization})
    )
    with pytest.raises(UserError, match="take the model's checkpoint in float32 or bfloat16$"):
        read_architecture(tmp_path)


def test_gguf_is_refused_with_the_lines_that_dequantize_it(tmp_path):
    file = tmp_path / "some model.gguf"
    file.write_bytes(b"GGUF")

    def explain(read, path):
        with pytest.raises(UserError) as caught:
            read(path)
        return programs(caught)

    message, program = explain(resolve_model_folder, str(file))
    assert explain(read_architecture, tmp_path) == (message, program)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert explain(read_architecture, tmp_path) == (message, program)
    assert f"{file} is in the format GGUF" in message
    assert "AutoTokenizer.from_pretrained(source, gguf_file='some model.gguf')" in program


def test_folders_that_are_not_checkpoints(tmp_path):
    with pytest.raises(ValueError, match="has no config.json: it is not a Hugging Face checkpoint"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(
        ValueError,
        match="has no weights: neither model.safetensors nor model.safetensors.index.json",
    ):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("config.json", "[1, 2]", "must hold a JSON object; it holds [1, 2]"),
        ("config.json", '"' + "x" * 500 + '"', "must hold a JSON object; it holds 'xxx"),
        ("config.json", "[" * 100_000, "nested too deeply"),
        ("generation_config.json", "7", "must hold a JSON object; it holds 7"),
        (INDEX_FILE, "[]", "must hold a JSON object; it holds []"),
        (INDEX_FILE, '{"weight_map": 3}', "weight_map must be an object; it is 3"),
        (
            INDEX_FILE,
            '{"weight_map": {"w": "../other.safetensors"}}',
            "weight_map must name files of this folder; it names '../other.safetensors' for 'w'",
        ),
        (INDEX_FILE, '{"weight_map": {"w": "/etc/passwd"}}', "it names '/etc/passwd' for 'w'"),
        (INDEX_FILE, '{"weight_map": {"w": ".."}}', "it names '..' for 'w'"),
        (INDEX_FILE, '{"weight_map": {"w": ""}}', "it names '' for 'w'"),
        (INDEX_FILE, '{"weight_map": {"w": "..\\\\x"}}', "it names '..\\\\x' for 'w'"),
        (INDEX_FILE, '{"weight_map": {"w": 3}}', "it names 3 for 'w'"),
        (INDEX_FILE, '{"weight_map": {"w": "%s"}}' % ("a" * 256), "it names 'aaa"),
        (INDEX_FILE, '{"weight_map": {"w": "\\u0000"}}', "it names '\\x00' for 'w'"),
    ],
)
def test_json_files_that_hold_something_else(folder, name, contents, message):
    if name == INDEX_FILE:
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(contents)
    with pytest.raises(UserError) as caught:
        read_architecture(folder)
    text = str(caught.value)
    assert text.startswith(f"{folder / name}") and message in text
    assert "\n" not in text and len(text) < len(str(folder)) + 250


def test_a_configuration_that_cannot_be_read(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(UserError, match="config.json cannot be read: Is a directory"):
        read_architecture(folder)


def test_files_that_are_cut_short_or_missing(tmp_path):
    reference.save(tmp_path, shard_bytes=40_000)
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:1000])
    assert f"{first} is not a whole safetensors file" in refusal(tmp_path)
    first.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS pointer: fetch it again" in refusal(tmp_path)
    first.unlink()
    assert f"names 3 files, of which 1 are not there: {first.name}" in refusal(tmp_path)


def test_an_older_configuration_may_leave_things_out():
    older = {name: value for name, value in CONFIG.items() if name != "max_position_embeddings"}
    architecture = from_hf_config(older | {"num_key_value_heads": None})
    assert (architecture.num_kv_heads, architecture.head_dim, architecture.rope_theta) == (
        4,
        8,
        10_000.0,
    )
    assert architecture.max_position_embeddings == 2048 and architecture.eos_ids == (2,)
    assert from_hf_config(CONFIG | {"eos_token_id": None}).eos_ids == ()


def test_written_files_are_as_the_arrays_look(tmp_path):
    """A transposed view has the memory layout of its original array."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {"plain": ("F32", (2, 3)), "turned": ("F32", (3, 2))}
    write_safetensors(tmp_path / "model.safetensors", tensors, iter([array, array.T]))
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("plain"), array)
        np.testing.assert_array_equal(checkpoint.read("turned"), array.T)
        np.testing.assert_array_equal(
            checkpoint.read("turned", (slice(1, 3), slice(0, 1))), [[1], [2]]
        )


def test_fields_that_no_family_reads_may_have_the_values_that_change_nothing():
    config = {name: value for name, value in CONFIG.items() if name not in NEUTRAL_VALUES}
    plain = from_hf_config(config)
    for name, values in NEUTRAL_VALUES.items():
        for value in values:
            assert from_hf_config(config | {name: value}) == plain, (name, value)
    with pytest.raises(UserError, match="is_encoder_decoder"):
        from_hf_config(config | {"is_encoder_decoder": True})
