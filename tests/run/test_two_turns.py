"""Two turns with an answer of the environment between them, enumerated: what is learned is exact.

    s0 --policy--> a --environment, at random--> o, o --policy--> b

All 18 dialogues are listed with their probabilities, so that expectations are sums. The objective
is the expected sum of the rewards of both turns and of the whole, minus the KL to a reference over
the policy's own two tokens. The pipeline gets the rewards as a run does, and on the environment's
tokens log-probs and values that mean nothing.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.kernels.losses import Clip, padded_batch
from jax_ppo.ppo.forward_passes import ForwardOutputs
from jax_ppo.training.control import first_control
from jax_ppo.types import Sequences
from padded_loss import padded_loss

V, ANSWERS, KL_COEF = 3, 2, 0.3
rng = np.random.default_rng(3)
A, ANSWER, B = np.array(list(itertools.product(range(V), range(ANSWERS), range(V)))).T
N = len(A)
STATE = A * ANSWERS + ANSWER  # the policy's second state
GIVEN = rng.dirichlet(np.ones(ANSWERS), V)[A, ANSWER]  # the probability of the answer
FIRST, SECOND, WHOLE = rng.normal(0, 1, (3, N))
# A turn's reward does not know what comes after it.
FIRST = FIRST[A * ANSWERS * V]
MASK = np.array([[True, False, False, True]] * N)


def make_theta(seed):
    """Return logits of the first turn, of the second, and of the answer's tokens."""
    shapes = {"first": (V,), "second": (V * ANSWERS, V), "answer": (V, 2)}
    values = np.random.default_rng(seed)
    return {name: jnp.asarray(values.normal(0, 0.7, x), jnp.float32) for name, x in shapes.items()}


THETA, REFERENCE = make_theta(0), make_theta(1)


def logprobs(theta):
    """Return the log-probs of all four tokens of each dialogue, [N, 4]."""
    return jnp.stack(
        [
            jax.nn.log_softmax(theta["first"])[A],
            *theta["answer"][A].T,
            jax.nn.log_softmax(theta["second"])[STATE, B],
        ],
        axis=1,
    )


def probabilities(theta):
    log_first, _, _, log_second = logprobs(theta).T
    return jnp.exp(log_first + log_second) * GIVEN


def objective(theta):
    """Return the expected rewards minus the KL of the policy's own tokens, as a sum."""
    own = (logprobs(theta) - logprobs(REFERENCE))[:, [0, 3]].sum(1)
    return jnp.sum(probabilities(theta) * (FIRST + SECOND + WHOLE - KL_COEF * own))


def estimate(estimator="gae"):
    """Return the experience of all dialogues."""
    config = tiny.config(
        algorithm__adv_estimator=estimator,
        algorithm__lam=1.0,
        algorithm__use_kl_in_reward=True,
        algorithm__whiten_advantages=False,
        algorithm__kl_ctrl__kl_coef=KL_COEF,
    )
    values = np.full((N, 4), 1e3, np.float32)
    values[:, 0], values[:, 3] = 0.4, STATE * 0.3 - 1  # any baseline of the state will do
    turn_rewards = np.zeros((N, 4), np.float32)
    turn_rewards[:, 0], turn_rewards[:, 3] = FIRST, SECOND
    experience, metrics = tiny.estimate_experience(
        config,
        first_control(config.algorithm.kl_ctrl, config.reward, config.critic),
        Sequences(
            tokens=jnp.ones((N, 5), jnp.int32),
            prompt_lengths=jnp.ones(N, jnp.int32),
            lengths=jnp.full(N, 4, jnp.int32),
            truncated=jnp.zeros(N, bool),
            action_mask=jnp.asarray(MASK),
        ),
        logprobs(THETA),
        ForwardOutputs(ref_logprobs=logprobs(REFERENCE), values=jnp.asarray(values)),
        jnp.asarray(WHOLE, jnp.float32),
        jnp.asarray(turn_rewards),
    )
    return experience, metrics


def loss_gradient(experience, name):
    """Return the gradient of the expected sum of a policy loss over tokens."""
    weights = probabilities(THETA)[:, None]

    def loss(theta):
        batch = padded_batch(logprobs(theta), logprobs(THETA), experience.advantages, MASK)
        return jnp.sum(weights * padded_loss(name, batch, Clip(0.2, 0.3, 3.0)).loss)

    return jax.grad(loss)(THETA)


@pytest.fixture(scope="module", params=["gae", "turn_gae", "bi_level_gae"])
def experience(request):
    return estimate(request.param)[0]


@pytest.mark.parametrize("name", ["vanilla", "importance", "reinforce"])
def test_the_expected_gradient_is_that_of_the_objective(experience, name):
    """Whatever the baseline; the environment's tokens have none."""
    expected = jax.grad(objective)(THETA)
    gradient = loss_gradient(experience, name)
    for part in ("first", "second"):
        assert np.abs(expected[part]).max() > 0.01
        np.testing.assert_allclose(gradient[part], -expected[part], atol=2e-6)
    np.testing.assert_array_equal(gradient["answer"], 0.0)


def test_returns_average_to_the_values_of_the_policys_states(experience):
    """The critic's targets, weighted by their dialogues, are the exact values of s0 and (a, o)."""
    weights = np.asarray(probabilities(THETA))
    own = np.asarray(logprobs(THETA) - logprobs(REFERENCE))
    second = SECOND + WHOLE - KL_COEF * own[:, 3]
    both = FIRST - KL_COEF * own[:, 0] + second
    returns = np.asarray(experience.returns)
    np.testing.assert_allclose(weights @ returns[:, 0], weights @ both, atol=1e-6)
    for state in range(V * ANSWERS):
        chance = weights * (STATE == state)
        np.testing.assert_allclose(chance @ returns[:, 3], chance @ second, atol=1e-6)
    # Both states are learned.
    assert experience.value_mask is None or experience.value_mask[MASK].all()
    # No target, advantage or KL lies on the environment's tokens.
    assert not returns[:, 1:3].any() and not np.asarray(experience.advantages)[:, 1:3].any()


def test_the_measured_kl_is_that_of_the_policys_own_tokens():
    _, metrics = estimate()
    own = np.asarray(logprobs(THETA) - logprobs(REFERENCE))[:, [0, 3]]
    np.testing.assert_allclose(metrics["kl/reference"], own.mean(), rtol=1e-5)


def test_reward_to_go_counts_what_a_turn_can_still_change():
    """Without a critic: the first turn's advantage is all that follows, the second's is its own."""
    experience, _ = estimate("reinforce_plus_plus")
    own = np.asarray(logprobs(THETA) - logprobs(REFERENCE))
    second = SECOND + WHOLE - KL_COEF * own[:, 3]
    first = FIRST - KL_COEF * own[:, 0] + second
    expected = np.stack([first, np.zeros(N), np.zeros(N), second], axis=1)
    np.testing.assert_allclose(experience.advantages, expected, atol=1e-5)
