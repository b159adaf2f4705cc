import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels.masked_statistics import empty_moments, update_moments
from jax_ppo.ppo.reward_shaping import normalize_scores, soft_overlong_penalty


def test_soft_overlong_penalty_by_hand():
    # At most 20, buffer 8, factor 2: 0 up to 12; then 1/4 per token: -0.25 for 13, half of 2 for
    # 16, all of it for 20, and no more.
    penalty = jax.jit(soft_overlong_penalty, static_argnums=(1, 2, 3))(
        jnp.array([0, 12, 13, 16, 20, 25]), 20, 8, 2.0
    )
    assert penalty.dtype == jnp.float32
    np.testing.assert_array_equal(penalty, [0, 0, -0.25, -1, -2, -2])


@pytest.mark.parametrize("buffer", [0, -1, 21])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(AssertionError, match="buffer"):
        soft_overlong_penalty(jnp.array([1]), 20, buffer, 1.0)


def test_normalised_by_hand():
    # Seen: (1, 3, 8), mean 4, std sqrt(26/3) = 2.944. Scores 4 and 10.
    seen = update_moments(empty_moments(), jnp.array([1.0, 3, 8]), jnp.ones(3))
    scores = jnp.array([4, 10])
    np.testing.assert_allclose(
        normalize_scores(scores, seen, shift=True), [0, 6 / 2.94392], atol=1e-6, rtol=1e-5
    )
    np.testing.assert_allclose(
        normalize_scores(scores, seen, shift=False), [4 / 2.94392, 10 / 2.94392], rtol=1e-5
    )


def test_without_spread_scores_stay_what_they_are():
    seen = update_moments(empty_moments(), jnp.full(9, 0.1), jnp.ones(9))
    np.testing.assert_array_equal(
        normalize_scores(jnp.array([0.1, 1]), seen, shift=False), np.array([0.1, 1], np.float32)
    )
    np.testing.assert_allclose(
        normalize_scores(jnp.array([0.1, 1]), seen, shift=True), [0, 0.9], atol=1e-6
    )
