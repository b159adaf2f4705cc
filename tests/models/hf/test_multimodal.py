"""The text part of a multimodal model is read, trained and exported as a separate decoder."""

import json
import re

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import hf_reference as reference
import recorded
from family_variants import GEMMA_4, QWEN_3_5, SHARED_EXPERT
from jax_ppo.errors import UserError
from jax_ppo.models.hf.config import from_hf_config, text_config
from jax_ppo.models.hf.families import MULTIMODAL
from jax_ppo.models.hf.load import (
    describe_unread_parts,
    read_architecture,
    read_reward_architecture,
)
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.lora import Lora

TEXT = reference.SIZES | {
    "head_dim": 16,
    "query_pre_attn_scalar": 9,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


@pytest.fixture
def model(tmp_path):
    """Save a small Gemma 3 of text and images to tmp_path / "in" and return it."""
    config = {
        "text_config": TEXT,
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 90,
        "boi_token_index": 91,
        "eoi_token_index": 92,
    }
    return recorded.write_checkpoint(tmp_path / "in", "Gemma3ForConditionalGeneration", config)


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_computes_the_logits_of_the_whole(model, tmp_path, prefix):
    """The first names are transformers 5's, the second stand in files on the hub."""
    weights = tmp_path / "in/model.safetensors"
    stored = load_file(weights)
    own = {"model.language_model.": prefix, "language_model.model.": prefix}
    renamed = {}
    for name, tensor in stored.items():
        for other, mine in own.items():
            name = name.replace(other, mine)
        renamed[name] = tensor
    assert any(name.startswith(prefix) for name in renamed)
    save_file(renamed, weights, metadata={"format": "pt"})

    architecture, params = reference.load(tmp_path / "in")
    ids = reference.tokens(rows=2, length=16, vocab_size=90)
    ours = reference.our_logits(architecture, params, ids)
    reference.assert_their_logits(ours, model, ids, rtol=1e-4, atol=1e-4 * np.abs(ours).max())

    export_checkpoint(params, architecture, tmp_path / "out", source_folder=tmp_path / "in")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["architectures"] == ["Gemma3ForCausalLM"]
    exported = recorded.Checkpoint(tmp_path / "out", "Gemma3ForCausalLM")
    reference.assert_same_logits(exported, model, ids, atol=1e-5)


def test_peft_finds_adapters_on_the_text_part_and_nowhere_else(model, tmp_path):
    folder, lora = tmp_path / "adapter", Lora(2, 4.0, ("q_proj", "down_proj"))
    source = reference.load(tmp_path / "in")
    reference.assert_adapters_are_pefts(folder, model, *source, lora)
    pattern = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    for module in ("language_model.layers.1.self_attn", "vision_tower.encoder.layers.0.self_attn"):
        is_text = module.startswith("language_model")
        assert bool(re.fullmatch(pattern, f"model.{module}.q_proj")) == is_text


QWEN_VISION = VISION | {"num_heads": 2, "depth": 1, "out_hidden_size": 32, "hidden_act": "silu"}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
OTHERS = {
    "Llava": {
        "text_config": reference.SIZES | {"model_type": "llama", "head_dim": 8},
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
    },
    "Mistral3": {
        "text_config": reference.SIZES | {"model_type": "mistral", "head_dim": 16},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 4},
        "tie_word_embeddings": True,
    },
    "InternVL": {
        "text_config": reference.SIZES | {"model_type": "qwen2"},
        "vision_config": VISION | {"image_size": [8, 8], "patch_size": [4, 4]},
    },
    "Qwen2VL": {
        "text_config": reference.SIZES | {"rope_parameters": MROPE},
        "vision_config": {"embed_dim": 8, "hidden_size": 32, "num_heads": 2, "depth": 1},
    },
    "Qwen2_5_VL": {
        "text_config": reference.SIZES | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION | {"fullatt_block_indexes": [0]},
        "tie_word_embeddings": True,
    },
    "Qwen3VL": {
        "text_config": reference.SIZES
        | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN_VISION
        | {"deepstack_visual_indexes": [0], "num_position_embeddings": 4},
    },
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("Mistral3", "Qwen3VL") else pytest.param(name, marks=pytest.mark.slow)
        for name in OTHERS
    ],
)
def test_the_text_part_of_other_families_computes_the_logits_of_the_whole(name, tmp_path):
    """The vocabulary's last tokens are those of images."""
    folder = tmp_path / "in"
    model = recorded.write_checkpoint(folder, f"{name}ForConditionalGeneration", OTHERS[name])
    architecture, params = reference.load(folder)
    ids = reference.tokens(rows=2, length=16, vocab_size=90)
    ours = reference.our_logits(architecture, params, ids)
    reference.assert_their_logits(ours, model, ids, rtol=1e-4, atol=1e-4 * np.abs(ours).max())
    export_checkpoint(params, architecture, tmp_path / "out", source_folder=folder)
    exported = recorded.Checkpoint(tmp_path / "out")
    reference.assert_same_logits(exported, model, ids, atol=1e-5)
    (line,) = describe_unread_parts(folder)
    assert line.endswith(
        f"only the text part of {json.loads((folder / 'config.json').read_text())['model_type']} "
        f"is used, as {architecture.family}; images are not read"
    )
    assert not describe_unread_parts(tmp_path / "out")


def stack_experts(tensors):
    """Return the tensors with all experts of a layer in two: [E, gate and up, in], [E, out, in]."""
    names = [name for name in tensors if re.search(r"experts\.0\.\w+_proj", name)]
    stacked = {name: x for name, x in tensors.items() if ".experts." not in name}
    for name in names:
        every = [tensors[name.replace("experts.0", f"experts.{i}")] for i in range(4)]
        stacked[name.replace("experts.0", "experts").removesuffix(".weight")] = np.stack(every)
    for name in [name for name in stacked if name.endswith("experts.gate_proj")]:
        both = (stacked.pop(name), stacked.pop(name.replace("gate_proj", "up_proj")))
        stacked[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(both, axis=1)
    return stacked


# Of the hub's files: family and form of the text part, further fields, tensors that nothing reads.
QWEN = {"full_attention_interval": 4, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
QWEN |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": []}
QWEN_HEADS = ("model.visual.merger.norm.weight", "mtp.fc.weight")
MEDIA = [f"model.{x}.weight" for x in ("vision_tower.x", "audio_tower.x", "embed_audio.y")]
ATTENTION = "model.language_model.layers.{}.self_attn."
# This layer shares the keys of another.
SHARED = [ATTENTION.format(4) + f"{x}.weight" for x in ("k_proj", "k_norm")]
HUB = {
    "qwen3_5": ("qwen3_5_text", QWEN_3_5, QWEN, QWEN_HEADS),
    "qwen3_5_moe": ("qwen3_5_moe_text", SHARED_EXPERT, QWEN, QWEN_HEADS),
    "gemma4": ("gemma4_text", GEMMA_4, {}, MEDIA + SHARED),
}


@pytest.mark.parametrize(
    "kind", ["qwen3_5", "qwen3_5_moe", pytest.param("gemma4", marks=pytest.mark.slow)]
)
def test_the_text_part_of_files_of_the_hub_is_read_and_nothing_else(kind, tmp_path):
    """A tensor may hold all experts of a layer."""
    family, changes, further, unread = HUB[kind]
    reference.save(tmp_path / "text", family, **changes)
    architecture, params = reference.load(tmp_path / "text")
    text = json.loads((tmp_path / "text/config.json").read_text())
    config = {"model_type": kind, "text_config": text | further, "image_token_id": 90}
    config |= {"vision_config": {"model_type": kind, "depth": 27}, "tie_word_embeddings": False}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", "model.language_model.", 1): x
        for name, x in stack_experts(load_file(tmp_path / "text/model.safetensors")).items()
    }
    tensors |= dict.fromkeys(unread, np.ones((2, 2), np.float32))
    save_file(tensors, tmp_path / "whole/model.safetensors")
    read, loaded = reference.load(tmp_path / "whole")
    assert read == architecture
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    whole, *others = describe_unread_parts(tmp_path / "whole")
    assert f"only the text part of {kind} is used, as {family}" in whole
    further_tokens = "further tokens than the next are neither read nor exported"
    assert [further_tokens in line for line in others] == [True] * (kind != "gemma4")
    assert not describe_unread_parts(tmp_path / "text")
    if kind == "gemma4":  # of a layer with its own keys, this tensor would be missing
        name = ATTENTION.format(3) + "v_proj.weight"
        save_file(tensors | {name: tensors[unread[0]]}, tmp_path / "whole/model.safetensors")
        with pytest.raises(UserError, match="this model would not use: .*3.self_attn.v_proj"):
            reference.load(tmp_path / "whole")


def test_old_files_describe_the_decoder_next_to_the_rest(tmp_path):
    config = {
        **reference.SIZES,
        "model_type": "qwen2_5_vl",
        "vision_start_token_id": 91,
        "vision_config": {"depth": 1},
        "image_token_id": 92,
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "rope_theta": 700.0,
        "sliding_window": 32_768,
        "use_sliding_window": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(tmp_path, needs_weights=False)
    assert (architecture.family, architecture.rope_theta, architecture.tied) == ("qwen2", 700, True)
    assert architecture.norm_epsilon == 1e-5 and not any(architecture.layers_are_local)


@pytest.mark.parametrize("kind", [kind for kind in MULTIMODAL if not MULTIMODAL[kind].is_text])
def test_what_a_file_leaves_out_is_what_transformers_takes(kind):
    """The ends of the whole model come before those of its text part, whose null is no end."""
    whole = transformers.CONFIG_MAPPING[kind]
    few = {name: reference.SIZES[name] for name in ("vocab_size", "intermediate_size")}
    few |= {"num_attention_heads": 128, "hidden_size": 1024, "num_hidden_layers": 30}
    few |= {"model_type": whole().text_config.model_type, "eos_token_id": None}
    if kind == "gemma4":
        few["vocab_size_per_layer_input"] = few["vocab_size"]  # one number for both is required
    full = whole(text_config=few, eos_token_id=[1, 106]).to_dict()
    full["text_config"] |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    read = from_hf_config(
        text_config({"model_type": kind, "text_config": few, "eos_token_id": [1, 106]})
    )
    assert read == from_hf_config(text_config(full)) and read.eos_ids == (1, 106)


def test_a_model_without_a_score_or_a_known_text_part_is_refused(model, tmp_path):
    with pytest.raises(UserError, match=r"there is no score.weight in it"):
        read_reward_architecture(tmp_path / "in")
    change_config(tmp_path / "in", text_config={"model_type": "gemma3n_text"})
    with pytest.raises(UserError, match=r"model_type 'gemma3n_text' is not supported"):
        read_architecture(tmp_path / "in")
    change_config(tmp_path / "in", model_type=["gemma3"])
    with pytest.raises(UserError, match=r"model_type \['gemma3'\] is not supported"):
        read_architecture(tmp_path / "in")
    change_config(tmp_path / "in", model_type="gemma3", text_config=3)
    with pytest.raises(UserError, match=r"text_config must be an object; it is 3"):
        read_architecture(tmp_path / "in")
