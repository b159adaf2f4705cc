import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import losses
from jax_ppo.registries import AGGREGATIONS


@jax.jit
def policy_loss(logprobs, old, advantages, mask, *clip):
    batch = losses.padded_batch(logprobs, old, advantages, mask)
    return losses.clipped_surrogate(batch, losses.Clip(*clip))


value_loss = jax.jit(losses.value_loss)
LN2 = math.log(2)
SCALE = 10.0  # of "seq-mean-token-sum-norm"


@functools.partial(jax.jit, static_argnames="mode")
def loss_weights(lengths_B, mode):
    return losses.loss_weights(lengths_B, AGGREGATIONS[mode].function, SCALE)


policy_gradient = jax.jit(jax.grad(lambda *arguments: policy_loss(*arguments).loss.sum()))


def one_token(log_ratio, advantage, dual_clip=3.0):
    """Return the fields of PolicyLoss and d loss / d logprob of one token, clip [0.8, 1.3]."""
    arguments = (jnp.zeros(1), jnp.array([advantage]), jnp.ones(1), 0.2, 0.3, dual_clip)
    result = policy_loss(jnp.array([log_ratio]), *arguments)
    gradient = policy_gradient(jnp.array([log_ratio]), *arguments)
    return [float(x[0]) for x in result], float(gradient[0])


@pytest.mark.parametrize(
    "log_ratio, advantage, loss, clipped, dual_clipped, gradient",
    [
        # Ratio 1: loss -A, and the gradient whole although both terms are equal.
        (0.0, 2.0, -2.0, 0, 0, -2.0),
        (0.0, -2.0, 2.0, 0, 0, 2.0),
        (LN2, 1.0, -1.3, 1, 0, 0.0),  # ratio 2 > 1.3 and good: max(-2, -1.3), clipped, no gradient
        (-LN2, 1.0, -0.5, 0, 0, -0.5),  # ratio 1/2 and good: max(-0.5, -0.8), free to come back
        (LN2, -1.0, 2.0, 0, 0, 2.0),  # ratio 2 and bad: max(2, 1.3), under the ceiling 3
        (-LN2, -1.0, 0.8, 1, 0, 0.0),  # ratio 1/2 and bad: max(0.5, 0.8), clipped
        (2 * LN2, -1.0, 3.0, 0, 1, 0.0),  # ratio 4 and bad: max(4, 1.3) = 4, capped at 3
        (2 * LN2, 1.0, -1.3, 1, 0, 0.0),  # the dual clip leaves good tokens alone
    ],
)
def test_policy_loss_by_hand(log_ratio, advantage, loss, clipped, dual_clipped, gradient):
    result, slope = one_token(log_ratio, advantage)
    np.testing.assert_allclose(
        result, [loss, math.exp(log_ratio), log_ratio, clipped, dual_clipped], rtol=1e-6
    )
    np.testing.assert_allclose(slope, gradient, rtol=1e-6)


def test_dual_clip_can_be_turned_off():
    (loss, *_, dual_clipped), gradient = one_token(2 * LN2, -1.0, dual_clip=None)
    np.testing.assert_allclose([loss, dual_clipped, gradient], [4, 0, 4], rtol=1e-6)


def test_value_loss_by_hand():
    # Return 1 and clip 0.5 about an old value of 0, except in the last, where it is about 3.
    #   V =  0.2: inside, (0.2 - 1)^2 / 2 = 0.32, slope -0.8.
    #   V =  0.9: clipped to 0.5, max(0.1^2, 0.5^2) / 2 = 0.125, flagged, slope 0: it has moved
    #     far enough towards 1.
    #   V = -2:   clipped to -0.5, max(9, 2.25) / 2 = 4.5, not flagged, slope -3: a move in the
    #     wrong direction is never clipped.
    #   V =  2:   clipped to 2.5 about 3, max(1, 2.25) / 2 = 1.125, flagged.
    values, old, returns = jnp.array([0.2, 0.9, -2.0, 2.0]), jnp.array([0.0, 0, 0, 3]), jnp.ones(4)
    result = value_loss(values, old, returns, jnp.ones(4), 0.5)
    np.testing.assert_allclose(result.loss, [0.32, 0.125, 4.5, 1.125], rtol=1e-6)
    np.testing.assert_array_equal(result.clipped, [0, 1, 0, 1])
    gradient = jax.grad(lambda v: value_loss(v, old, returns, jnp.ones(4), 0.5).loss.sum())(values)
    np.testing.assert_allclose(gradient, [-0.8, 0, -3, 0], rtol=1e-6)
    plain = value_loss(values, old, returns, jnp.ones(4), None)
    np.testing.assert_allclose(plain.loss, [0.32, 0.005, 4.5, 0.5], rtol=1e-5)
    np.testing.assert_array_equal(plain.clipped, np.zeros(4))


def test_a_value_inside_the_range_is_not_flagged(rng):
    """old + clip(V - old) rounds if they are far apart, which would flag tokens inside."""
    values, returns = rng.normal(0, 0.1, (2, 500)).astype(np.float32)
    old = values + rng.uniform(-0.1, 0.1, 500).astype(np.float32)
    assert value_loss(values, old, returns, np.ones(500), 0.2).clipped.sum() == 0


def test_loss_weights_by_hand():
    # Lengths 1, 0, 3: four tokens, two samples that are there.
    lengths = jnp.array([1, 0, 3])
    np.testing.assert_allclose(loss_weights(lengths, "token-mean"), [1 / 4, 0, 1 / 4])
    np.testing.assert_allclose(loss_weights(lengths, "seq-mean-token-sum"), [1 / 2, 0, 1 / 2])
    np.testing.assert_allclose(loss_weights(lengths, "seq-mean-token-mean"), [1 / 2, 0, 1 / 6])
    np.testing.assert_allclose(
        loss_weights(lengths, "seq-mean-token-sum-norm"), [1 / 20, 0, 1 / 20]
    )
    assert all(loss_weights(lengths, mode).dtype == jnp.float32 for mode in AGGREGATIONS)


def test_a_missing_scale_is_refused():
    with pytest.raises(AssertionError, match="scale"):
        losses.loss_weights(jnp.array([1]), losses.seq_mean_token_sum_norm)


def test_shapes_that_would_broadcast_are_refused():
    zeros = jnp.zeros((2, 3))
    with pytest.raises(AssertionError, match=r"'advantages': \(2, 1\), 'mask': \(2, 3\)"):
        policy_loss(zeros, zeros, zeros[:, :1], zeros, 0.2, 0.2, None)
    with pytest.raises(AssertionError, match=r"'returns': \(3,\)"):
        value_loss(zeros, zeros, zeros[0], zeros, 0.2)


def test_bradley_terry():
    values = losses.bradley_terry(jnp.array([1.0, 0.5, -1.0]), jnp.array([0.0, 0.5, 1.0]))
    assert values.tolist() == pytest.approx(
        [math.log(1 + math.exp(-1)), math.log(2), math.log(1 + math.exp(2))]
    )


def test_large_differences_of_scores_stay_finite():
    value, slope = jax.value_and_grad(losses.bradley_terry)(jnp.float32(-1e4), jnp.float32(1e4))
    assert float(value) == 2e4 and float(slope) == -1
