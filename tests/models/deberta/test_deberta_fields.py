"""Each field of a DeBERTa's config.json: transformers' scores, or a refusal in one line."""

import warnings

import numpy as np
import pytest
from test_deberta import live_scores, load, make, score_padded_rows

import config_sweep
import hf_reference as reference
from jax_ppo.models.deberta.architecture import UNUSED_FIELDS, deberta_from_hf_config
from jax_ppo.models.hf.fields import HARMLESS_FIELDS

IDS = reference.tokens(6, 20)
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

    def their_scores():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return live_scores(
                reference.reload(tmp_path, task="SequenceClassification").load(), IDS
            )

    sweep = config_sweep.Sweep(
        folder=tmp_path,
        read=deberta_from_hf_config,
        ours=lambda: np.asarray(score_padded_rows(*load(tmp_path), IDS, [20] * 6)),
        theirs=their_scores,
        harmless=HARMLESS_FIELDS | UNUSED_FIELDS,
    )
    accepted, refused = sweep.run(config_sweep.change_each_field(sweep.config, sweep.config))
    assert accepted > 50 and refused > 100
    accepted, refused = sweep.run(config_sweep.add_fields(sweep.config, ADDED))
    assert accepted > 5 and refused > 10
    unread = {name: UNUSED_VALUES for name in UNUSED_FIELDS if name not in sweep.config}
    accepted, refused = sweep.run(config_sweep.add_fields(sweep.config, unread))
    assert accepted == len(unread) * len(UNUSED_VALUES) and refused == 0
