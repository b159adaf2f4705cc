"""Plans contain every sample once and undivided; gather and scatter are inverse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.training import packing
from jax_ppo.types import Packing, Sequences


def test_best_fit_decreasing_by_hand():
    # Lengths 5, 4, 3, 3, 1 in rows of 8, longest first: 5 opens row 0 (3 left); 4 opens row 1 (4
    # left); 3 goes into the fullest row, row 0 (0 left); the next 3 into row 1 (1 left); 1 into row
    # 1 (0 left).
    assert packing.assign_to_rows([5, 4, 3, 3, 1], 8, packed=True) == [[0, 2], [1, 3, 4]]


def test_unpacked_gives_each_sample_a_row():
    assert sorted(packing.assign_to_rows([5, 4, 3], 8, packed=False)) == [[0], [1], [2]]


def test_rows_at_once():
    assert packing.rows_per_micro_batch(None, 1024, samples=256, shards=1) == 8  # 8,192 tokens
    # A sixteenth of the samples.
    assert packing.rows_per_micro_batch(None, 1024, samples=32, shards=1) == 2
    assert packing.rows_per_micro_batch(None, 1024, samples=4, shards=1) == 1
    # A quarter of the samples: at most 1,024 tokens.
    assert packing.rows_per_micro_batch(None, 128, samples=32, shards=1) == 8
    assert packing.rows_per_micro_batch(None, 144, samples=32, shards=1) == 7
    # Half of the samples: at most 512 tokens.
    assert packing.rows_per_micro_batch(None, 128, samples=8, shards=1) == 4
    assert packing.rows_per_micro_batch(None, 128, samples=12, shards=1) == 4
    assert packing.rows_per_micro_batch(None, 16, samples=48, shards=1) == 24
    assert packing.rows_per_micro_batch(None, 512, samples=8, shards=1) == 2
    assert packing.rows_per_micro_batch(8, 1024, samples=4, shards=1) == 4
    assert packing.rows_per_micro_batch(3, 1024, samples=64, shards=4) == 12
    assert packing.rows_per_micro_batch(None, 100_000, samples=64, shards=2) == 2


def test_rows_at_once_where_each_micro_batch_gathers_the_weights():
    """8,192 tokens instead of a sixteenth of the samples, but no more than a quarter of them."""
    at_once = functools.partial(packing.rows_per_micro_batch, has_fixed_cost=True)
    assert at_once(None, 1024, samples=64, shards=1) == 8
    assert packing.rows_per_micro_batch(None, 1024, samples=64, shards=1) == 4
    assert at_once(None, 1024, samples=16, shards=1) == 4
    assert at_once(None, 768, samples=8 * 64, shards=8) == 8 * 10
    assert at_once(3, 1024, samples=64, shards=4) == 12


def make_rows():
    # Two samples in one row of 8: sample 1 has prompt (10, 11) and response (12,); sample 0 has
    # prompt (20,) and response (21, 22).
    sequences = Sequences(
        jnp.array([[20, 21, 22, 0], [10, 11, 12, 0]]),
        jnp.array([1, 2]),
        jnp.array([2, 1]),
        jnp.zeros(2, bool),
        jnp.array([[True, True, False], [True, False, False]]),
    )
    packed_rows = Packing(
        jnp.array([[1, 1, 1, 0, 0, 0, -1, -1]]), jnp.array([[0, 1, 2, 0, 1, 2, 0, 0]])
    )
    return packing.gather_rows(sequences, packed_rows)


def test_parts_of_rows_have_mirrored_blocks_of_columns():
    """Rows of 8 in 2 parts: blocks of 2 columns, the first and the last of them together."""
    columns = np.broadcast_to(np.arange(8), (1, 4, 8))
    rows = np.broadcast_to(np.arange(4)[:, None], (1, 4, 8))
    split = packing.split_columns(Packing(sample=rows, position=columns), shards=2, parts=2)
    # Two groups of two devices: the first group has rows 0 and 1, in two parts each.
    assert split.sample[0].tolist() == [[row] * 4 for row in (0, 1, 0, 1, 2, 3, 2, 3)]
    outer, inner = [0, 1, 6, 7], [2, 3, 4, 5]
    assert split.position[0].tolist() == [outer, outer, inner, inner] * 2
    # Tokens read themselves and those before: both parts have 18 of the 36 pairs.
    assert sum(x + 1 for x in outer) == sum(x + 1 for x in inner) == 18


def test_gather_by_hand():
    rows = make_rows()
    assert rows.tokens.tolist() == [[10, 11, 12, 20, 21, 22, 0, 0]]
    # The position before a response token predicts it: 11 -> 12, 20 -> 21, 21 -> 22.
    assert rows.mask.tolist() == [[False, True, False, True, True, False, False, False]]
    assert rows.targets.tolist() == [[0, 12, 0, 21, 22, 0, 0, 0]]
    assert rows.steps.tolist() == [[0, 0, 0, 0, 1, 0, 0, 0]]


def test_scatter_undoes_gather_and_leaves_the_rest():
    rows = make_rows()
    values = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert packing.to_rows(values, rows).tolist() == [[0, 4, 0, 1, 2, 0, 0, 0]]
    back = packing.to_samples(packing.to_rows(values, rows), rows, jnp.full((2, 3), -9.0))
    assert back.tolist() == [[1, 2, -9], [4, -9, -9]]


def test_sums_over_a_response_stand_at_each_of_its_tokens():
    values = jnp.array([[9.0, 5.0, 9.0, -1.0, -2.0, 9.0, 9.0, 9.0]])
    assert packing.sample_sums(values, make_rows(), 2).tolist() == [[0, 5, 0, -3, -3, 0, 0, 0]]


def test_a_sample_that_fills_the_row_and_the_sequence():
    sequences = Sequences(
        jnp.array([[5, 6, 7]]),
        jnp.array([2]),
        jnp.array([1]),
        jnp.zeros(1, bool),
        jnp.ones((1, 1), bool),
    )
    packed_rows, _ = packing.pack_samples([3], [[0]], 1, 3)
    rows = packing.gather_rows(sequences, jax.tree.map(lambda x: jnp.asarray(x[0, 0]), packed_rows))
    assert rows.targets.tolist() == [[0, 7, 0]] and rows.mask.tolist() == [[False, True, False]]


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_the_width_of_a_split_row_is_that_of_its_parts(parts):
    assert packing.row_width(1000, parts) == parts * packing.row_width(-(-1000 // parts))


def test_rows_have_few_widths():
    widths = [packing.row_width(longest) for longest in range(1, 5000)]
    assert all(width >= longest and width % 128 == 0 for longest, width in enumerate(widths, 1))
    assert sorted(set(widths)) == [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
