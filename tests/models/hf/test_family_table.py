"""Model families are entries of one table: no other file names one, and an entry is enough."""

import ast
import pathlib
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_ppo.errors import UserError
from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.models.hf.families import DEBERTA, FAMILIES, MULTIMODAL
from jax_ppo.models.hf.family import Family
from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer

PACKAGE = pathlib.Path(__file__).parents[3] / "jax_ppo"
TABLE = PACKAGE / "models/hf/families.py"
NAMES = {*FAMILIES, DEBERTA, *(family.class_prefix for family in FAMILIES.values())}


def family_literals(source):
    """Return the string literals in code (docstrings do not count) that name a family."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, NAMES))})(?![\w-])")
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
        and pattern.search(node.value)
    ]


@pytest.mark.parametrize(
    "path", [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
)
def test_only_the_table_names_a_family(path):
    literals = family_literals((PACKAGE / path).read_text())
    if PACKAGE / path == TABLE:
        assert set(literals) >= NAMES
    else:
        assert literals == []


def test_the_page_of_models_names_each_family_and_those_without_a_classifier_of_tokens():
    text = (PACKAGE.parent / "docs/models.md").read_text()
    table = text.partition("| family | `model_type` |")[2].partition("\n\n")[0]
    kinds = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    named = {name for cell in kinds for name in re.findall(r"\w+", cell)}
    assert named == FAMILIES.keys() | MULTIMODAL.keys()
    words = " ".join(text.split())
    without = re.search(r"no classifier of tokens with such a head \(([^)]*)\)", words)[1]
    expected = {name for name, family in FAMILIES.items() if not family.has_token_classifier}
    assert set(re.findall(r"\w+", without)) == expected


@pytest.mark.parametrize(
    "code", ["kind == 'gemma2'", "f'model_type {kind} is not llama'", "x = {'phi3': 1}"]
)
def test_a_family_outside_the_table_is_noticed(code):
    assert len(family_literals(f'"""Of gemma2."""\n{code}')) == 1


# Norms with 1 + scale, a norm of queries and keys, one tensor for gate and up, and different names
# for modules and an activation: no real family combines all of them.
TINYLM = Family(
    class_prefix="TinyLM",
    fixed={"norm_plus_one": True, "qk_norm": True},
    fields={"output_cap": "logit_softcap"},
    bias_fields={"has_biases": ("qkv_bias",)},
    defaults={"max_position_embeddings": 64, "head_dim": 8},
    activation_fields=("gate_function",),
    activation="gelu_pytorch_tanh",
    activation_aliases={"swish": "silu"},
    fused_projections={("gate_proj", "up_proj"): "gate_up"},
    module_names={
        "model.embed_tokens": "model.tokens",
        "model.layers": "model.blocks",
        "self_attn.o_proj": "self_attn.dense",
        "input_layernorm": "norm_1",
    },
)
CONFIG = {
    "model_type": "tinylm",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "gate_function": "swish",
    "output_cap": 3.0,
    "has_biases": True,
}


def test_a_new_family_takes_one_entry(monkeypatch, tmp_path):
    monkeypatch.setitem(FAMILIES, "tinylm", TINYLM)
    architecture = Architecture(
        family="tinylm",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        qkv_bias=True,
        norm_plus_one=True,
        qk_norm=True,
        logit_softcap=3.0,
        max_position_embeddings=64,
    )
    model = Transformer(architecture)
    params = heads.init_params(model, jax.random.key(0), "lm")
    export_checkpoint(params, architecture, tmp_path)

    config = to_hf_config(architecture)
    assert config["architectures"] == ["TinyLMForCausalLM"]
    assert {name: config[name] for name in ("gate_function", "output_cap", "has_biases")} == {
        "gate_function": "silu",
        "output_cap": 3.0,
        "has_biases": True,
    }
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.blocks.1.mlp.gate_up.weight"].shape == (48, 16)
    assert {
        "model.tokens.weight",
        "model.blocks.0.self_attn.dense.weight",
        "model.blocks.0.norm_1.weight",
    } <= tensors.keys()

    assert read_architecture(tmp_path) == architecture
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loaded = load_checkpoint(tmp_path, architecture, jax.tree.map(lambda _: device, params))
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_a_new_familys_own_words_are_read(monkeypatch):
    from jax_ppo.models.hf.config import from_hf_config

    monkeypatch.setitem(FAMILIES, "tinylm", TINYLM)
    architecture = from_hf_config(CONFIG)
    assert architecture.activation == "silu" and architecture.logit_softcap == 3.0
    assert architecture.qkv_bias and not architecture.output_bias
    assert (architecture.head_dim, architecture.max_position_embeddings) == (8, 64)
    without = {name: value for name, value in CONFIG.items() if name != "gate_function"}
    assert from_hf_config(without).activation == "gelu_pytorch_tanh"
    with pytest.raises(UserError, match="gate_function must be a string; it is None"):
        from_hf_config(CONFIG | {"gate_function": None})
