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
        (
            0.0,
            2.0,
            -2.0,
            0,
            0,
            -2.0,
        ),  # ratio 1: loss -A, and the gradient whole although both terms are equal
        (0.0, -2.0, 2.0, 0, 0, 2.0),
        (LN2, 1.0, -1.3, 1, 0, 0.0),  # ratio 2 > 1.3 and good: max(-2, -1.3), clipped, no gradient
        (
            -LN2,
            1.0,
            -0.5,
            0,
            0,
            -0.5,
        ),  # ratio 1/2 < 0.8 and good: max(-0.5, -0.8), free to come back
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


def test_policy_loss_against_loops(rng, poison):
    shape = (5, 8)
    mask = rng.integers(0, 2, shape)
    logprobs, old = -rng.exponential(1.0, (2, *shape)).astype(np.float32)
    advantages = rng.normal(0, 1, shape).astype(np.float32)
    result = policy_loss(
        *(poison(x, mask) for x in (logprobs, old, advantages)), mask, 0.2, 0.28, 1.5
    )
    assert all(x.dtype == jnp.float32 for x in result)
    seen = set()
    for i in range(shape[0]):
        for j in range(shape[1]):
            expected = (0, 1, 0, 0, 0)
            if mask[i, j]:
                a, log_ratio = float(advantages[i, j]), float(logprobs[i, j]) - float(old[i, j])
                ratio = math.exp(log_ratio)
                surrogate = min(ratio * a, max(0.8, min(1.28, ratio)) * a)
                loss = min(-surrogate, 1.5 * -a) if a < 0 else -surrogate
                flags = (surrogate < ratio * a - 1e-9, loss < -surrogate - 1e-9)
                expected = (loss, ratio, log_ratio, *flags)
                seen.add(flags)
            np.testing.assert_allclose([x[i, j] for x in result], expected, rtol=1e-4, atol=1e-6)
    assert seen == {(False, False), (True, False), (False, True)}


def test_log_ratio_overflow():
    """exp(89) is inf in float32, and inf * 0 in the gradient is NaN."""
    for log_ratio in (1000.0, -1000.0):
        for advantage in (1.0, -1.0):
            for dual_clip in (3.0, None):
                (loss, ratio, clamped, *_), gradient = one_token(log_ratio, advantage, dual_clip)
                assert clamped == math.copysign(20, log_ratio)
                np.testing.assert_allclose(ratio, math.exp(clamped), rtol=1e-5)
                assert math.isfinite(loss) and gradient == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_nan_is_not_dropped(advantage):
    """fmin and fmax would take the other operand and train on it."""
    result, _ = one_token(math.nan, advantage)
    assert math.isnan(result[0])
    result, _ = one_token(0.1, advantage * math.nan)
    assert math.isnan(result[0])


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


def test_hubers_loss_by_hand():
    # Return 1 and delta 0.5.
    #   V = 0.6: inside, 0.4^2 / 2 = 0.08, and the slope is the error, -0.4.
    #   V = 3: 0.5 (2 - 0.25) = 0.875, slope 0.5.
    #   V = -1: the same, slope -0.5.
    values, returns = jnp.array([0.6, 3.0, -1.0]), jnp.ones(3)
    total = lambda v, *clip: value_loss(v, jnp.zeros(3), returns, jnp.ones(3), *clip, 0.5).loss  # noqa: E731
    np.testing.assert_allclose(total(values, None), [0.08, 0.875, 0.875], rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda v: total(v, None).sum())(values), [-0.4, 0.5, -0.5], rtol=1e-6
    )
    # Clipped to 0.2 around 0: V = 0.2 for the first two, both with 0.5 (0.8 - 0.25) = 0.275. The
    # first takes that loss, without a slope; the second has a larger loss unclipped and keeps its
    # slope, as does the third.
    np.testing.assert_allclose(total(values, 0.2), [0.275, 0.875, 0.875], rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda v: total(v, 0.2).sum())(values), [0, 0.5, -0.5], rtol=1e-6
    )


@pytest.mark.parametrize("huber_delta", [None, 0.4])
@pytest.mark.parametrize("clip", [0.3, None])
def test_value_loss_against_loops(clip, huber_delta, rng, poison):
    def h(e):
        return (
            e**2 / 2
            if huber_delta is None or abs(e) <= huber_delta
            else huber_delta * (abs(e) - huber_delta / 2)
        )

    mask = rng.integers(0, 2, (4, 7))
    values, old, returns = rng.normal(0, 1, (3, 4, 7)).astype(np.float32)
    result = value_loss(*(poison(x, mask) for x in (values, old, returns)), mask, clip, huber_delta)
    assert all(x.dtype == jnp.float32 for x in result)
    for i in range(4):
        for j in range(7):
            v, o, r = float(values[i, j]), float(old[i, j]), float(returns[i, j])
            plain = h(v - r)
            near = plain if clip is None else h(max(o - clip, min(o + clip, v)) - r)
            expected = (max(plain, near), near > plain) if mask[i, j] else (0, 0)
            np.testing.assert_allclose([x[i, j] for x in result], expected, rtol=1e-4, atol=1e-6)


def test_a_value_inside_the_range_is_not_flagged(rng):
    """old + clip(V - old) rounds if they are far apart, which would flag tokens inside."""
    values, returns = rng.normal(0, 0.1, (2, 500)).astype(np.float32)
    old = values + rng.uniform(-0.1, 0.1, 500).astype(np.float32)
    assert value_loss(values, old, returns, np.ones(500), 0.2).clipped.sum() == 0


def total_policy_loss(logprobs, old, advantages, mask, weights_B):
    return jnp.sum(
        weights_B[:, None] * policy_loss(logprobs, old, advantages, mask, 0.2, 0.2, 3.0).loss
    )


def total_value_loss(values, old, returns, mask, weights_B):
    return jnp.sum(weights_B[:, None] * value_loss(values, old, returns, mask, 0.2).loss)


WITH_GRADIENTS = [
    jax.jit(jax.value_and_grad(total, (0, 1, 2))) for total in (total_policy_loss, total_value_loss)
]


@pytest.mark.parametrize("value_and_grad", WITH_GRADIENTS, ids=("policy", "value"))
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_all_masked_batch_gives_loss_zero_and_gradient_zero(value_and_grad, mode):
    """All samples are truncated and filtered out."""
    nan, mask = jnp.full((3, 4), jnp.nan), jnp.zeros((3, 4))
    weights_B = loss_weights(mask.sum(1).astype(jnp.int32), mode)
    np.testing.assert_array_equal(weights_B, np.zeros(3))
    loss, gradients = value_and_grad(nan, nan, nan, mask, weights_B)
    assert loss == 0
    np.testing.assert_array_equal(gradients, np.zeros((3, 3, 4)))


@pytest.mark.parametrize("value_and_grad", WITH_GRADIENTS, ids=("policy", "value"))
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(value_and_grad, rng, poison):
    mask = (np.arange(6) < np.array([[6], [2], [0]])).astype(np.int32)
    clean = [jnp.asarray(x) for x in rng.normal(0, 0.05, (3, 3, 6)).astype(np.float32)]
    dirty = [jnp.asarray(poison(np.asarray(x), mask)) for x in clean]
    weights_B = loss_weights(mask.sum(1), "token-mean")
    clean_loss, clean_gradients = value_and_grad(*clean, mask, weights_B)
    dirty_loss, dirty_gradients = value_and_grad(*dirty, mask, weights_B)
    assert dirty_loss == clean_loss != 0
    for d, c in zip(dirty_gradients, clean_gradients, strict=True):
        np.testing.assert_array_equal(d, c)
    assert np.all(dirty_gradients[0][mask == 1] != 0) and not np.any(dirty_gradients[0][mask == 0])


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


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_loss_weights_against_loops(mode, rng):
    lengths = np.array([5, 1, 0, 7, 3, 7, 0, 2])
    losses = rng.normal(0, 1, (8, 7))
    mask = np.arange(7) < lengths[:, None]
    rows = [list(losses[i, : lengths[i]]) for i in range(8) if lengths[i]]
    expected = {
        "token-mean": np.mean(sum(rows, [])),
        "seq-mean-token-sum": np.mean([sum(row) for row in rows]),
        "seq-mean-token-mean": np.mean([np.mean(row) for row in rows]),
        "seq-mean-token-sum-norm": np.mean([sum(row) for row in rows]) / SCALE,
    }[mode]
    total = jnp.sum(loss_weights(jnp.asarray(lengths), mode)[:, None] * jnp.where(mask, losses, 0))
    np.testing.assert_allclose(total, expected, rtol=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_sum_over_any_split_equals_the_whole(mode, rng):
    """Micro-batches change neither the loss nor its gradient, unlike a mean of token means."""
    lengths = np.array([1, 8, 2, 8, 0, 3, 5, 1])
    mask = (np.arange(8) < lengths[:, None]).astype(np.int32)
    logprobs, old, advantages = rng.normal(0, 0.3, (3, 8, 8)).astype(np.float32)
    weights_B = loss_weights(jnp.asarray(lengths), mode)
    batch = (logprobs, old, advantages, mask, weights_B)
    whole, (gradient, *_) = WITH_GRADIENTS[0](*batch)
    order = rng.permutation(8)
    for cuts in ([4], [1], [1, 2, 3, 4, 5, 6, 7]):
        parts = [WITH_GRADIENTS[0](*(x[piece] for x in batch)) for piece in np.split(order, cuts)]
        np.testing.assert_allclose(sum(loss for loss, _ in parts), whole, rtol=1e-5)
        np.testing.assert_allclose(
            np.concatenate([g for _, (g, *_) in parts]), gradient[order], rtol=1e-5
        )


def test_a_missing_scale_is_refused():
    with pytest.raises(AssertionError, match="scale"):
        losses.loss_weights(jnp.array([1]), losses.seq_mean_token_sum_norm)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(AssertionError, match=r"'advantages': \(2, 1\), 'mask': \(2, 3\)"):
        policy_loss(
            jnp.zeros((2, 3)),
            jnp.zeros((2, 3)),
            jnp.zeros((2, 1)),
            jnp.ones((2, 3)),
            0.2,
            0.2,
            None,
        )
    with pytest.raises(AssertionError, match=r"'returns': \(3,\)"):
        value_loss(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros(3), jnp.ones((2, 3)), 0.2)
