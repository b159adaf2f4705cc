"""Every kind of rotary position embedding has the frequencies and logits of transformers."""

import numpy as np
import pytest

import hf_reference as reference
import recorded
from jax_ppo.errors import UserError
from jax_ppo.models import rope
from jax_ppo.models.architecture import ROPE_KINDS
from jax_ppo.models.hf.config import from_hf_config
from jax_ppo.models.hf.config_export import to_hf_config

# Chosen so that every branch is taken: the four frequencies of a head (8 wide) have wavelengths of
# 6, 63, 628 and 6,283 tokens, and the original length is 64.
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.0, 2.0, 3.0, 4.0]
ORIGINAL = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0} | ORIGINAL
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG} | ORIGINAL
LONGROPE |= {"rope_theta": 1e4}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "yarn": YARN,
    "yarn, with its constants": YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.2},
    "yarn, not truncated": YARN | {"beta_fast": 8, "truncate": False},
    "yarn, with mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, ramp of no width": YARN | {"rope_theta": 1e4, "beta_fast": 1e-3, "beta_slow": 1e-3},
    "llama3": ORIGINAL
    | {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}
    | {"low_freq_factor": 0.5, "high_freq_factor": 4.0},
    "longrope": LONGROPE,
    "longrope, less than doubled": LONGROPE | {"factor": 1.5},
    "longrope, with its factor": LONGROPE | {"factor": 8.0},
}


def make_config(parameters):
    longer = 256 if "original_max_position_embeddings" in parameters else 64
    return {"rope_parameters": dict(parameters), "max_position_embeddings": longer}


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_and_logits_are_those_of_transformers(name, tmp_path):
    model = reference.save(tmp_path, **make_config(KINDS[name]))
    architecture, params = reference.load(tmp_path)
    inverse, factor = rope.inverse_frequencies(architecture)

    def their_frequencies():
        rotary = model.load().model.rotary_emb
        return rotary.inv_freq.numpy(), float(rotary.attention_scaling)

    expected, expected_factor = recorded.value("frequencies", their_frequencies, tmp_path)
    np.testing.assert_allclose(inverse, expected, rtol=1e-6)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    ids = reference.tokens(rows=1, length=64)  # up to the original length
    reference.assert_their_logits(reference.our_logits(architecture, params, ids), model, ids)


def test_every_kind_is_tested():
    """One is of heads of two widths only (test_wide_heads.py, and Gemma 4 in test_families.py)."""
    kinds = {parameters["rope_type"] for parameters in KINDS.values()}
    assert kinds | {"proportional"} == set(ROPE_KINDS)


def test_longest_is_where_the_frequencies_would_change():
    def longest(name):
        config = reference.SIZES | make_config(KINDS[name]) | {"model_type": "llama"}
        return rope.max_sequence_length(from_hf_config(config))

    assert longest("longrope") == 64  # beyond it transformers takes long_factor
    assert longest("dynamic") == 64  # beyond it transformers stretches the base
    assert longest("llama3") == longest("yarn") == 256


@pytest.mark.parametrize("name", KINDS)
def test_configurations_go_there_and_back(name):
    config = reference.SIZES | make_config(KINDS[name]) | {"model_type": "llama"}
    architecture = from_hf_config(config)
    written = to_hf_config(architecture)
    assert from_hf_config(written) == architecture
    assert written["rope_parameters"] == config["rope_parameters"]
    # What transformers 4 reads.
    older = {key: value for key, value in written.items() if key != "rope_parameters"}
    assert from_hf_config(older) == architecture


def test_transformers_4_spellings():
    scaling = {"type": "linear", "factor": 2.0}
    older = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling}
    architecture = from_hf_config(reference.SIZES | older)
    assert architecture.rope_theta == 5e5
    assert architecture.rope_scaling == (("factor", 2.0), ("rope_type", "linear"))
    scaling = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    phi = {"model_type": "llama", "rope_scaling": scaling, "max_position_embeddings": 512}
    assert rope.max_sequence_length(from_hf_config(reference.SIZES | phi | ORIGINAL)) == 64


def test_the_base_is_greater_than_one():
    config = reference.SIZES | {"model_type": "llama"}
    assert from_hf_config(config | {"rope_theta": 1.5}).rope_theta == 1.5
    with pytest.raises(UserError, match="rope_theta"):
        from_hf_config(config | {"rope_theta": 1})


def test_a_pair_is_turned_by_its_angle():
    """At position 2 the first pair of a head is rotated by 2, the second by 2 / 10 (base 100)."""
    architecture = from_hf_config(
        reference.SIZES | {"model_type": "llama", "head_dim": 4, "rope_theta": 100.0}
    )
    x = np.array([1.0, 0.0, 0.0, 1.0], np.float32).reshape(1, 1, 1, 4)
    turned = rope.rotate(x, *rope.rotation_tables(architecture, np.array([[2]]), 3))
    expected = [np.cos(2), -np.sin(0.2), np.sin(2), np.cos(0.2)]
    np.testing.assert_allclose(turned[0, 0, 0], expected, atol=1e-6)


def test_a_position_outside_the_table_is_seen():
    architecture = from_hf_config(reference.SIZES | {"model_type": "llama"})
    cos, _ = rope.rotation_tables(architecture, np.array([[0, 2, 3, 100, -1]]), 3)
    assert np.isfinite(cos[0, :2]).all() and np.isnan(cos[0, 2:]).all()
