"""Rows of tokens become one array."""

import numpy as np

from jax_ppo.data.token_rows import pad_token_rows


def test_shorter_rows_end_with_zeros():
    padded = pad_token_rows([[5, 6, 7], np.array([8]), []], width=3)
    assert padded.dtype == np.int32
    assert padded.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
