"""No two uses of random numbers in a run share a key."""

import itertools

import jax
import numpy as np
import optax
import pytest

from jax_ppo.training.optimizer import rounding_keys
from jax_ppo.training.random_streams import Stream, sample_key, training_stream


def data(key: jax.Array) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


@pytest.mark.parametrize(
    "stream", [stream for stream in Stream if stream.name.endswith("ROUNDING")]
)
def test_the_samples_of_no_draw_have_the_keys_of_a_rounding(stream):
    """The rounding of step 7 must not use the numbers of samples of step 7, in any draw."""
    step = 7
    rounding = {
        data(key)
        for key in rounding_keys(seed=0, stream=stream, opt_state=optax.ScaleByScheduleState(step))
    }
    samples = {
        data(jax.random.fold_in(sample_key(0, training_stream(draw), step), sample))
        for draw, sample in itertools.product(range(16), range(4))
    }
    assert len(samples) == 16 * 4
    assert not rounding & samples


def test_further_draws_have_streams_of_their_own():
    named = set(Stream) - {Stream.TRAINING, Stream.FURTHER_DRAWS}
    assert training_stream(0) == Stream.TRAINING
    assert not named & {training_stream(draw) for draw in range(100)}
