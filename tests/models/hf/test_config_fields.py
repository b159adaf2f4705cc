"""Each field of config.json: transformers' logits, or a refusal in one line, and nothing else."""

import copy
import json
import warnings

import pytest

import config_sweep
import hf_reference as reference
from family_variants import VARIANTS
from jax_ppo.errors import UserError
from jax_ppo.models import rope
from jax_ppo.models.hf.config import from_hf_config, text_config
from jax_ppo.models.hf.families import FAMILIES
from jax_ppo.models.hf.fields import HARMLESS_FIELDS

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "truncate": True,
}
# The first form of each family.
MODELS = {family: copy.deepcopy(changes) for family, changes in reversed(VARIANTS.values())}
# Fields that a configuration may get by hand or from another program.
ADDED = {
    "attention_bias": [False, True],
    "attention_chunk_size": [None, 4],
    "head_dim": [8, 16, 7, None],
    "is_causal": [True, False, None, "false"],
    "decoder_sparse_step": [1, 2, None],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention"], []],
    "max_window_layers": [0, 1, 5],
    "mlp_bias": [False, True],
    "mlp_only_layers": [[], [1], None],
    "norm_topk_prob": [False, True],
    "num_experts": [4, 5, None],
    "num_key_value_head": [2],
    "num_local_experts": [4, 5],
    "no_rope_layers": [[1, 0], [0, 0], [1], [0, 1, 1], [2, 1], None],
    "original_max_position_embeddings": [8, 64],
    "partial_rotary_factor": [1, 1.0, 0.5, None],
    "per_layer_config": [None, {"0": {"num_attention_heads": 2}}],
    "rope_local_base_freq": [10_000.0, 50.0],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 300.0}, {"rope_theta": 300.0}],
    "rope_scaling": [
        None,
        {},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {k: v for k, v in YARN.items() if k != "rope_theta"},
        {"rope_type": "yarn", "factor": 2.0, "finetuned": True},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"full_attention": {"rope_type": "linear", "factor": 2.0}},
    ],
    "rope_theta": [10_000.0, 10_000, 300.0, None],
    "rotary_emb_base": [10_000, 300.0, None],
    "rotary_pct": [0.25, 0.5, 1, None],
    "scale_attn_weights": [True, False],
    "n_inner": [None, 48, 16],
    "use_parallel_residual": [True, False],
    "sliding_window": [None, 5],
    "sliding_window_pattern": [2, 6],
    "use_bidirectional_attention": [None, False, True],
    "use_sliding_window": [False, True],
}
FIRST_FAMILY = next(iter(FAMILIES))
UNUSED_VALUES = [None, True, False, 0, 3, 0.5, "x", [], {}]


@pytest.fixture
def make_sweep(tmp_path):
    """Return a function that makes the sweep of a family."""
    ids = reference.tokens(rows=1, length=12)

    def theirs():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return reference.live_logits(reference.reload(tmp_path).load(), ids)

    def ours():
        architecture, params = reference.load(tmp_path)
        # Commands refuse longer sequences, for which transformers would take other frequencies.
        if rope.max_sequence_length(architecture) < ids.shape[1]:
            raise UserError("the sequence is too long")
        return reference.our_logits(architecture, params, ids)

    def make(family):
        reference.save(tmp_path, family, **MODELS[family])
        return config_sweep.Sweep(
            folder=tmp_path,
            read=from_hf_config,
            ours=ours,
            theirs=theirs,
            # The default of a missing pad_token_id may lie outside of this small vocabulary. Some
            # families of transformers fail on null, or without the size of a head.
            harmless=HARMLESS_FIELDS
            | {"pad_token_id", "use_sliding_window", "head_dim", "_sliding_window_pattern"},
        )

    return make


def make_config(family, folder):
    """Return the config.json of a family's small model, which is written to a folder."""
    reference.save(folder, family, **MODELS[family])
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_change_of_a_field_is_read_or_refused_in_one_line(family, tmp_path):
    """The slow test below also compares what is read with transformers."""
    config = make_config(family, tmp_path)
    refused = []
    for cases in (
        config_sweep.change_each_field(config, config),
        config_sweep.add_fields(config, ADDED),
    ):
        for description, changed in cases:
            try:
                hash(from_hf_config(changed))
            except UserError as error:
                refused.append(description)
                assert "\n" not in str(error) and len(str(error)) < 450
    assert len(refused) > 200
    layers, width = reference.fields(family, dict.fromkeys(("num_hidden_layers", "hidden_size")))
    assert {f"{layers}=100000000", "tie_word_embeddings='x'"} <= set(refused)
    assert {"is_causal=False", "rope_theta=None", f"{width}='missing'"} <= set(refused)


def with_notes(value):
    """Return a section of config.json with notes of transformers in it and in its sections."""
    notes = {"_model_name_or_path": "model.gguf", "_": None, "_factor": {"factor": 2.0}}
    return notes | {
        name: with_notes(entry) if isinstance(entry, dict) else entry
        for name, entry in value.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_with_a_leading_underscore_are_notes_of_transformers_in_every_section(
    family, tmp_path
):
    config = make_config(family, tmp_path)
    assert from_hf_config(with_notes(config)) == from_hf_config(config)
    multimodal = {"model_type": "llava", "text_config": config, "_x": 1}
    assert from_hf_config(text_config(with_notes(multimodal))) == from_hf_config(config)
    with pytest.raises(UserError, match="x_ is an unknown field"):
        from_hf_config(config | {"x_": 1})


def test_the_older_of_two_widths_of_an_mlp_counts(tmp_path):
    """As in transformers' LFM2; vendors write both names."""
    config = make_config("lfm2", tmp_path) | {"block_auto_adjust_ff_dim": False}
    for more, width in (({}, config["intermediate_size"]), ({"block_ff_dim": 64}, 64)):
        assert from_hf_config(config | more).intermediate_size == width


# The exhaustive suite changes all fields of every family (below).
@pytest.mark.parity
@pytest.mark.slow
def test_changes_of_a_plain_decoders_fields_give_equal_logits_or_a_refusal(make_sweep):
    sweep = make_sweep(FIRST_FAMILY)
    accepted, refused = sweep.run(config_sweep.change_each_field(sweep.config, sweep.config))
    assert accepted and refused


@pytest.mark.parity
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_change_of_a_field_gives_equal_logits_or_a_refusal(family, make_sweep):
    sweep = make_sweep(family)
    accepted, refused = sweep.run(config_sweep.change_each_field(sweep.config, sweep.config))
    assert accepted > 50 and refused > 100
    accepted, refused = sweep.run(config_sweep.add_fields(sweep.config, ADDED))
    assert accepted > 10 and refused > 10


@pytest.mark.parity
@pytest.mark.exhaustive
def test_fields_that_are_not_read_change_nothing_in_transformers_either(make_sweep):
    sweep = make_sweep("llama")
    unread = {name: UNUSED_VALUES for name in HARMLESS_FIELDS if name not in sweep.config}
    accepted, refused = sweep.run(config_sweep.add_fields(sweep.config, unread))
    assert accepted == len(unread) * len(UNUSED_VALUES) and refused == 0
