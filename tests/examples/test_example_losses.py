"""The policy losses in examples/losses/ by hand and in expectation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enumerate_policy import Enumerated
from jax_ppo.kernels.losses import Clip, MiniBatchTokens, padded_batch

LN2, CLIP = math.log(2), Clip(0.2, 0.3, 3.0)
LOSSES = {
    "sapo": "losses/sapo",
    "dppo_tv": "losses/dppo",
    "dppo_kl": "losses/dppo",
    "clip_cov": "losses/clip_cov",
    "kl_cov": "losses/kl_cov",
}


@pytest.fixture
def run(example):
    """Return a function from arrays to the PolicyLoss and the gradient to the log-probs."""

    def run(name, logprobs, old, advantages, mask, clip=CLIP):
        logprobs, old, advantages = (
            jnp.asarray(np.asarray(x, np.float32)) for x in (logprobs, old, advantages)
        )
        mask = jnp.asarray(mask) == 1
        function = getattr(example(LOSSES[name]), name)
        others = {}
        if name.endswith("cov"):
            others = {
                "mini_batch": MiniBatchTokens(old, advantages, mask),
                "to_rows": lambda x: x * 1.0,
            }

        def loss(logprobs):
            return function(padded_batch(logprobs, old, advantages, mask), clip, **others)

        return loss(logprobs), jax.grad(lambda x: loss(x).loss.sum())(logprobs)

    return run


@pytest.mark.parametrize(
    "name, advantage, loss, gradient",
    [
        # A response of two tokens, the first of which became twice as likely: rho = 2 and 1. The
        # gate at rho = 2 is 4 sigmoid(1) = 2.924 with tau = 1, its slope in log rho
        # 2 * 4 sigmoid(1) sigmoid(-1) = 1.573; at rho = 1 it is 4 / 2 with slope 1.
        ("sapo", 1.0, (-2.9242343, -2), (-1.5728955, -1)),
        ("sapo", -1.0, (2.8219996, 2 / 1.05), (1.5362196, 1)),
        # From 0.135 to 0.271: neither divergence exceeds 0.2 or 0.3.
        ("dppo_tv", 1.0, (-2, -1), (-2, -1)),
        ("dppo_kl", -1.0, (2, 1), (2, 1)),
        # All covariances are 0: clip_cov leaves nothing out; kl_cov penalizes the first token, with
        # ln 2 and the slope 1.
        ("clip_cov", 1.0, (-1.3, -1), (0, -1)),
        ("kl_cov", 1.0, (LN2 - 2, -1), (-1, -1)),
    ],
)
def test_by_hand(run, name, advantage, loss, gradient):
    result, slope = run(name, [[LN2 - 2, -2]], [[-2, -2]], [[advantage] * 2], np.ones((1, 2)))
    np.testing.assert_allclose(result.loss, [loss], rtol=1e-6)
    np.testing.assert_allclose(slope, [gradient], rtol=1e-6)
    np.testing.assert_allclose(result.ratio, [(2, 1)], rtol=1e-6)
    np.testing.assert_allclose(result.log_ratio, [(LN2, 0)], rtol=1e-6)
    np.testing.assert_array_equal(result.dual_clipped, 0)


@pytest.mark.parametrize(
    "old, new, advantage, is_stopped",
    [
        (0.5, 0.9, 1.0, True),  # TV 0.4, KL 0.5 (ln 5/9 + ln 5) = 0.511
        (0.5, 0.9, -1.0, False),  # on its way back
        (0.9, 0.6, -1.0, True),  # TV 0.3 > 0.2, KL 0.9 ln 1.5 + 0.1 ln 0.25 = 0.226 > 0.2
        (0.9, 0.6, 1.0, False),
        (0.001, 0.1, 1.0, False),  # 100 times as likely, but TV 0.099 and KL 0.1
        (1.0, 0.5, 1.0, False),  # a certain token
    ],
)
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_divergence_stops_tokens_that_moved_far_on_their_way(
    run, name, old, new, advantage, is_stopped
):
    result, slope = run(name, np.log([[new]]), np.log([[old]]), [[advantage]], [[1]])
    np.testing.assert_allclose(result.loss, [[-advantage * new / old]], rtol=1e-5)
    assert result.clipped.item() == is_stopped
    np.testing.assert_allclose(slope, 0 if is_stopped else result.loss, rtol=1e-6)


def test_selected_tokens_are_left_out_or_held_back(run, example, monkeypatch):
    """Four tokens with ratios 2, 1, 1/2 and 2; the first three are selected."""
    selected = jnp.array([[True, True, True, False]])
    for name in ("clip_cov", "kl_cov"):
        module = example(LOSSES[name])
        monkeypatch.setattr(module, "select_tokens", lambda mini_batch: selected)
        arrays = [[LN2 - 2, -2, -LN2 - 2, LN2 - 2]], [[-2] * 4], [[1] * 4], np.ones((1, 4))
        result, slope = run(name, *arrays)
        if name == "clip_cov":
            np.testing.assert_allclose(result.loss, [[0, 0, 0, -1.3]], rtol=1e-6)
            np.testing.assert_array_equal(result.clipped, [[1, 1, 1, 1]])
            np.testing.assert_array_equal(slope, 0)
        else:
            np.testing.assert_allclose(result.loss, [[LN2 - 2, -1, LN2 - 0.5, -2]], rtol=1e-6)
            np.testing.assert_allclose(slope, [[1 - 2, -1, -1 - 0.5, -2]], rtol=1e-6)


def test_the_tokens_of_large_covariance_are_selected(example, poison):
    """Means of log pi -2 and of A 0.5: covariances 1.5, 0.5, 1.5, -0.5, 0 and -3 by hand."""
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]]) == 1
    logprobs = np.array([[-1.0, -1, -3], [-1, -2, 0], [-4, 0, 0]], np.float32)
    advantages = np.array([[2.0, 1, -1], [0, -1, 0], [2, 0, 0]], np.float32)
    tokens = MiniBatchTokens(*(poison(x, mask) for x in (logprobs, advantages)), mask)
    largest = example("losses/kl_cov").select_tokens
    for share, expected in ((0.1, [0]), (0.4, [0, 2]), (0.5, [0, 1, 2])):
        assert np.flatnonzero(largest(tokens, share)).tolist() == expected
    by_chance = example("losses/clip_cov").select_tokens
    assert np.flatnonzero(by_chance(tokens, 0.2, 0.4, 1.4)).tolist() == [1]
    # Shifted log-probs have the same covariances, and draw other tokens.
    shifted = [
        tokens._replace(old_logprobs=tokens.old_logprobs - shift / 16) for shift in range(20)
    ]
    choices = [by_chance(other, 0.2, 1.0, 5.0) for other in shifted]
    assert {tuple(np.flatnonzero(x)) for x in choices} == {(0,), (2,)}
    assert not by_chance(tokens, 0.9, 2.0, 5.0).any()


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_masked_changes_nothing(run, name, poison):
    """A mask with holes, such as tokens that a tool wrote, and a fully masked row."""
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2, (6, 9))
    mask[5] = 0
    old = -rng.exponential(2.0, (6, 9))
    arrays = np.minimum(old + rng.normal(0, 0.8, (6, 9)), -0.01), old, rng.normal(0, 1, (6, 9))
    expected, expected_slopes = run(name, *arrays, mask)
    result, slopes = run(name, *(poison(x, mask) for x in arrays), mask)
    for x, y in zip((*result, slopes), (*expected, expected_slopes), strict=True):
        np.testing.assert_array_equal(x, y)
    for x, value in zip((*result, slopes), (0, 1, 0, 0, 0, 0), strict=True):
        np.testing.assert_array_equal(x[mask == 0], value)


@pytest.mark.parametrize("name", LOSSES)
def test_log_ratios_that_would_overflow(run, name):
    """exp(89) is inf in float32, and inf * 0 is NaN in the gradient."""
    for log_ratio in (1000.0, -1000.0):
        for advantage in (1.0, -1.0):
            logprobs, old = [[min(log_ratio, 0), -1.0]], [[min(-log_ratio, 0), -1.0]]
            result, slope = run(name, logprobs, old, [[advantage] * 2], np.ones((1, 2)))
            assert all(np.isfinite(x).all() for x in (*result, slope))


WORLD = Enumerated(vocabulary=3, longest=4)  # 31 responses of 1 to 4 tokens, 15 prefixes
THETA, OLD, VALUES = np.random.default_rng(0).normal(0, 0.7, (3, *WORLD.shape))  # [states, actions]


def expected_gradient(function, clip):
    """Return the expected gradient over all responses, where a token's advantage is in VALUES."""

    def loss(theta):
        logprobs, old = WORLD.logprobs(theta), WORLD.logprobs(OLD)
        return function(padded_batch(logprobs, old, WORLD.entries(VALUES), WORLD.mask), clip).loss

    return WORLD.expected_gradient(THETA, loss, sampler=OLD)


def test_sapo_ascends_its_gate_of_the_ratio(example):
    """With advantages of tokens, so that both temperatures occur in one state."""
    with jax.enable_x64(True):
        gradient = expected_gradient(example("losses/sapo").sapo, CLIP)
        tau = np.where(VALUES > 0, 1.0, 1.05)

        def objective(theta):
            ratio = jnp.exp(jax.nn.log_softmax(theta) - jax.nn.log_softmax(OLD))
            gate = 4 / tau / (1 + jnp.exp(-tau * (ratio - 1)))
            return WORLD.visits(OLD) @ jnp.sum(jax.nn.softmax(OLD) * gate * VALUES, -1)

        np.testing.assert_allclose(-gradient, jax.grad(objective)(THETA), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_is_the_unclipped_surrogate_without_the_tokens_that_moved_far(example, name):
    with jax.enable_x64(True):
        gradient = expected_gradient(getattr(example("losses/dppo"), name), Clip(0.02, 0.05))
        new, old = jax.nn.softmax(THETA), jax.nn.softmax(OLD)
        moved = jnp.abs(new - old)
        if name == "dppo_kl":
            moved = old * jnp.log(old / new) + (1 - old) * jnp.log((1 - old) / (1 - new))
        good = VALUES > 0
        kept = jnp.where(good, (new <= old) | (moved <= 0.05), (new >= old) | (moved <= 0.02))
        assert {*np.asarray(kept[good])} == {*np.asarray(kept[~good])} == {True, False}

        def objective(theta):
            return WORLD.visits(OLD) @ jnp.sum(jax.nn.softmax(theta) * kept * VALUES, -1)

        np.testing.assert_allclose(-gradient, jax.grad(objective)(THETA), rtol=0, atol=1e-10)
