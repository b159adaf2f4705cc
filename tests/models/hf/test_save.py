"""transformers loads exports as the same model; loading them again is exact to the bit."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file

import hf_reference as reference
from jax_ppo.errors import UserError
from jax_ppo.models.hf import weight_files
from jax_ppo.models.hf.config import from_hf_config
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.models.hf.save import export_checkpoint


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
        ("qwen2", {"eos_token_id": [2, 5]}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_there_and_back(family, changes, tmp_path):
    model = reference.save(tmp_path / "source", family, **changes)
    architecture, params = reference.load(tmp_path / "source")
    reference.assert_exported_as_the_same(model, architecture, params, tmp_path / "out")
    # Readers that believe this field alone must be right, too.
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] == architecture.tied


def test_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "MAX_SHARD_BYTES", 20_000)
    model = reference.save(tmp_path / "source", "qwen2")
    architecture, params = reference.load(tmp_path / "source")
    export_checkpoint(params, architecture, tmp_path / "out")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in load_file(tmp_path / "source/model.safetensors").values()
    )
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            assert {
                name for name, where in index["weight_map"].items() if where == file.name
            } == set(tensors.keys())
        assert file.stat().st_size < 20_000 + 4_000  # and the header
    reference.assert_same_logits(reference.reload(tmp_path / "out"), model, reference.tokens())
    jax.tree.map(np.testing.assert_array_equal, reference.load(tmp_path / "out")[1], params)


def test_bfloat16(tmp_path):
    reference.save(tmp_path / "source")
    architecture, params = reference.load(tmp_path / "source")
    export_checkpoint(params, architecture, tmp_path / "out", dtype="bfloat16")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    rounded = reference.save(tmp_path / "rounded", dtypes=("bfloat16",))
    reference.assert_same_tensors(tmp_path / "out", tmp_path / "rounded")
    reference.assert_same_logits(reference.reload(tmp_path / "out"), rounded, reference.tokens())


@pytest.mark.parametrize(
    ("family", "unit"), [("llama", "Sequence"), ("llama", "Token"), ("qwen2", "Token")]
)
def test_a_scalar_head_is_read_as_a_classifier(family, unit, tmp_path):
    reference.save(tmp_path / "source", family)
    architecture, params = reference.load(tmp_path / "source", "scalar")
    params["score"]["kernel"] = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    out = tmp_path / "out"
    export_checkpoint(params, architecture, out, critic_unit={} if unit == "Token" else None)
    theirs = reference.reload(out, task=f"{unit}Classification")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [f"{reference.class_prefix(family)}For{unit}Classification"]
    ids = reference.tokens()
    values = reference.heads.compute_scalars(params, reference.hidden(architecture, params, ids))
    logits = reference.their_logits(theirs, ids)[..., 0]
    np.testing.assert_allclose(logits, values if unit == "Token" else values[:, -1], atol=1e-4)
    again, loaded = reference.load(out, "reward")
    assert again == architecture
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_a_critic_of_a_family_without_token_classifier_is_a_sequence_classifier(tmp_path):
    reference.save(tmp_path / "source", "olmo2")
    architecture, params = reference.load(tmp_path / "source", "scalar")
    export_checkpoint(params, architecture, tmp_path / "out", critic_unit={})
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["Olmo2ForSequenceClassification"]
    assert "score.bias" not in load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parity
def test_transformers_continues_the_real_model_with_its_tokenizer(tinystories, tmp_path):
    import torch

    architecture, params = reference.load(tinystories)
    export_checkpoint(params, architecture, tmp_path / "out", source_folder=tinystories)
    model = reference.reload(tmp_path / "out").load()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    original = transformers.AutoTokenizer.from_pretrained(tinystories)
    prompt = "Once upon a time, there was a little girl named Lily."
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    assert ids.tolist() == original(prompt, return_tensors="pt")["input_ids"].tolist()
    if ids[0, 0] != architecture.bos_id:
        ids = torch.cat([torch.tensor([[architecture.bos_id]]), ids], 1)
    story = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False
    )
    assert "She loved to play outside in the park." in tokenizer.decode(story[0])


def test_generation_defaults_come_along_but_the_ends_are_the_architectures(tmp_path):
    reference.save(tmp_path / "source", eos_token_id=5)
    (tmp_path / "source/generation_config.json").write_text(
        json.dumps({"temperature": 0.7, "eos_token_id": [5, 9]})
    )
    architecture, params = reference.load(tmp_path / "source")
    export_checkpoint(params, architecture, tmp_path / "out", source_folder=tmp_path / "source")
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    ids = {"bos_token_id": 1, "eos_token_id": [5, 9], "pad_token_id": 0}
    assert written == {"temperature": 0.7} | ids
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == [5, 9]
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [5, 9]


def test_the_tokenizer_may_come_from_another_folder(tmp_path):
    reference.save(tmp_path / "source")
    (tmp_path / "other").mkdir()
    for folder in ("source", "other"):
        (tmp_path / folder / "tokenizer.json").write_text(folder)
    architecture, params = reference.load(tmp_path / "source")
    for tokenizer_folder, expected in ((None, "source"), (tmp_path / "other", "other")):
        folders = {"source_folder": tmp_path / "source", "tokenizer_folder": tokenizer_folder}
        export_checkpoint(params, architecture, tmp_path / "out", **folders)
        assert (tmp_path / "out/tokenizer.json").read_text() == expected


def test_an_export_is_replaced_whole_and_nothing_else_ever(tmp_path, monkeypatch):
    reference.save(tmp_path / "source")
    architecture, params = reference.load(tmp_path / "source")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "MAX_SHARD_BYTES", 20_000)
        export_checkpoint(params, architecture, out)
    (tmp_path / ".out.writing").mkdir()  # the state that a killed run leaves
    export_checkpoint(params, architecture, out)
    files = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == files
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="notes exists and holds something other than an export"):
        export_checkpoint(params, architecture, tmp_path / "notes")
    assert (tmp_path / "notes/thesis.txt").exists()


def test_wrong_parameters_are_refused(tmp_path):
    reference.save(tmp_path / "source")
    architecture, params = reference.load(tmp_path / "source")
    headless = {name: value for name, value in params.items() if name != "lm_head"}
    with pytest.raises(ValueError, match="it lacks lm_head/embedding"):
        export_checkpoint(headless, architecture, tmp_path / "out")
    with pytest.raises(ValueError, match="it should not have extra/scale"):
        export_checkpoint(params | {"extra": {"scale": 1}}, architecture, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Fields of a source's config.json that the model does not depend on.
KEPT = {
    "initializer_range": 0.123,
    "attention_dropout": 0.25,
    "transformers_version": "4.44.0",
    "use_cache": False,
    "torch_dtype": "float16",
    "_name_or_path": "somewhere",
    "task_specific_params": {"x": [1]},
}


def edit_config(folder, add=(), remove=()):
    """Change the fields of a folder's config.json and return its contents."""
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in remove} | dict(add)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_an_export_keeps_the_fields_that_it_need_not_change(tmp_path):
    """Regression: it kept none if the embedding had rows without a token, as Qwen2.5's."""
    reference.save(tmp_path / "source", rope_parameters={"rope_type": "linear", "factor": 2.0})
    code = {"auto_map": {"AutoConfig": "own.Config"}}  # the export has no file of code
    source = edit_config(tmp_path / "source", KEPT | code, remove=["dtype", "rope_parameters"])
    source = edit_config(
        tmp_path / "source", {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}}
    )
    architecture, params = reference.load(tmp_path / "source")
    architecture = dataclasses.replace(architecture, num_ids=architecture.vocab_size - 1)
    export_checkpoint(params, architecture, tmp_path / "out", source_folder=tmp_path / "source")
    written = json.loads((tmp_path / "out/config.json").read_text())
    del source["auto_map"]
    assert written == source | {"torch_dtype": "float32"}
    out, original = (reference.reload(tmp_path / name) for name in ("out", "source"))
    reference.assert_same_logits(out, original, reference.tokens(), atol=0)


def test_a_critic_keeps_them_too_and_becomes_a_classifier(tmp_path):
    reference.save(tmp_path / "source")
    labels = {"num_labels": 2, "problem_type": "single_label_classification"}
    source = edit_config(tmp_path / "source", KEPT | labels)
    architecture, params = reference.load(tmp_path / "source", "scalar")
    export_checkpoint(params, architecture, tmp_path / "out", source_folder=tmp_path / "source")
    written = json.loads((tmp_path / "out/config.json").read_text())
    for name in labels:
        del source[name]
    assert written == source | {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert theirs.num_labels == 1


def test_a_whole_number_is_written_as_one():
    """Regression: 4.0 was written where transformers, and an import, expect 4."""
    read = from_hf_config({"model_type": "gemma2", **reference.SIZES})
    architecture = dataclasses.replace(read, query_pre_attn_scalar=4.0, logit_softcap=3.0)
    config = to_hf_config(architecture)
    assert repr(config["query_pre_attn_scalar"]) == "4"
    assert repr(config["final_logit_softcapping"]) == "3.0"
    assert from_hf_config(config) == architecture


def test_the_configuration_of_another_model_is_not_kept(tmp_path):
    """A model that is made from scratch has only its tokenizer from the source folder."""
    reference.save(tmp_path / "source")
    architecture, params = reference.load(tmp_path / "source")
    expected = to_hf_config(architecture)
    for change in ({"rms_norm_eps": 0.5}, {"model_type": "qwen2"}, {"unknown": 1}):
        source = edit_config(tmp_path / "source")
        edit_config(tmp_path / "source", change)
        export_checkpoint(params, architecture, tmp_path / "out", source_folder=tmp_path / "source")
        assert json.loads((tmp_path / "out/config.json").read_text()) == expected
        edit_config(tmp_path / "source", source, remove=change)


@pytest.mark.parametrize("has_source", [True, False])
def test_a_gemma_3_without_local_layers_can_be_exported(tmp_path, has_source):
    """transformers needs a number for the window, although no layer uses it."""
    source = tmp_path / "source"
    model = reference.save(
        source, "gemma3_text", layer_types=["full_attention"] * 2, head_dim=16, sliding_window=7
    )
    architecture, params = reference.load(source)
    assert architecture.sliding_window is None
    export_checkpoint(
        params, architecture, tmp_path / "out", source_folder=source if has_source else None
    )
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["sliding_window"] == (7 if has_source else 4096)
    out = reference.reload(tmp_path / "out")
    reference.assert_same_logits(out, model, reference.tokens(), atol=0)


def test_additional_chat_templates_come_along(tmp_path):
    reference.save(tmp_path / "source")
    templates = tmp_path / "source/additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").write_text("{{ messages }}")
    architecture, params = reference.load(tmp_path / "source")
    export_checkpoint(params, architecture, tmp_path / "out", source_folder=tmp_path / "source")
    copy = tmp_path / "out/additional_chat_templates/rag.jinja"
    assert copy.read_text() == "{{ messages }}"
