"""Advantages, returns and the next control from rewards and scores, computed by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.kernels import masked_statistics as moments
from jax_ppo.ppo.advantages import critic_metrics
from jax_ppo.ppo.forward_passes import ForwardOutputs
from jax_ppo.training.control import first_control
from jax_ppo.types import Control, Sequences

T = tiny.T


def estimate(
    config,
    rewards,
    lengths,
    truncated=None,
    values=None,
    last_values=None,
    logprobs=None,
    ref_logprobs=None,
    full_kl=None,
    step_rewards=None,
    control=None,
    figures=None,
    turn_starts=None,
):
    """Estimate for samples of these lengths; rows are filled up with values that must not count."""

    def pad_rows(entries, dtype=jnp.float32):
        entries = [[0.0] * n for n in lengths] if entries is None else entries
        return jnp.array([[*row, *[99.0] * (T - len(row))] for row in entries], dtype)

    count = len(lengths)
    truncated = jnp.array(truncated if truncated is not None else [False] * count)
    sequences = Sequences(
        jnp.zeros((count, config.sequence_length), jnp.int32),
        jnp.ones(count, jnp.int32),
        jnp.array(lengths, jnp.int32),
        truncated,
        jnp.arange(T) < jnp.array(lengths)[:, None],
        turn_starts=turn_starts,
    )
    scores = ForwardOutputs(
        None,
        pad_rows(ref_logprobs) if config.algorithm.use_reference else None,
        None if full_kl is None else pad_rows(full_kl),
        pad_rows(values) if config.has_critic else None,
        None if last_values is None else jnp.array(last_values, jnp.float32),
    )
    if step_rewards is not None:
        step_rewards = jnp.array(
            [[*row, *[0.0] * (T - len(row))] for row in step_rewards], jnp.float32
        )
    return tiny.estimate_experience(
        config,
        control or first_control(config.algorithm.kl_ctrl, config.reward, config.critic),
        sequences,
        pad_rows(logprobs),
        scores,
        jnp.array(rewards, jnp.float32),
        step_rewards,
        figures or {},
    )


def valid_entries(array, lengths):
    """Return the entries of [B, T] within the responses; all others must be 0."""
    array = np.asarray(array)
    assert not array[np.arange(T) >= np.asarray(lengths)[:, None]].any()
    return [array[b, :n].tolist() for b, n in enumerate(lengths)]


RAW = dict(algorithm__whiten_advantages=False)


def test_penalties_come_after_normalisation_and_clip():
    config = tiny.config(
        reward__normalize="running",
        reward__clip=1.0,
        reward__missing_eos_penalty=0.25,
        reward__length_penalty=0.01,
        reward__overlong_buffer_len=4,
        reward__overlong_penalty_factor=0.8,
        **RAW,
    )
    # Mean 2, deviation sqrt(3): -1.155 and 0.577 twice, the first clipped to -1. The last 4 of the
    # 10 tokens are the buffer.
    experience, metrics = estimate(config, [0, 3, 3, 2], [1, 8, 10, 6], [False, False, True, False])
    scores = [
        -1 - 0.01,
        1 / np.sqrt(1.5) - 0.08 - 0.4,
        1 / np.sqrt(1.5) - 0.1 - 0.8 - 0.25,
        0 - 0.06,
    ]
    np.testing.assert_allclose(
        [row[-1] for row in valid_entries(experience.returns, [1, 8, 10, 6])], scores, atol=1e-6
    )
    assert float(metrics["reward/mean"]) == 2
    assert float(metrics["reward/shaped_mean"]) == pytest.approx(np.mean(scores))
    assert float(experience.control.moments["rewards"].count) == 4


def test_running_moments_go_on_and_those_of_an_evaluation_do_not():
    for kind, mean, count in (("running", 4.0, 4), ("none", 2.0, 2)):
        config = tiny.config(reward__normalize=kind, **RAW)
        before = moments.update_moments(moments.empty_moments(), jnp.array([1.0, 3.0]), jnp.ones(2))
        experience, _ = estimate(
            config, [5.0, 7.0], [1, 1], control=Control(jnp.float32(0), {"rewards": before})
        )
        after = experience.control.moments["rewards"]
        assert (float(after.mean), float(after.count)) == (mean, count)
        # The deviation of 1, 3, 5 and 7 is sqrt(5), that of 1 and 3 alone is 1.
        deviation = np.sqrt(5.0) if kind == "running" else 1.0
        scores = [[(5 - mean) / deviation], [(7 - mean) / deviation]]
        np.testing.assert_allclose(valid_entries(experience.returns, [1, 1]), scores, rtol=1e-6)


def test_only_a_truncated_response_is_bootstrapped():
    config = tiny.config(
        algorithm__bootstrap_truncated=True, algorithm__gamma=0.5, algorithm__lam=0.0, **RAW
    )
    experience, _ = estimate(
        config, [1.0, 1.0], [2, 2], [True, False], [[3.0, 5.0]] * 2, last_values=[8.0, 8.0]
    )
    # One-step errors: 0 + 0.5 x 5 - 3, then 1 + 0.5 x 8 - 5 if truncated and 1 - 5 if ended.
    np.testing.assert_allclose(
        valid_entries(experience.advantages, [2, 2]), [[-0.5, 0.0], [-0.5, -4.0]]
    )


def test_the_value_bootstrapped_from_is_in_units_of_reward():
    # Mean 2, deviation 3: the critic's 2 for the final state is a value of 8, its 0 and 1 are 2, 5.
    returns_so_far = moments.Moments(jnp.float32(4), jnp.float32(2), jnp.float32(36))
    config = tiny.config(
        algorithm__bootstrap_truncated=True,
        algorithm__gamma=0.5,
        algorithm__lam=0.0,
        critic__normalize_values=True,
        **RAW,
    )
    experience, _ = estimate(
        config,
        [1.0],
        [2],
        [True],
        [[0.0, 1.0]],
        last_values=[2.0],
        control=Control(jnp.float32(0), {"returns": returns_so_far}),
    )
    # One-step errors: 0 + 0.5 x 5 - 2 and 1 + 0.5 x 8 - 5.
    np.testing.assert_allclose(valid_entries(experience.advantages, [2]), [[0.5, 0.0]], atol=1e-5)


def test_the_critics_lambda_is_the_actors_unless_set():
    config = tiny.config(algorithm__lam=0.0, algorithm__lam_length_alpha=1.0, **RAW)
    experience, _ = estimate(config, [4.0], [3], values=[[1.0, 2.0, 3.0]])
    # One step each: the next value, and at the end the score.
    np.testing.assert_allclose(valid_entries(experience.returns, [3]), [[2.0, 3.0, 4.0]])


def test_the_critic_can_have_another_lambda():
    config = tiny.config(algorithm__lam=0.0, algorithm__critic_lam=1.0, **RAW)
    experience, _ = estimate(config, [4.0], [3], values=[[1.0, 2.0, 3.0]])
    np.testing.assert_allclose(valid_entries(experience.advantages, [3]), [[1.0, 1.0, 1.0]])
    # The score, independent of the values.
    np.testing.assert_allclose(valid_entries(experience.returns, [3]), [[4.0, 4.0, 4.0]])


def test_turns_of_dialogues():
    """Two turns; the second starts right after the first, as after an empty observation."""
    starts = jnp.array([[True, False, True, False] + [False] * (T - 4)])
    options = {"algorithm__adv_estimator": "turn_gae", "algorithm__turn_lam": 0.5, **RAW}
    inputs = {"values": [[1.0, 90.0, 2.0, 90.0]], "step_rewards": [[0.0, 0.5, 0.0, 0.0]]}
    experience, metrics = estimate(tiny.config(**options), [4.0], [4], turn_starts=starts, **inputs)
    # Errors 0.5 + 2 - 1 = 1.5 and 4 - 2 = 2; 1.5 + 2/2 = 2.5.
    assert valid_entries(experience.advantages, [4]) == [[2.5, 2.5, 2.0, 2.0]]
    assert valid_entries(experience.returns, [4]) == [[3.5, 0.0, 4.0, 0.0]]
    np.testing.assert_array_equal(experience.value_mask, starts)
    # Metrics are of the values that are learned.
    assert float(metrics["critic/values_mean"]) == 1.5
    assert float(metrics["critic/returns_mean"]) == 3.75
    # The critic's lambda is of turns, too.
    config = tiny.config(**options, algorithm__critic_lam=1.0)
    experience, _ = estimate(config, [4.0], [4], turn_starts=starts, **inputs)
    assert valid_entries(experience.advantages, [4]) == [[2.5, 2.5, 2.0, 2.0]]
    assert valid_entries(experience.returns, [4]) == [[4.5, 0.0, 4.0, 0.0]]
    # Where nothing says when turns start, the response is one.
    experience, _ = estimate(tiny.config(**options), [4.0], [4], **inputs)
    assert valid_entries(experience.advantages, [4]) == [[3.5] * 4]


def test_turns_and_their_tokens_in_dialogues():
    starts = jnp.array([[True, False, True, False] + [False] * (T - 4)])
    lams = {"algorithm__lam": 0.5, "algorithm__turn_lam": 0.0, "algorithm__turn_gamma": 0.5}
    config = tiny.config(algorithm__adv_estimator="bi_level_gae", **lams, **RAW)
    values = [[1.0, 3.0, 2.0, 6.0]]
    experience, _ = estimate(config, [4.0], [4], values=values, turn_starts=starts)
    # Errors 3 - 1 = 2 and 2/2 - 3 = -2, then 6 - 2 = 4 and 4 - 6 = -2.
    assert valid_entries(experience.advantages, [4]) == [[1.0, -2.0, 3.0, -2.0]]
    assert experience.value_mask is None
    config = tiny.config(
        algorithm__adv_estimator="bi_level_gae", algorithm__critic_lam=1.0, **lams, **RAW
    )
    experience, _ = estimate(config, [4.0], [4], values=values, turn_starts=starts)
    assert valid_entries(experience.returns, [4]) == [[2.0, 2.0, 4.0, 4.0]]


def test_moments_of_returns_are_of_the_values_that_are_learned():
    config = tiny.config(algorithm__adv_estimator="turn_gae", critic__normalize_values=True, **RAW)
    experience, _ = estimate(config, [1.0, 3.0], [2, 4])
    after = experience.control.moments["returns"]
    assert (float(after.count), float(after.mean), float(after.m2)) == (2, 2, 2)
    assert valid_entries(experience.returns, [2, 4]) == [[-1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


def test_masked_responses_are_not_kept_and_do_not_whiten():
    config = tiny.config(algorithm__mask_truncated=True)
    experience, metrics = estimate(config, [1.0, 3.0, 1000.0], [1, 1, T], [False, False, True])
    assert experience.sample_mask.tolist() == [True, True, False]
    np.testing.assert_allclose(experience.advantages[:2, 0], [-1.0, 1.0], rtol=1e-5)
    assert not np.any(experience.advantages[2])
    assert float(metrics["response_length/masked_share"]) == pytest.approx(1 / 3)


def test_moments_of_returns_leave_out_masked_responses():
    config = tiny.config(
        algorithm__mask_truncated=True, critic__normalize_values=True, algorithm__lam=1.0, **RAW
    )
    experience, _ = estimate(config, [1.0, 3.0, 1000.0], [1, 1, T], [False, False, True])
    after = experience.control.moments["returns"]
    assert (float(after.count), float(after.mean), float(after.m2)) == (2, 2, 2)


# Scores 1 and 3 for one prompt and 0 and 0 for another, minus a KL penalty on the second sample's
# first token.
PENALTY = 0.5 * np.log(2)
HALF = (2 - PENALTY) / 2  # of the difference between the first two


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        ("grpo", [-(0.5**0.5)] * 2, [0.5**0.5] * 2),
        ("rloo", [-2 * HALF] * 2, [2 * HALF] * 2),
        ("reinforce_plus_plus_baseline", [-HALF] * 2, [HALF] * 2),
        ("reinforce_plus_plus", [0.5, 1.0], [1.5 - PENALTY, 3.0]),
    ],
)
def test_without_a_critic(estimator, first, second):
    config = tiny.config(
        algorithm__adv_estimator=estimator,
        rollout__n=2,
        algorithm__use_kl_in_reward=True,
        algorithm__kl_ctrl__kl_coef=0.5,
        algorithm__gamma=0.5,
        **RAW,
    )
    lengths = [2, 2, 1, 1]
    experience, metrics = estimate(
        config,
        [1, 3, 0, 0],
        lengths,
        logprobs=[[0, 0], [np.log(0.5), 0], [0], [0]],
        ref_logprobs=[[0, 0], [np.log(0.25), 0], [0], [0]],
    )
    assert experience.values is None and experience.returns is None
    assert not any(name.startswith("critic/") for name in metrics)
    advantages = valid_entries(experience.advantages, lengths)
    for ours, expected in zip(advantages, [first, second, [0.0], [0.0]], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_an_estimator_gets_the_figures_that_its_parameters_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def longest(rewards, mask, n, short, right, scale=2.0):\n"
        "    return scale * (10 * right + short)\n"
    )
    config = tiny.config(algorithm__adv_estimator=f"{tmp_path}/mine.py:longest", **RAW)
    figures = {"right": jnp.float32([1, 0]), "short": jnp.float32([3, 4])}
    experience, _ = estimate(config, [5, 6], [2, 1], figures=figures)
    assert valid_entries(experience.advantages, [2, 1]) == [[26, 26], [8]]
    with pytest.raises(UserError, match=r"mine.py:longest': asks for 'short', a number that a rew"):
        estimate(config, [5, 6], [2, 1])


@pytest.mark.parametrize("per_token", [False, True])
def test_an_estimator_of_ones_own(per_token, tmp_path):
    """It gets the rewards of tokens, the mask and n; what it returns under the mask is ignored."""
    result = "scores[:, None] + jnp.where(mask, 0, jnp.nan)" if per_token else "scores"
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n"
        "def first(rewards, mask, n):\n"
        "    groups = rewards.sum(1).reshape(-1, n)\n"
        "    scores = (groups - groups[:, :1]).reshape(-1)\n"
        f"    return {result}, {{'best': scores.max()}}\n"
    )
    estimator = f"{tmp_path}/mine.py:first"
    config = tiny.config(algorithm__adv_estimator=estimator, rollout__n=2, **RAW)
    lengths = [2, 1, 1, 1]
    experience, metrics = estimate(config, [1, 3, 5, 2], lengths)
    assert experience.values is None
    assert float(metrics["advantages/best"]) == 2
    advantages = [list(row) for row in valid_entries(experience.advantages, lengths)]
    assert advantages == [[0, 0], [2], [0], [-3]]
    assert np.isfinite(experience.advantages).all()


def test_a_kl_estimator_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text("def cubed(log_ratio):\n    return log_ratio**3 + 1\n")
    config = tiny.config(
        algorithm__kl_penalty=f"{tmp_path}/mine.py:cubed",
        algorithm__use_kl_in_reward=True,
        algorithm__kl_ctrl__kl_coef=0.5,
    )
    _, metrics = estimate(config, [3.0], [2], logprobs=[[-1.0, -2.0]], ref_logprobs=[[-2.0, -1.0]])
    # 1 + 1 and -1 + 1, halved; none of it where there is no token.
    assert float(metrics["kl/reference"]) == pytest.approx(1.0)
    assert float(metrics["reward/shaped_mean"]) == pytest.approx(2.0)


def test_what_is_whitened_unless_said():
    whitened = {}
    for estimator in ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        config = tiny.config(algorithm__adv_estimator=estimator, rollout__n=2)
        experience, _ = estimate(config, [1.0, 4.0], [1, 1])
        whitened[estimator] = np.allclose(
            valid_entries(experience.advantages, [1, 1]), [[-1.0], [1.0]]
        )
    assert whitened == {
        "gae": True,
        "grpo": False,
        "rloo": False,
        "reinforce_plus_plus": True,
        "reinforce_plus_plus_baseline": True,
    }


def test_whitened_rewards_keep_their_mean():
    config = tiny.config(
        algorithm__whiten_rewards=True, algorithm__gamma=0.0, algorithm__lam=0.0, **RAW
    )
    experience, _ = estimate(config, [2.0, 6.0], [1, 1])
    # Mean 4, deviation 2.
    np.testing.assert_allclose(
        valid_entries(experience.advantages, [1, 1]), [[3.0], [5.0]], rtol=1e-6
    )


def test_normalised_values_stand_for_the_same_advantages():
    # Mean 2, deviation 3.
    returns_so_far = moments.Moments(jnp.float32(4), jnp.float32(2), jnp.float32(36))
    plain, normalised = (
        tiny.config(critic__normalize_values=choice, algorithm__lam=0.5, **RAW)
        for choice in (False, True)
    )
    plain_experience, _ = estimate(plain, [7.0], [2], values=[[2.0, 5.0]])
    normalised_experience, _ = estimate(
        normalised,
        [7.0],
        [2],
        values=[[0.0, 1.0]],
        control=Control(jnp.float32(0), {"returns": returns_so_far}),
    )
    np.testing.assert_allclose(
        normalised_experience.advantages, plain_experience.advantages, rtol=1e-5
    )
    # The critic's own output, which the loss clips around.
    np.testing.assert_allclose(normalised_experience.values[0, :2], [0.0, 1.0])
    # Returns 6 and 7 are merged with mean 2 and m2 36 of four: mean 21.5/6 = 3.5, m2 36.5 + 4.5^2 x
    # 4 x 2 / 6 = 63.5.
    after = normalised_experience.control.moments["returns"]
    assert (float(after.mean), float(after.m2)) == pytest.approx((3.5, 63.5), rel=1e-5)
    deviation = np.sqrt(63.5 / 6)
    np.testing.assert_allclose(
        valid_entries(normalised_experience.returns, [2])[0],
        [2.5 / deviation, 3.5 / deviation],
        rtol=1e-5,
    )


def test_rewards_of_steps_are_earned_where_they_end():
    config = tiny.config(algorithm__lam=1.0, **RAW)
    experience, metrics = estimate(
        config, [1.0], [3], values=[[0.0] * 3], step_rewards=[[0.5, 0.0, -2.0]]
    )
    np.testing.assert_allclose(valid_entries(experience.returns, [3]), [[-0.5, -1.0, -1.0]])
    assert float(metrics["reward/mean"]) == -0.5


def test_rewards_that_cancel_in_another_order_are_equal_in_a_group():
    """1 - 0.9 - 0.1 is 2e-8 in float32, and -0.9 - 0.1 + 1 is 0."""
    config = tiny.config(algorithm__adv_estimator="grpo", rollout__n=2, **RAW)
    steps = [[1.0, -0.9, -0.1], [-0.9, -0.1, 1.0]]
    experience, metrics = estimate(config, [0.0, 0.0], [3, 3], step_rewards=steps)
    assert metrics["reward/std"] > 0
    np.testing.assert_array_equal(experience.advantages, 0)


def test_a_broken_reward_does_not_break_the_moments():
    config = tiny.config(reward__normalize="running", critic__normalize_values=True)
    broken, _ = estimate(config, [1.0, np.inf], [1, 1])
    assert all(float(moment.count) == 0 for moment in broken.control.moments.values())
    after, _ = estimate(config, [1.0, 3.0], [1, 1], control=broken.control)
    assert float(after.control.moments["rewards"].mean) == 2


def test_the_whole_kl_is_taken_where_it_is_given():
    config = tiny.config(
        algorithm__kl_penalty="full",
        algorithm__use_kl_in_reward=True,
        algorithm__kl_ctrl__kl_coef=2.0,
        algorithm__gamma=0.0,
        algorithm__lam=0.0,
        **RAW,
    )
    experience, metrics = estimate(
        config, [0.0], [2], full_kl=[[0.25, 0.5]], logprobs=[[-1.0, -1.0]]
    )
    np.testing.assert_allclose(valid_entries(experience.advantages, [2]), [[-0.5, -1.0]])
    assert float(metrics["kl/reference"]) == 0.375


ADAPTIVE = {"type": "adaptive", "kl_coef": 1.0, "horizon": 8}


@pytest.mark.parametrize(
    ("options", "coefficients"),
    [
        ({"type": "fixed", "kl_coef": 0.3}, [0.3, 0.3]),
        # KL 0.5 + 0.7 for the one response, against a target of 1 per response, then of 0.5 per
        # token. The error is clipped to 0.2.
        (ADAPTIVE | {"target_kl": 1.0, "target_unit": "sequence"}, [1.0, 1 + 0.2 / 8]),
        (ADAPTIVE | {"target_kl": 0.5}, [1.0, 1 + 0.2 / 8]),
    ],
)
def test_the_coefficient_of_the_next_step(options, coefficients):
    config = tiny.config(
        algorithm__use_kl_in_reward=True,
        **{f"algorithm__kl_ctrl__{name}": value for name, value in options.items()},
    )
    first = first_control(config.algorithm.kl_ctrl, config.reward, config.critic)
    assert float(first.kl_coef) == pytest.approx(coefficients[0])
    logprobs = dict(logprobs=[[0.5, 0.7]], ref_logprobs=[[0.0, 0.0]])
    experience, metrics = estimate(config, [0.0], [2], **logprobs)
    assert float(metrics["kl/coefficient"]) == pytest.approx(coefficients[0])
    if options.get("target_unit") == "sequence":
        assert float(metrics["kl/reference_per_response"]) == pytest.approx(0.5 + 0.7)
    assert float(experience.control.kl_coef) == pytest.approx(coefficients[1])


@pytest.mark.parametrize(
    ("kind", "figure"),
    [("k1", 0.5), ("abs", 1.5), ("k2", 1.25), ("k3", (np.e - 2 + np.exp(-2) + 1) / 2)],
)
def test_the_kl_is_estimated_as_asked(kind, figure):
    config = tiny.config(algorithm__kl_penalty=kind, algorithm__use_kl_in_reward=True, **RAW)
    _, metrics = estimate(config, [0.0], [2], logprobs=[[-2.0, -1.0]], ref_logprobs=[[-1.0, -3.0]])
    assert float(metrics["kl/reference"]) == pytest.approx(figure)


def test_the_variance_of_values_within_responses_by_hand():
    """Responses (0, 2) and (5): the variance is 2/3 about their means 1 and 5, 38/9 about 7/3."""
    values = jnp.array([[0.0, 2.0], [5.0, jnp.nan]])
    mask = jnp.array([[1, 1], [1, 0]])
    metrics = critic_metrics(values, values, mask)
    assert metrics["critic/values_within_responses"] == pytest.approx((2 / 3) / (38 / 9))
    flat = critic_metrics(jnp.ones((2, 2)), values, mask)
    assert flat["critic/values_within_responses"] == 0
    by_rounding = critic_metrics(jnp.array([[1, 1 + 1e-7], [1, 1]]), values, mask)
    assert by_rounding["critic/values_within_responses"] == 0
