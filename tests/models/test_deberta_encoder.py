"""DeBERTa computes the scores of transformers and refuses what it does not support."""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import config_sweep
import hf_reference as reference
import recorded
from jax_ppo.errors import UserError
from jax_ppo.models.deberta_encoder import (
    Deberta,
    align_distances,
    init_deberta_params,
    relative_buckets,
)
from jax_ppo.models.hf.deberta import UNUSED_FIELDS, deberta_from_hf_config
from jax_ppo.models.hf.fields import HARMLESS_FIELDS
from jax_ppo.models.hf.load import load_checkpoint, read_architecture, read_reward_architecture

V3 = {  # deberta-v3's config.json, small
    "model_type": "deberta-v2",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "pad_token_id": 0,
    "num_labels": 1,
}
CONVOLUTION = {"conv_kernel_size": 3, "conv_act": "gelu"}
VARIANTS = {"v3": {}, "v2, a convolution": CONVOLUTION}


def make(folder, shard_bytes=None, dtypes=("float32",), **changes):
    """Write a model as transformers does, with all parameters far from their initial values."""
    return recorded.write_checkpoint(
        folder,
        "DebertaV2ForSequenceClassification",
        {name: value for name, value in (V3 | changes).items() if name != "model_type"},
        std=0.2,
        dtypes=dtypes,
        shard_bytes=shard_bytes,
    )


def load(folder, dtype=jnp.float32):
    architecture = read_reward_architecture(folder)
    shapes = jax.eval_shape(lambda: init_deberta_params(Deberta(architecture), jax.random.key(0)))
    where = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
    params = load_checkpoint(folder, architecture, where, dtype, "reward")
    jax.tree.map(
        lambda shape, param: np.testing.assert_equal(param.shape, shape.shape), shapes, params
    )
    return Deberta(architecture, dtype), params


@functools.partial(jax.jit, static_argnums=0)
def scores(model, params, tokens, segments):
    return model.apply({"params": params}, tokens, segments)


def score_padded_rows(model, params, ids, lengths):
    """Return the scores of padded rows with one sequence each."""
    column = np.arange(ids.shape[1])[None]
    filled = column < np.asarray(lengths)[:, None]
    return np.asarray(scores(model, params, ids, np.where(filled, 0, -1)))[:, 0]


def theirs(checkpoint, ids, lengths=None):
    return recorded.value(
        "scores",
        lambda: live_scores(checkpoint.load(), ids, lengths),
        *(checkpoint.folder, checkpoint.dtype, ids, lengths),
    )


def live_scores(model, ids, lengths=None):
    import torch

    mask = (
        None
        if lengths is None
        else torch.from_numpy((np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]).astype(int))
    )
    with torch.no_grad():
        return (
            model(torch.from_numpy(ids.astype(np.int64)), attention_mask=mask)
            .logits.float()
            .numpy()[:, 0]
        )


IDS, LENGTHS = reference.tokens(6, 40), [40, 3, 17, 29, 1, 8]


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_are_those_of_transformers(name, tmp_path):
    """Texts are alone in a row, padded, and packed into one row."""
    model, ours = make(tmp_path, **VARIANTS[name]), load(tmp_path)
    whole, padded = theirs(model, IDS), theirs(model, IDS, LENGTHS)
    # Otherwise the comparison would be meaningless.
    assert whole.std() > 0.05 and np.abs(whole - padded).max() > 0.05
    np.testing.assert_allclose(score_padded_rows(*ours, IDS, [40] * 6), whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(score_padded_rows(*ours, IDS, LENGTHS), padded, rtol=1e-4, atol=1e-5)

    members = [2, 1, 3, 4, 5]
    row = np.concatenate([IDS[i, : LENGTHS[i]] for i in members] + [np.zeros(6, np.int32)])[None]
    segments = np.concatenate([np.full(LENGTHS[i], i) for i in members] + [np.full(6, -1)])[None]
    starts = np.cumsum([0] + [LENGTHS[i] for i in members[:-1]])
    np.testing.assert_allclose(
        scores(*ours, row, segments)[0, starts], padded[members], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("span", "longest"), [(256, 512), (8, 64), (32, 40), (6, 512)])
def test_every_distance_falls_into_the_bucket_of_transformers(span, longest):
    architecture = deberta_from_hf_config(
        V3 | {"position_buckets": span, "max_position_embeddings": longest}
    )
    distance = np.arange(-2 * longest, 2 * longest)

    def theirs():
        import torch
        from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta

        distances = torch.from_numpy(distance)
        return deberta.make_log_bucket_position(distances, span, longest).long().numpy()

    expected = recorded.value("buckets", theirs, distance, span, longest)
    np.testing.assert_array_equal(
        relative_buckets(distance, architecture), np.clip(expected + span, 0, 2 * span - 1)
    )


def test_aligning_moves_each_row_one_further():
    table = jnp.arange(3 * 6).reshape(1, 3, 6)
    expected = [[table[0, i, j - i + 2] for j in range(3)] for i in range(3)]
    np.testing.assert_array_equal(align_distances(table)[0], expected)
    np.testing.assert_array_equal(align_distances(jnp.array([[7, 8]])), [[7]])


def test_bfloat16_is_as_far_off_as_transformers_is(tmp_path):
    make(tmp_path, dtypes=("bfloat16",))
    exact, low = (
        theirs(reference.reload(tmp_path, dtype, "SequenceClassification"), IDS, LENGTHS)
        for dtype in ("float32", "bfloat16")
    )
    np.testing.assert_allclose(
        score_padded_rows(*load(tmp_path), IDS, LENGTHS), exact, rtol=1e-4, atol=1e-5
    )
    error = np.abs(score_padded_rows(*load(tmp_path, jnp.bfloat16), IDS, LENGTHS) - exact)
    assert 0 < error.mean() < 1.5 * np.abs(low - exact).mean() and error.max() < 0.1


@pytest.mark.parametrize(
    ("add", "remove", "message"),
    [
        ({}, ["classifier.weight"], "there is no classifier.weight in it: it is not a sequence-c"),
        (
            {"classifier.weight": np.zeros((2, 32), np.float32)},
            [],
            "classifier.weight has 2 labels; a reward model has num_labels",
        ),
        (
            {},
            ["deberta.encoder.layer.1.attention.self.key_proj.bias"],
            "tensor deberta.encoder.layer.1.attention.self.key_proj.bias is missing; "
            "the nearest there is",
        ),
        (
            {"deberta.encoder.conv.conv.bias": np.zeros(32, np.float32)},
            [],
            "has 1 tensors that this model would not use: deberta.encoder.conv.conv.bias",
        ),
        (
            {"pooler.dense.weight": np.zeros((32, 16), np.float32)},
            [],
            "pooler.dense.weight has shape [32, 16], config.json makes it [32, 32]",
        ),
    ],
)
def test_tensors_that_are_not_what_they_should_be(tmp_path, add, remove, message):
    make(tmp_path)
    reference.rewrite_tensors(tmp_path, add, remove)
    with pytest.raises(UserError) as caught:
        read_reward_architecture(tmp_path)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)


def test_tensors_that_change_nothing_are_ignored(tmp_path):
    make(tmp_path)
    positions = "deberta.embeddings.position_ids"
    table = "deberta.embeddings.position_embeddings.weight"
    unread = {positions: np.arange(64)[None], table: np.ones((64, 32), np.float32)}
    reference.rewrite_tensors(tmp_path, unread)
    read_reward_architecture(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_attention": False}, "relative_attention False is not supported, only True is"),
        ({"type_vocab_size": 2}, "type_vocab_size 2 is not supported, only 0 is"),
        ({"conv_kernel_size": 5}, "conv_kernel_size 5 is not supported, only 0 and 3 are"),
        (CONVOLUTION | {"conv_groups": 2}, "conv_groups 2 is not supported, only 1 is"),
        ({"conv_kernel_size": 3}, "conv_act 'tanh' is not supported, only 'gelu' is"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported, only 'gelu' is"),
        ({"pooler_hidden_act": None}, "pooler_hidden_act None is not supported, only 'gelu' is"),
        ({"pos_att_type": "p2c|p2p"}, "pos_att_type 'p2c|p2p' is not supported, only 'p2c|c2p' is"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd 'none' is not supported, only 'layer_norm' is"),
        ({"position_biased_input": True}, "position_biased_input True is not supported"),
        ({"share_att_key": False}, "share_att_key False is not supported, only True is"),
        ({"max_relative_positions": 20}, "max_relative_positions 20 is not supported, only -1 is"),
        ({"embedding_size": 24}, "embedding_size 24 is not supported, only 32 is"),
        ({"attention_head_size": 16}, "attention_head_size 16 is not supported, only 8 is"),
        ({"pooler_hidden_size": 16}, "pooler_hidden_size 16 is not supported, only 32 is"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 must divide hidden_size=32"),
        ({"position_buckets": 1}, "position_buckets=1 is not supported with distances up to 64"),
        ({"pos_att_type": 3}, "pos_att_type must be a list of strings; it is 3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4} is not supported"),
    ],
)
def test_configurations_that_are_not_supported(change, message):
    with pytest.raises(UserError) as caught:
        deberta_from_hf_config(V3 | change)
    assert message in str(caught.value) and str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("field", ["layer_norm_eps", "hidden_act", "conv_groups"])
def test_fields_that_are_left_out_have_the_defaults_of_transformers(field):
    default = getattr(transformers.DebertaV2Config(), field, 1)
    without = {name: value for name, value in (V3 | CONVOLUTION).items() if name != field}
    assert deberta_from_hf_config(without) == deberta_from_hf_config(without | {field: default})


@pytest.mark.parametrize(
    ("field", "default"),
    [("norm_rel_ebd", "none"), ("position_biased_input", True), ("share_att_key", False)],
)
def test_a_field_whose_default_is_another_model_must_not_be_left_out(field, default):
    without = {name: value for name, value in V3.items() if name != field}
    with pytest.raises(UserError, match=f"{field} {default!r} is not supported"):
        deberta_from_hf_config(without)


def test_what_is_no_reward_model(tmp_path):
    reference.save(tmp_path / "lm")
    with pytest.raises(UserError, match="there is no score.weight in it: it is not a sequence-c"):
        read_reward_architecture(tmp_path / "lm")
    reference.save(tmp_path / "decoder", "qwen2", "SequenceClassification", num_labels=1)
    assert read_reward_architecture(tmp_path / "decoder").family == "qwen2"
    make(tmp_path / "actor")
    with pytest.raises(UserError, match="model_type 'deberta-v2' is not supported, only llama"):
        read_architecture(tmp_path / "actor")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(
        UserError,
        match="model_type 'bert' is not supported for a reward model, only llama, .*deberta-v2 are",
    ):
        read_reward_architecture(tmp_path)
    named = {"architectures": ["DebertaV2ForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(V3 | named))
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(
        UserError, match=r"a pickle(.|\n)*AutoModelForSequenceClassification.from_pretrained"
    ):
        read_reward_architecture(tmp_path)


@pytest.mark.parametrize("name", ["max_position_embeddings", "embedding_size"])
def test_a_size_may_be_left_out_but_is_not_null(name):
    deberta_from_hf_config({key: value for key, value in V3.items() if key != name})
    with pytest.raises(UserError, match=name):
        deberta_from_hf_config(V3 | {name: None})


# Fields that a configuration may get by hand or from another program.
ADDED = {
    "attention_head_size": [8, 4, None],
    "conv_act": ["gelu", "nothing", None],
    "conv_groups": [1, 2, None],
    "conv_kernel_size": [0, 3, -1, None],
    "embedding_size": [32, 16, None],
    "is_causal": [True, False],
    "num_experts": [2],
    "pooler_hidden_size": [32, 16, None],
}
UNUSED_VALUES = [None, True, 0, 3, "x", []]


@pytest.mark.parity
@pytest.mark.exhaustive
def test_every_change_of_a_field_gives_equal_scores_or_a_refusal(tmp_path):
    make(tmp_path)
    ids = reference.tokens(6, 20)
    model = reference.reload(tmp_path, task="SequenceClassification")

    def their_scores():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return live_scores(model.load(), ids)

    sweep = config_sweep.Sweep(
        folder=tmp_path,
        read=deberta_from_hf_config,
        ours=lambda: np.asarray(score_padded_rows(*load(tmp_path), ids, [20] * 6)),
        theirs=their_scores,
        harmless=HARMLESS_FIELDS | UNUSED_FIELDS,
    )
    accepted, refused = sweep.run(config_sweep.change_each_field(sweep.config, sweep.config))
    assert accepted > 20 and refused > 100
    accepted, refused = sweep.run(config_sweep.add_fields(sweep.config, ADDED))
    assert accepted > 5 and refused > 10
    unread = {name: UNUSED_VALUES for name in UNUSED_FIELDS if name not in sweep.config}
    accepted, refused = sweep.run(config_sweep.add_fields(sweep.config, unread))
    assert accepted == len(unread) * len(UNUSED_VALUES) and refused == 0
