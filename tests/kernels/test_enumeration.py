"""Expected gradients over all responses of a small policy equal the stated objectives'.

In float64, to 1e-10: each estimator is unbiased here, or has the bias that its docstring states.
"""

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
    assert (
        WORLD.tokens.shape == (31, 4)
        and WORLD.shape == (15, 3)
        and set(WORLD.lengths) == {1, 2, 3, 4}
    )
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


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize(
    ("lower", "upper", "masks"), [(0.6, 1.5, True), (0.0, 1.2, False), (0.8, 1e9, False)]
)
def test_bounded_weights_of_responses_ascend_scores_times_what_is_left_of_the_ratio(
    level, lower, upper, masks
):
    ratio = WORLD.probabilities(THETA) / WORLD.probabilities(OLD)
    base = ratio if level == "sequence" else ratio ** (1 / WORLD.lengths)
    is_inside = (base >= lower) & (base <= upper)
    assert {*np.asarray(is_inside)} == {True, False}
    bounded = jnp.where(is_inside, base, 0) if masks else jnp.clip(base, lower, upper)
    weights = importance.importance_weights(
        WORLD.logprobs(THETA),
        WORLD.logprobs(OLD),
        MASK,
        LEVELS[level],
        upper,
        lower=lower,
        masks=masks,
    )
    loss = loss_of("vanilla", spread(SCORES), old=THETA)
    gradient = -WORLD.expected_gradient(THETA, lambda theta: weights * loss(theta), sampler=OLD)
    same(gradient, return_gradient(THETA, SCORES * bounded / ratio))
    differs(gradient, return_gradient(THETA))


def test_icepop_keeps_the_tokens_whose_ratio_is_inside_its_bounds():
    """In the states that the sampler visits, and with its continuations."""
    weights = importance.importance_weights(
        WORLD.logprobs(THETA),
        WORLD.logprobs(OLD),
        MASK,
        LEVELS["token"],
        1.5,
        lower=0.7,
        masks=True,
    )
    ratio = jax.nn.softmax(THETA) / jax.nn.softmax(OLD)
    kept = jnp.where((ratio >= 0.7) & (ratio <= 1.5), ratio, 0)
    loss = loss_of("vanilla", spread(SCORES), old=THETA)
    factor = jax.nn.softmax(OLD) * kept * q_values(WORLD.entries(jnp.zeros(15)), OLD, SCORES)
    closed = jax.grad(
        lambda theta: WORLD.visits(OLD) @ jnp.sum(factor * jax.nn.log_softmax(theta), -1)
    )(THETA)
    same(-WORLD.expected_gradient(THETA, lambda x: weights * loss(x), sampler=OLD), closed)


def test_the_clipped_surrogate_off_policy_is_the_unclipped_one_without_the_clipped_tokens():
    clip, action_values = Clip(0.2, 0.3, 2.0), q_values(WORLD.entries(jnp.zeros(15)), OLD, SCORES)
    gradient = WORLD.expected_gradient(
        THETA, loss_of("vanilla", WORLD.entries(action_values), clip=clip), sampler=OLD
    )
    ratio = jnp.exp(jax.nn.log_softmax(THETA) - jax.nn.log_softmax(OLD))
    kept = jnp.where(action_values > 0, ratio <= 1.3, (ratio >= 0.8) & (ratio <= 2.0))
    assert (
        {*np.asarray(kept[action_values > 0])}
        == {*np.asarray(kept[action_values < 0])}
        == {True, False}
    )
    visits = WORLD.visits(OLD)
    same(
        -gradient,
        jax.grad(lambda theta: visits @ jnp.sum(jax.nn.softmax(theta) * kept * action_values, -1))(
            THETA
        ),
    )


def sequence_loss_gradient(objective):
    """Return the gradient of the objective [N] averaged over the old policy's responses."""
    weights = WORLD.probabilities(OLD)
    return jax.grad(lambda theta: weights @ objective(theta))(THETA)


def test_gspo_by_its_paper_and_its_bias():
    def s(theta):
        return (WORLD.probabilities(theta) / WORLD.probabilities(OLD)) ** (1 / WORLD.lengths)

    weights = spread(1 / WORLD.lengths)  # seq-mean-token-mean
    for clip in (WIDE, Clip(0.1, 0.2)):

        def surrogate(theta, clip=clip):
            clipped = jnp.clip(s(theta), 1 - clip.low, 1 + clip.high)
            return jnp.minimum(s(theta) * SCORES, clipped * SCORES)

        loss = loss_of("gspo", spread(SCORES), clip=clip)
        gradient = -WORLD.expected_gradient(
            THETA, lambda theta, loss=loss: weights * loss(theta), sampler=OLD
        )
        same(gradient, sequence_loss_gradient(surrogate))
    # s^length in place of s would have been unbiased.
    differs(sequence_loss_gradient(lambda theta: s(theta) * SCORES), return_gradient(THETA))
    same(
        sequence_loss_gradient(lambda theta: s(theta) ** WORLD.lengths * SCORES),
        return_gradient(THETA),
    )


def test_gmpo_by_its_paper():
    sign = np.sign(SCORES)[:, None]

    def geometric_mean(theta, low, high):
        ratio = jnp.where(
            MASK == 1,
            jnp.exp(WORLD.entries(jax.nn.log_softmax(theta) - jax.nn.log_softmax(OLD))),
            1,
        )
        cut = (
            jnp.minimum(ratio**sign, jnp.clip(ratio, jnp.exp(-low), jnp.exp(high)) ** sign) ** sign
        )
        return jnp.prod(cut, axis=1) ** (1 / WORLD.lengths)

    for low, high in ((30.0, 30.0), (0.2, 0.4)):
        loss = loss_of("gmpo", spread(SCORES), clip=Clip(low, high))
        weighted = lambda theta, loss=loss: spread(1 / WORLD.lengths) * loss(theta)  # noqa: E731
        objective = lambda theta, low=low, high=high: geometric_mean(theta, low, high) * SCORES  # noqa: E731
        same(
            -WORLD.expected_gradient(THETA, weighted, sampler=OLD),
            sequence_loss_gradient(objective),
        )


def test_cispo_keeps_every_token_with_a_weight_that_is_cut():
    visits, action_values = WORLD.visits(OLD), q_values(WORLD.entries(jnp.zeros(15)), OLD, SCORES)
    ratio = jnp.exp(jax.nn.log_softmax(THETA) - jax.nn.log_softmax(OLD))
    for clip, weight in ((WIDE, ratio), (Clip(0.2, 0.3), jnp.clip(ratio, 0.8, 1.3))):
        factor = jax.nn.softmax(OLD) * weight * action_values
        closed = jax.grad(
            lambda theta, factor=factor: visits @ jnp.sum(factor * jax.nn.log_softmax(theta), -1)
        )(THETA)
        same(
            -WORLD.expected_gradient(
                THETA, loss_of("cispo", spread(SCORES), clip=clip), sampler=OLD
            ),
            closed,
        )
    unclipped = WORLD.expected_gradient(THETA, loss_of("importance", spread(SCORES)), sampler=OLD)
    same(WORLD.expected_gradient(THETA, loss_of("cispo", spread(SCORES)), sampler=OLD), unclipped)


def test_reinforce_off_policy_clones_the_sampler_where_all_scores_are_equal():
    def kl_from_old(theta):
        return WORLD.expect(
            OLD, jnp.log(WORLD.probabilities(OLD)) - jnp.log(WORLD.probabilities(theta))
        )

    same(
        WORLD.expected_gradient(THETA, loss_of("reinforce", spread(np.ones(31))), sampler=OLD),
        jax.grad(kl_from_old)(THETA),
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


def test_k1_in_the_reward_is_the_gradient_of_the_kl_of_responses():
    same(kl_in_reward("k1"), jax.grad(response_kl)(THETA))


def kl_in_reward(kind, gamma=1.0, theta=THETA):
    """The score-function gradient of the estimator's sum.

    Each token bears its own cost and all that follow.
    """
    cost = kl.kl_estimate(WORLD.logprobs(theta), WORLD.logprobs(REF), MASK, KL[kind])
    to_go = jax.vmap(lambda c, m: advantages.reward_to_go(c, m, gamma))(cost, MASK)
    return -WORLD.expected_gradient(theta, loss_of("vanilla", to_go, old=theta))


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


def test_near_the_reference_k2_and_k3_in_the_reward_hardly_push():
    near = REF + 0.01 * THETA
    whole = np.abs(kl_in_reward("k1", theta=near)).max()
    for kind in ("k2", "k3", "k3+"):
        assert np.abs(kl_in_reward(kind, theta=near)).max() < 0.02 * whole


def test_k1_in_the_reward_of_its_own_token_alone_pushes_as_k2_in_the_loss():
    same(kl_in_reward("k1", gamma=0.0), kl_in_loss("k2"))
    same(kl_in_loss("k3+"), kl_in_loss("k2"))


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

    def expected_loss(values_S, returns):
        loss = losses.value_loss(
            WORLD.entries(values_S), WORLD.entries(exact), returns, MASK, None
        ).loss
        return WORLD.expect(THETA, loss.sum(1))

    for returns in (gae(exact + WRONG, 1.0)[1], gae(exact, 0.3)[1]):
        same(jax.grad(expected_loss)(exact + WRONG, returns), WORLD.visits(THETA) * WRONG)


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

    def expected_loss(values_S, returns, mask):
        loss = losses.value_loss(
            WORLD.entries(values_S), WORLD.entries(exact), returns, mask, None
        ).loss
        return WORLD.expect(THETA, loss.sum(1))

    at_starts = jnp.where(STARTS_TURN, WORLD.visits(THETA) * WRONG, 0)
    for values, lam in ((exact + WRONG, 1.0), (exact, 0.3)):
        returns = of_turns(advantages.turn_gae, values, 1.0, lam)[1]
        assert not returns[STARTS == 0].any()
        same(jax.grad(expected_loss)(exact + WRONG, returns, STARTS), at_starts)


def test_steps_of_tokens_prefer_the_choice_that_a_short_turn_follows():
    """The better of two first turns leads to a turn of 30 tokens, the other to one of 1 token.

    Of the 1 and 0.6 that they earn, a critic that knows nothing yet leaves lam^n, where n counts
    the tokens or the turns up to the reward. Only the first token is a choice, so the expected
    gradient of its log-odds is p (1 - p) times the difference of the advantages.
    """
    T, lam = 32, 0.9
    earned, last = np.array([1.0, 0.6]), np.array([31, 2])  # after a token of an observation
    columns = np.arange(T)
    mask = (columns <= last[:, None]) & (columns != 1)
    starts = np.isin(columns, (0, 2)) & mask
    rewards = np.where(columns == last[:, None], earned[:, None], 0.0)
    values = np.where(mask, 0.0, np.nan)  # nothing is read on the observation

    def preference(estimator, *options):
        kernel = jax.vmap(lambda *arrays: estimator(*arrays, *options)[0])
        better, worse = kernel(rewards, values, mask, starts)[:, 0]
        return better - worse

    def token_gae(r, v, m, starts):
        return advantages.gae(r, v, m, 1.0, lam)

    np.testing.assert_allclose(preference(token_gae), lam**30 - lam * 0.6)  # the wrong way
    np.testing.assert_allclose(preference(advantages.turn_gae, 1.0, lam), lam * 0.4)
    np.testing.assert_allclose(preference(advantages.bi_level_gae, 1.0, lam, 1.0, lam), lam * 0.4)


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
    same(
        group_gradient(lambda scores: advantages.grpo(scores, n, by_std=False), n),
        truth * (n - 1) / n,
    )
    same(
        group_gradient(lambda scores: advantages.group_mean_baseline(scores, n), n),
        truth * (n - 1) / n,
    )


def test_grpo_by_std_of_two_counts_who_wins_and_not_by_how_much():
    """The deviation of two scores is their distance / sqrt(2): A = +-1 / sqrt(2) up to 1e-6."""
    distance = SMALL_SCORES[:, None] - SMALL_SCORES
    advantage = distance / 2 / (np.abs(distance) / np.sqrt(2) + 1e-6)
    np.testing.assert_allclose(advantage, np.sign(distance) * 0.5**0.5, rtol=1e-4)
    wins = advantage @ SMALL.probabilities(SMALL_THETA)
    gradient = group_gradient(lambda scores: advantages.grpo(scores, 2, by_std=True), 2)
    same(gradient, jax.grad(lambda theta: SMALL.expect(theta, wins))(SMALL_THETA))
    differs(gradient, jax.grad(lambda theta: SMALL.expect(theta, SMALL_SCORES))(SMALL_THETA) / 2)
