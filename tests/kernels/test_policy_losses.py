"""Every policy loss by hand; test_enumeration.py has their expectations."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike

from jax_ppo.kernels.losses import Clip, PolicyBatch, PolicyLoss, SequenceSum, padded_batch, row_sum
from jax_ppo.registries import POLICY_LOSSES, inputs_named

LN2, ROOT2, CLIP = math.log(2), math.sqrt(2), Clip(0.2, 0.3, 3.0)


@functools.partial(jax.jit, static_argnames=("name", "clip", "pack"))
def loss_and_gradients(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    mask: jax.Array,
    weights: jax.Array,
    name: str,
    clip: Clip,
    pack: Callable[..., tuple[PolicyBatch, SequenceSum]],
) -> tuple[PolicyLoss, tuple[jax.Array, ...]]:
    """Compute the loss and the gradients of its weighted sum to the three arrays."""

    def compute(arrays: tuple[jax.Array, ...]) -> PolicyLoss:
        batch, sequence_sum = pack(*arrays, mask)
        function = POLICY_LOSSES[name].function
        inputs = {"batch": batch, "clip": clip, "sequence_sum": sequence_sum}
        return function(**inputs_named(function, inputs))

    return compute(arrays), jax.grad(lambda x: (compute(x).loss * weights).sum())(arrays)


def pad(*arrays: jax.Array) -> tuple[PolicyBatch, SequenceSum]:
    return padded_batch(*arrays), row_sum


def run(
    name: str,
    logprobs: ArrayLike,
    old: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    pack: Callable[..., tuple[PolicyBatch, SequenceSum]] = pad,
) -> tuple[PolicyLoss, list[np.ndarray]]:
    """Return the PolicyLoss and the gradients of its weighted sum.

    The gradients are those to logprobs, old_logprobs and advantages; weights differ by position.
    Calls with the same loss and shapes share a program.
    """
    arrays = tuple(jnp.asarray(np.asarray(x, np.float32)) for x in (logprobs, old, advantages))
    weights = 1 + np.arange(arrays[0].shape[-1], dtype=np.float32)
    mask = np.asarray(mask)
    result, gradients = loss_and_gradients(arrays, mask, weights, name=name, clip=CLIP, pack=pack)
    assert all(x.dtype == jnp.float32 for x in result)
    return result, [np.asarray(g) / weights for g in gradients]


@pytest.mark.parametrize(
    "name, advantage, loss, gradient, ratio, clipped",
    [
        # A response of two tokens, the first of which became twice as likely: rho = 2 and 1,
        # their geometric mean sqrt(2).
        ("vanilla", 1.0, (-1.3, -1), (0, -1), (2, 1), (1, 0)),
        ("vanilla", -1.0, (2, 1), (2, 1), (2, 1), (0, 0)),
        ("importance", 1.0, (-2, -1), (-2, -1), (2, 1), (0, 0)),
        ("importance", -1.0, (2, 1), (2, 1), (2, 1), (0, 0)),
        # sqrt(2) > 1.3: the whole response is clipped.
        ("gspo", 1.0, (-1.3, -1.3), (0, 0), (ROOT2, ROOT2), (1, 1)),
        ("gspo", -1.0, (ROOT2, ROOT2), (ROOT2, ROOT2), (ROOT2, ROOT2), (0, 0)),
        # log rho = (ln 2, 0) cut to (0.3, 0), mean 0.15: the second token keeps its gradient.
        ("gmpo", 1.0, (-math.exp(0.15),) * 2, (0, -math.exp(0.15)), (math.exp(0.15),) * 2, (1, 0)),
        ("gmpo", -1.0, (ROOT2, ROOT2), (ROOT2, ROOT2), (ROOT2, ROOT2), (0, 0)),
        # -weight A log pi, weight 2 cut to 1.3 and yet with a gradient; log pi = ln 2 - 2 and -2.
        ("cispo", 1.0, (-1.3 * (LN2 - 2), 2), (-1.3, -1), (2, 1), (1, 0)),
        ("cispo", -1.0, (1.3 * (LN2 - 2), -2), (1.3, 1), (2, 1), (1, 0)),
        ("reinforce", 1.0, (2 - LN2, 2), (-1, -1), (2, 1), (0, 0)),
        ("reinforce", -1.0, (LN2 - 2, -2), (1, 1), (2, 1), (0, 0)),
    ],
)
def test_by_hand(name, advantage, loss, gradient, ratio, clipped):
    result, (slope, *_) = run(name, [[LN2 - 2, -2]], [[-2, -2]], [[advantage] * 2], np.ones((1, 2)))
    np.testing.assert_allclose(result.loss, [loss], rtol=1e-6)
    np.testing.assert_allclose(slope, [gradient], rtol=1e-6)
    np.testing.assert_allclose(result.ratio, [ratio], rtol=1e-6)
    # Of the token, whatever the ratio is of.
    np.testing.assert_allclose(result.log_ratio, [(LN2, 0)], rtol=1e-6)
    np.testing.assert_array_equal(result.clipped, [clipped])
    np.testing.assert_array_equal(result.dual_clipped, 0)
    # Without an advantage, no clip removes a gradient.
    unrewarded, _ = run(name, [[-4, -2]], [[-2, -2]], [[0, 0]], np.ones((1, 2)))
    assert name == "cispo" or not unrewarded.clipped.any()


def test_dual_clip_of_a_whole_response():
    """rho = 16 and 1, s = 4 > 3, A < 0: gspo caps at 3, like vanilla for one token of ratio 4."""
    result, (slope, *_) = run("gspo", [[4 * LN2 - 4, -4]], [[-4, -4]], [[-1, -1]], np.ones((1, 2)))
    np.testing.assert_allclose(result.loss, [[3, 3]])
    np.testing.assert_array_equal(result.dual_clipped, 1)
    np.testing.assert_array_equal(slope, 0)
    for name, loss in (("vanilla", 3), ("importance", 16), ("gmpo", 4), ("reinforce", 4 * LN2 - 4)):
        result, _ = run(name, [[4 * LN2 - 4, -4]], [[-4, -4]], [[-1, -1]], np.ones((1, 2)))
        np.testing.assert_allclose(result.loss[0, 0], loss, rtol=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_two_responses_packed_into_a_row_are_as_two_rows(name, rng):
    old = -rng.exponential(2.0, (2, 4)).astype(np.float32)
    logprobs = old + rng.normal(0, 0.4, (2, 4)).astype(np.float32)
    advantages = rng.normal(0, 1, (2, 4)).astype(np.float32)
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    segment = jnp.array([0, 0, 0, 0, 1, 1, 1, 1])

    def packed_batch(logprobs, old, advantages, mask):
        def sequence_sum(x):
            return jax.ops.segment_sum(x[0], segment, 2)[segment][None]

        return PolicyBatch(logprobs, old, advantages, mask, sequence_sum(mask)), sequence_sum

    result, (slope, *_) = run(name, logprobs, old, advantages, mask)
    packed, (packed_slope, *_) = run(
        name, *(x.reshape(1, 8) for x in (logprobs, old, advantages, mask)), pack=packed_batch
    )
    for x, y in zip((*result, slope), (*packed, packed_slope), strict=True):
        np.testing.assert_allclose(
            np.asarray(x)[mask == 1], np.asarray(y).reshape(2, 4)[mask == 1], rtol=1e-5
        )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_nan_that_counts_shows(name):
    for arrays in (
        ([[math.nan, -1]], [[-1, -1]], [[1, 1]]),
        ([[-1, -1]], [[-1, -1]], [[math.nan, 1]]),
    ):
        assert np.isnan(run(name, *arrays, np.ones((1, 2)))[0].loss[0, 0])
