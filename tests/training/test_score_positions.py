"""The token at which a decoder's score of a sequence is read."""

import numpy as np

from jax_ppo.training import forward
from jax_ppo.types import Sequences


def sequences(rows):
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), 6), np.int32)
    for target, row in zip(tokens, rows, strict=True):
        target[: len(row)] = row
    return Sequences(tokens, np.ones_like(lengths), lengths - 1, None, None)


def test_trailing_pad_tokens_of_a_sequence_are_skipped():
    """A pad token within the sequence is not; a sequence of nothing else is read at its start."""
    rows = sequences([[5, 6, 7], [5, 6, 1], [5, 1, 6, 1, 1], [1, 1], [5, 0, 0]])
    assert forward.score_positions(rows, pad_id=1).tolist() == [2, 1, 2, 0, 2]
    assert forward.score_positions(rows, pad_id=0).tolist() == [2, 2, 4, 1, 0]
    assert forward.score_positions(rows, pad_id=None).tolist() == [2, 2, 4, 1, 2]
