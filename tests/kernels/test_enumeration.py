"""Expected gradients over all responses of a small policy equal the stated objectives'.

In float64, to 1e-10: each estimator is unbiased here, or has the bias that its docstring states.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enumerate_policy import Enumerated
from jax_ppo.kernels import advantages, importance, kl, losses
from jax_ppo.kernels.losses import Clip, padded_batch
from jax_ppo.registries import AGGREGATIONS, POLICY_LOSSES
from kernels_by_name import KL, LEVELS
from padded_loss import padded_loss

WORLD = Enumerated(vocabulary=3, longest=4)  # 31 responses of 1 to 4 tokens, 15 prefixes
SMALL = Enumerated(vocabulary=3, longest=2)  # 7 responses, where groups of them are enumerated
WIDE = Clip(0.999, 1e9)
rng = np.random.default_rng(0)
THETA, OLD, REF = rng.normal(0, 0.7, (3, *WORLD.shape))
SCORES = rng.normal(0, 1, len(WORLD.tokens))
MASK = WORLD.mask


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def same(gradient, closed_form):
    assert gradient.dtype == jnp.float64
    assert np.abs(closed_form).max() > 1e-2
    np.testing.assert_allclose(gradient, closed_form, rtol=0, atol=1e-10)


def differs(gradient, closed_form):
    assert np.abs(gradient - closed_form).max() > 1e-2


def spread(x_N):
    """One number a response, on each of its tokens."""
    return jnp.broadcast_to(jnp.asarray(x_N)[:, None], MASK.shape)


def loss_of(name, advantages_NxT, old=OLD, clip=WIDE):
    """theta -> the loss of each token [N, T]."""

    def loss(theta):
        batch = padded_batch(WORLD.logprobs(theta), WORLD.logprobs(old), advantages_NxT, MASK)
        return padded_loss(name, batch, clip).loss

    return loss


def return_gradient(theta, scores_N=SCORES):
    return jax.grad(lambda theta: WORLD.expect(theta, scores_N))(theta)


def per_state(divergence, theta):
    """Gradient of sum_s visits(s) divergence(log pi(.|s), log ref(.|s)), visits held fixed."""
    visits = WORLD.visits(theta)
    return jax.grad(
        lambda theta: visits @ divergence(jax.nn.log_softmax(theta), jax.nn.log_softmax(REF))
    )(theta)


def kl_to_ref(log_p, log_q):
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def kl_from_ref(log_p, log_q):
    return kl_to_ref(log_q, log_p)


def variation(log_p, log_q):
    return jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), -1) / 2


def response_kl(theta):
    """KL(pi || ref) of whole responses."""
    return WORLD.expect(
        theta, jnp.log(WORLD.probabilities(theta)) - jnp.log(WORLD.probabilities(REF))
    )


def test_the_enumeration_itself():
    assert WORLD.tokens.shape == (31, 4) and WORLD.shape == (15, 3)
    assert set(WORLD.lengths) == {1, 2, 3, 4}
    np.testing.assert_allclose(WORLD.probabilities(THETA).sum(), 1, rtol=1e-14)
    np.testing.assert_allclose(
        WORLD.visits(THETA).sum(), WORLD.expect(THETA, WORLD.lengths), rtol=1e-14
    )
    np.testing.assert_allclose(
        WORLD.visits(THETA) @ kl_to_ref(*map(jax.nn.log_softmax, (THETA, REF))), response_kl(THETA)
    )


# Policy losses


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_at_the_old_policy_is_the_policy_gradient(name):
    """As a sum over tokens, with any baseline of the prefix, under a clip that is not wide."""
    baseline = WORLD.entries(jnp.linspace(-1, 2, 15))
    gradient = WORLD.expected_gradient(
        OLD, loss_of(name, spread(SCORES) - baseline, clip=Clip(0.2, 0.3, 3.0))
    )
    same(-gradient, return_gradient(OLD))


def test_importance_is_the_surrogate_with_the_states_of_the_old_policy():
    """Sum over prefixes of old-policy visits times E over new-policy actions of the old Q."""
    gradient = WORLD.expected_gradient(THETA, loss_of("importance", spread(SCORES)), sampler=OLD)
    visits, action_values = WORLD.visits(OLD), q_values(WORLD.entries(jnp.zeros(15)), OLD, SCORES)
    surrogate = jax.grad(lambda theta: visits @ jnp.sum(jax.nn.softmax(theta) * action_values, -1))(
        THETA
    )
    same(-gradient, surrogate)
    differs(-gradient, return_gradient(THETA))  # the bias: the states are not the new policy's
    # The first token is chosen in a state that both policies share, but its advantage assumes the
    # old policy's continuation; alone it is unbiased.
    scores = np.array([0.5, -1.0, 2.0])[WORLD.tokens[:, 0]]
    first = jnp.where(np.arange(4) == 0, spread(scores), 0)
    same(
        -WORLD.expected_gradient(THETA, loss_of("importance", first), sampler=OLD),
        return_gradient(THETA, scores),
    )


def test_sequence_weights_make_any_loss_at_its_old_policy_unbiased_under_another_sampler():
    """Decoupled PPO: sampled by OLD, and the ratio of the clipped surrogate starts from THETA."""
    weights = importance.importance_weights(
        WORLD.logprobs(THETA), WORLD.logprobs(OLD), MASK, LEVELS["sequence"], 1e9
    )
    for name in POLICY_LOSSES:
        loss = loss_of(name, spread(SCORES), old=THETA, clip=Clip(0.2, 0.2))
        same(
            -WORLD.expected_gradient(
                THETA, lambda theta, loss=loss: weights * loss(theta), sampler=OLD
            ),
            return_gradient(THETA),
        )
    tokens = importance.importance_weights(
        WORLD.logprobs(THETA), WORLD.logprobs(OLD), MASK, LEVELS["token"], 1e9
    )
    differs(
        -WORLD.expected_gradient(THETA, lambda theta: tokens * loss(theta), sampler=OLD),
        return_gradient(THETA),
    )


# Aggregation


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_what_each_aggregation_ascends(mode):
    """Over all mini-batches of two responses: E[score x share]; share is 1 for the two sums."""
    probabilities, lengths = WORLD.probabilities(THETA), WORLD.lengths
    first, second = (x.reshape(-1) for x in np.mgrid[:31, :31])
    weights = jax.vmap(lambda both: losses.loss_weights(both, AGGREGATIONS[mode].function, 8.0))(
        jnp.asarray(lengths[np.stack([first, second], 1)])
    )
    loss = loss_of("vanilla", spread(SCORES), old=THETA)

    def total(theta):
        sums = loss(theta).sum(1)
        return (probabilities[first] * probabilities[second]) @ (
            weights[:, 0] * sums[first] + weights[:, 1] * sums[second]
        )

    share = {
        "token-mean": 2 * (1 / (lengths[:, None] + lengths)) @ probabilities,
        "seq-mean-token-sum": np.ones(31),
        "seq-mean-token-mean": 1 / lengths,
        "seq-mean-token-sum-norm": np.full(31, 1 / 8),
    }[mode]
    same(-jax.grad(total)(THETA), return_gradient(THETA, share * SCORES))
    by_length = [float(share[lengths == n][0]) for n in (1, 2, 3, 4)]
    assert (np.diff(by_length) < 0).all() if mode.endswith("token-mean") else len({*by_length}) == 1


# KL


def kl_in_reward(kind):
    """The score-function gradient of the estimator's sum.

    Each token bears its own cost and all that follow.
    """
    cost = kl.kl_estimate(WORLD.logprobs(THETA), WORLD.logprobs(REF), MASK, KL[kind])
    to_go = jax.vmap(lambda c, m: advantages.reward_to_go(c, m, 1.0))(cost, MASK)
    return -WORLD.expected_gradient(THETA, loss_of("vanilla", to_go, old=THETA))


def kl_in_loss(kind):
    return WORLD.expected_gradient(
        THETA,
        lambda theta: kl.kl_estimate(WORLD.logprobs(theta), WORLD.logprobs(REF), MASK, KL[kind]),
    )


ESTIMATE_OF = {  # what the estimator is of in each prefix, exactly
    "k1": kl_to_ref,
    "abs": lambda log_p, log_q: jnp.sum(jnp.exp(log_p) * jnp.abs(log_p - log_q), -1),
    "k2": lambda log_p, log_q: jnp.sum(jnp.exp(log_p) * (log_p - log_q) ** 2, -1) / 2,
    "k3": kl_to_ref,
    "k3+": kl_to_ref,
    "clamped": lambda log_p, log_q: jnp.sum(jnp.exp(log_p) * jnp.maximum(log_p - log_q, 0), -1),
}
DESCENDS_AS_LOSS = {  # which divergence of the next token a loss descends, in the prefixes visited
    "k1": None,
    "abs": lambda log_p, log_q: 2 * variation(log_p, log_q),
    "k2": kl_to_ref,
    "k3": kl_from_ref,
    "k3+": kl_to_ref,
    "clamped": variation,
}


@pytest.mark.parametrize("kind", KL)
def test_kl_in_the_loss(kind):
    gradient = kl_in_loss(kind)
    if DESCENDS_AS_LOSS[kind] is None:
        np.testing.assert_allclose(gradient, 0, atol=1e-12)
    else:
        same(gradient, per_state(DESCENDS_AS_LOSS[kind], THETA))
    differs(
        gradient, jax.grad(response_kl)(THETA)
    )  # no loss of tokens knows that a token leads to prefixes of a larger KL


@pytest.mark.parametrize("kind", KL)
def test_kl_in_the_reward(kind):
    """The gradient of the estimator's expectation without the part through its value.

    No gradient flows through the value of a reward.
    """
    log_ref = jax.nn.log_softmax(REF)

    def expectation(theta):
        return WORLD.visits(theta) @ ESTIMATE_OF[kind](jax.nn.log_softmax(theta), log_ref)

    estimate = WORLD.expect(
        THETA, kl.kl_estimate(WORLD.logprobs(THETA), WORLD.logprobs(REF), MASK, KL[kind]).sum(1)
    )
    np.testing.assert_allclose(estimate, expectation(THETA), rtol=1e-12)
    if kind in ("k1", "k3", "k3+"):
        np.testing.assert_allclose(estimate, response_kl(THETA), rtol=1e-12)
    else:
        assert abs(estimate / response_kl(THETA) - 1) > 0.01
    through_value = kl_in_loss("k3" if kind == "k3+" else kind)
    same(kl_in_reward(kind), jax.grad(expectation)(THETA) - through_value)


# Critic

WRONG = rng.normal(0, 1, WORLD.shape[0])


def q_values(token_rewards_NxT, theta, scores_N):
    """Return Q [S, V], the expected sum of rewards from a token on; 0 off the tree.

    The score of a response comes with its last token.
    """
    p = np.asarray(WORLD.probabilities(theta))
    rewards = np.where(MASK == 1, np.nan_to_num(token_rewards_NxT), 0)
    to_go = rewards[:, ::-1].cumsum(1)[:, ::-1] + scores_N[:, None]
    total, weight = np.zeros((2, *WORLD.shape))
    for i, t in zip(*np.nonzero(MASK), strict=True):
        total[WORLD.states[i, t], WORLD.tokens[i, t]] += p[i] * to_go[i, t]
        weight[WORLD.states[i, t], WORLD.tokens[i, t]] += p[i]
    return total / weight


def token_rewards():
    """Return rewards [N, T] that depend on prefix and token, and the total of each response [N]."""
    rewards = WORLD.entries(jnp.asarray(np.random.default_rng(1).normal(size=WORLD.shape)))
    return rewards, jnp.nansum(rewards, 1)


def value_loss_over_all(values_S, old_S, returns, mask=MASK):
    """The expected loss of the values of prefixes."""
    old, values = WORLD.entries(old_S), WORLD.entries(values_S)
    loss = losses.value_loss(values, old, returns, mask, None).loss
    return WORLD.expect(THETA, loss.sum(1))


def exact_values(theta):
    return jnp.sum(jax.nn.softmax(theta) * q_values(token_rewards()[0], theta, np.zeros(31)), -1)


def gae(values_S, lam):
    """Advantages and returns [N, T] of `token_rewards`."""
    kernel = jax.vmap(lambda r, v, m: advantages.gae(r, v, m, 1.0, lam))
    return kernel(token_rewards()[0], WORLD.entries(values_S), MASK)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 1.0])
def test_gae_with_an_exact_critic_is_unbiased_at_every_lambda(lam):
    def gradient(values_S):
        return -WORLD.expected_gradient(THETA, loss_of("vanilla", gae(values_S, lam)[0], old=THETA))

    truth = return_gradient(THETA, token_rewards()[1])
    same(gradient(exact_values(THETA)), truth)
    (same if lam == 1 else differs)(gradient(exact_values(THETA) + WRONG), truth)


def test_the_value_loss_leads_to_the_exact_critic():
    """The expected gradient is visits x (V - V_exact).

    It holds for the returns of any lambda if those are computed from V_exact.
    """
    exact = exact_values(THETA)
    for returns in (gae(exact + WRONG, 1.0)[1], gae(exact, 0.3)[1]):
        gradient = jax.grad(value_loss_over_all)(exact + WRONG, exact, returns)
        same(gradient, WORLD.visits(THETA) * WRONG)


# Turns: word 1 ends one, and the next token starts another with nothing between the two.

STARTS = MASK * np.pad(WORLD.tokens == 1, ((0, 0), (1, 0)), constant_values=True)[:, :-1]
STARTS_TURN = np.array([not prefix or prefix[-1] == 1 for prefix in WORLD.prefixes])


def of_turns(estimator, values_S, *options):
    """Advantages and returns [N, T] of `token_rewards`; a turn earns what its tokens do."""
    kernel = jax.vmap(lambda *arrays: estimator(*arrays, *options))
    return kernel(token_rewards()[0], WORLD.entries(values_S), MASK, STARTS)


def gradient_of(estimates):
    return -WORLD.expected_gradient(THETA, loss_of("vanilla", estimates[0], old=THETA))


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_turn_gae_is_unbiased_if_the_critic_is_exact_where_turns_start(lam):
    """Within turns the critic may be wrong, which `gae` does not survive below lambda 1."""
    assert {*STARTS.sum(1)} == {1, 2, 3, 4}
    truth, exact = return_gradient(THETA, token_rewards()[1]), exact_values(THETA)
    wrong_within = exact + np.where(STARTS_TURN, 0, WRONG)
    same(gradient_of(of_turns(advantages.turn_gae, wrong_within, 1.0, lam)), truth)
    (same if lam == 1 else differs)(gradient_of(gae(wrong_within, lam)), truth)
    wrong_at_starts = exact + np.where(STARTS_TURN, WRONG, 0)
    estimates = of_turns(advantages.turn_gae, wrong_at_starts, 1.0, lam)
    (same if lam == 1 else differs)(gradient_of(estimates), truth)


@pytest.mark.parametrize(("lam", "turn_lam"), [(0.0, 0.5), (0.5, 0.0), (1.0, 0.5), (0.5, 1.0)])
def test_bi_level_gae_with_an_exact_critic_is_unbiased_at_all_lambdas(lam, turn_lam):
    def gradient(values_S, *lams):
        return gradient_of(of_turns(advantages.bi_level_gae, values_S, 1.0, lams[0], 1.0, lams[1]))

    truth, exact = return_gradient(THETA, token_rewards()[1]), exact_values(THETA)
    same(gradient(exact, lam, turn_lam), truth)
    differs(gradient(exact + WRONG, lam, turn_lam), truth)
    same(gradient(exact + WRONG, 1.0, 1.0), truth)


def test_the_critic_of_turns_learns_the_values_of_their_first_states_alone():
    exact = exact_values(THETA)
    at_starts = jnp.where(STARTS_TURN, WORLD.visits(THETA) * WRONG, 0)
    for values, lam in ((exact + WRONG, 1.0), (exact, 0.3)):
        returns = of_turns(advantages.turn_gae, values, 1.0, lam)[1]
        assert not returns[STARTS == 0].any()
        gradient = jax.grad(value_loss_over_all)(exact + WRONG, exact, returns, STARTS)
        same(gradient, at_starts)


# Group baselines

SMALL_THETA = rng.normal(0, 0.7, SMALL.shape)
SMALL_SCORES = rng.normal(0, 1, len(SMALL.tokens))


def group_gradient(baseline, n):
    """Over all 7^n groups of n responses: the group mean of A grad log pi of the response."""
    members = np.stack([x.reshape(-1) for x in np.mgrid[(slice(0, 7),) * n]], 1)
    p = jnp.prod(SMALL.probabilities(SMALL_THETA)[members], 1)
    weights = (
        p[:, None]
        * baseline(jnp.asarray(SMALL_SCORES[members]).reshape(-1)).reshape(members.shape)
        / n
    )
    return jax.grad(lambda theta: jnp.sum(weights * jnp.log(SMALL.probabilities(theta))[members]))(
        SMALL_THETA
    )


@pytest.mark.parametrize("n", [2, 3, 4])
def test_group_baselines(n):
    truth = jax.grad(lambda theta: SMALL.expect(theta, SMALL_SCORES))(SMALL_THETA)
    same(group_gradient(lambda scores: advantages.rloo(scores, n), n), truth)
    for baseline in (
        advantages.group_mean_baseline,
        functools.partial(advantages.grpo, by_std=False),
    ):
        gradient = group_gradient(lambda scores, f=baseline: f(scores, n), n)
        same(gradient, truth * (n - 1) / n)
