"""Each shard of rows runs a function of only its rows, in loops of only its length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.runtime.parallelism.rows import split_rows


def count_down(params, rows, starts, key, any_shard=None):
    """Return how often each row was counted down, and how often its shard went round the loop."""
    del params, rows, key
    goes_on = any_shard or (lambda condition: condition)

    def step(state):
        left, counted, rounds = state
        return jnp.maximum(left - 1, 0), counted + (left > 0), rounds + 1

    state = (starts, jnp.zeros_like(starts), jnp.zeros_like(starts))
    _, counted, rounds = jax.lax.while_loop(lambda s: goes_on(jnp.any(s[0] > 0)), step, state)
    return counted, rounds


@pytest.mark.parametrize(
    ("shape", "rounds"),
    [
        # Each shard ends when its own rows have.
        ({"data": 8}, [1, 2, 3, 4, 5, 6, 7, 8]),
        # The devices of `model` meet in each matrix product, so all shards go on together.
        ({"data": 4, "model": 2}, [8] * 8),
    ],
    ids=str,
)
def test_loops_end_with_their_own_rows_unless_devices_must_meet(shape, rounds):
    starts = np.arange(1, 9, dtype=np.int32)
    key = jax.random.key(0)
    with jax.set_mesh(tiny.make_mesh(8, **shape)):
        counted, went_round = jax.jit(split_rows(count_down))({}, starts, starts, key)
    np.testing.assert_array_equal(counted, starts)
    np.testing.assert_array_equal(went_round, rounds)


def test_without_a_mesh_all_rows_are_one_shard():
    starts = np.arange(1, 4, dtype=np.int32)
    counted, went_round = split_rows(count_down)({}, starts, starts, jax.random.key(0))
    np.testing.assert_array_equal(counted, starts)
    np.testing.assert_array_equal(went_round, [3, 3, 3])
