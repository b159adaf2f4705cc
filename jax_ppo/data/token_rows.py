"""Rows of tokens of different lengths as one array."""

from collections.abc import Sequence

import numpy as np


def pad_token_rows(rows: Sequence[Sequence[int] | np.ndarray], width: int) -> np.ndarray:
    """Return the rows as int32 [len(rows), width], with zeros after the end of each.

    Args:
      rows: at most `width` tokens each.
      width: length of the padded rows.
    """
    padded = np.zeros((len(rows), width), np.int32)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return padded
