"""Rewards and scores of a rollout → Experience: shaped rewards, advantages, importance weights, and the next step's control."""

import functools

import jax
import jax.numpy as jnp

from jax_ppo.config.schema import Config
from jax_ppo.kernels import advantages as advantages_lib
from jax_ppo.kernels import importance, kl, masked, shaping
from jax_ppo.kernels import moments as moments_lib
from jax_ppo.ppo.scoring import Scores
from jax_ppo.training.kl_schedule import kl_coefficient
from jax_ppo.types import Control, Experience, Sequences


@functools.partial(jax.jit, static_argnames=("config",))
def estimate(
    config: Config,
    step,
    control: Control,
    sequences: Sequences,
    sampled_BxT,
    scores: Scores,
    rewards_B,
    step_rewards_BxT,
) -> tuple[Experience, dict]:
    """Shapes the rewards and estimates advantages.

    r_t = [t is the last token] * score + step reward - kl_coef * KL_t (Ziegler et al. 2019, arXiv 1909.08593), where the score
    is the reward after `shaped_scores`. Returns are taken before advantages are whitened over the whole rollout.

    Args:
      step: int32 scalar, steps done before.
      control: of this step.
      sampled_BxT: float32 [B, T], Rollout.logprobs: the old log-probs where `scores` has none, else measured against them:
        the same numbers from another program, or those of older weights.
      rewards_B: float32 [B], the reward of each sample.
      step_rewards_BxT: float32 [B, T], earned within the responses; None without such.

    Returns:
      the experience, and metrics: scalars on the mesh.
    """
    options, lengths, truncated = config.algorithm, sequences.lengths, sequences.truncated
    old_logprobs = sampled_BxT if scores.old_logprobs is None else scores.old_logprobs
    mask = sequences.action_mask
    kept = ~truncated if options.mask_truncated else jnp.ones_like(truncated)
    taught, moments = mask & kept[:, None], dict(control.moments)

    if config.reward.normalize == "running":
        moments["rewards"] = moments_lib.update_moments(
            moments["rewards"], rewards_B, jnp.ones_like(truncated)
        )
    earned_B = rewards_B if step_rewards_BxT is None else rewards_B + step_rewards_BxT.sum(1)
    shaped_B = shaped_scores(config, moments.get("rewards"), rewards_B, lengths, truncated)
    token_rewards = jnp.where(last_actions(mask), shaped_B[:, None], 0.0)
    if step_rewards_BxT is not None:
        token_rewards += move_to_actions(step_rewards_BxT, mask)
    divergence = _divergence(options, old_logprobs, scores, mask)
    if options.use_kl_in_reward:
        token_rewards -= control.kl_coef * divergence
    metrics = {
        "reward/mean": earned_B.mean(),
        "reward/std": earned_B.std(),
        "reward/min": earned_B.min(),
        "reward/max": earned_B.max(),
        "reward/shaped_mean": masked.masked_sum(token_rewards, mask) / len(rewards_B),
        "kl/reference": masked.masked_mean(divergence, mask),
        "kl/coefficient": control.kl_coef,
        "response_length/mean": lengths.mean(dtype=jnp.float32),
        "response_length/min": lengths.min(),
        "response_length/max": lengths.max(),
    }
    if options.mask_truncated:
        metrics["response_length/masked_share"] = 1 - kept.mean(dtype=jnp.float32)
    if options.whiten_rewards:
        token_rewards = masked.whiten(token_rewards, mask, shift_mean=False)

    returns = None
    if config.has_critic:
        advantages, returns, of_critic = _with_critic(
            config, token_rewards, mask, taught, scores, moments, sequences
        )
        metrics |= of_critic
    else:
        advantages = _without_critic(config, token_rewards, mask)
    metrics |= {
        "advantages/mean": masked.masked_mean(advantages, taught),
        "advantages/std": jnp.sqrt(masked.masked_variance(advantages, taught)),
    }
    if config.whitens_advantages:
        advantages = masked.whiten(advantages, taught, shift_mean=options.whiten_shift_mean)
    if config.critic.normalize_values:
        moments["returns"] = moments_lib.update_moments(moments["returns"], returns, taught)
        of_returns = moments["returns"]
        returns = masked.zero_outside(
            (returns - of_returns.mean) / moments_lib.moments_std(of_returns), mask
        )

    if scores.old_logprobs is not None:
        mismatch = importance.mismatch(old_logprobs, sampled_BxT, mask)
        metrics |= {f"rollout/{name}": figure for name, figure in mismatch.items()}
    weights = None
    if options.rollout_is != "none":
        threshold = options.rollout_is_threshold
        weights = importance.truncated_weights(
            old_logprobs, sampled_BxT, mask, options.rollout_is, threshold
        )
        metrics |= {
            "rollout/importance_mean": masked.masked_mean(weights, mask),
            "rollout/importance_cut_share": masked.masked_mean(
                (weights >= threshold).astype(jnp.float32), mask
            ),
        }
    coefficient = _next_coefficient(options.kl_ctrl, step, control.kl_coef, divergence, mask)
    experience = Experience(
        sequences,
        kept,
        old_logprobs,
        scores.ref_logprobs,
        scores.values,
        advantages,
        returns,
        weights,
        Control(coefficient, moments),
    )
    return experience, metrics


def shaped_scores(config: Config, moments, rewards_B, lengths_B, truncated_B):
    """Scores of samples, in this order: normalised, clipped, then with the penalties of how they end and how long they are.

    Lengths here are of whole responses, with the tokens that the policy did not choose: what a long response costs is its whole
    length.
    """
    options, longest = config.reward, config.data.max_response_length
    if moments is not None:
        rewards_B = shaping.normalize_scores(rewards_B, moments, options.normalize_shift)
    if options.clip is not None:
        rewards_B = jnp.clip(rewards_B, -options.clip, options.clip)
    if options.overlong_buffer_len:
        rewards_B += shaping.soft_overlong_penalty(
            lengths_B, longest, options.overlong_buffer_len, options.overlong_penalty_factor
        )
    return (
        rewards_B - options.missing_eos_penalty * truncated_B - options.length_penalty * lengths_B
    )


def last_actions(mask_BxT: jax.Array) -> jax.Array:
    """Return a bool [B, T] that is True on the last action token of each response, which earns the response's score."""
    actions_left_BxT = jnp.cumsum(mask_BxT[:, ::-1], axis=1)[:, ::-1]
    return mask_BxT & (actions_left_BxT == 1)


def move_to_actions(rewards_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
    """Move each reward that was earned on a token of the environment to the last action token before it.

    A reward before the first action token moves to that one; in a response without action tokens there is none to move to, and
    the reward stays where no loss reads it.
    """
    columns_T = jnp.arange(mask_BxT.shape[1])
    previous_BxT = jax.lax.cummax(jnp.where(mask_BxT, columns_T, -1), axis=1)
    first_Bx1 = jnp.argmax(mask_BxT, axis=1, keepdims=True)
    target_BxT = jnp.where(previous_BxT < 0, first_Bx1, previous_BxT)
    return jax.vmap(
        lambda rewards_T, target_T: jnp.zeros_like(rewards_T).at[target_T].add(rewards_T)
    )(rewards_BxT, target_BxT)


def _divergence(options, old_logprobs, scores, mask):
    """KL to the reference at each token, [B, T]; 0 without a reference."""
    if scores.ref_logprobs is None:
        return jnp.zeros(mask.shape, jnp.float32)
    if scores.kl is not None:
        return scores.kl
    return kl.kl_estimate(old_logprobs, scores.ref_logprobs, mask, options.kl_penalty)


def _with_critic(config, token_rewards, mask, taught, scores, moments, sequences):
    """GAE: advantages, returns, metrics. The critic's returns have a gamma and a lambda of their own if asked."""
    options, counts_B = config.algorithm, mask.sum(1)
    values, after = scores.values, jnp.zeros(len(counts_B), jnp.float32)
    if options.bootstrap_truncated:
        after = scores.last_values
    if config.critic.normalize_values:
        values, after = (
            moments["returns"].mean + moments_lib.moments_std(moments["returns"]) * x
            for x in (values, after)
        )
    after = jnp.where(sequences.truncated & options.bootstrap_truncated, after, 0.0)
    gae = jax.vmap(advantages_lib.gae, in_axes=(0, 0, 0, None, 0, 0))
    lam = jnp.full(len(counts_B), options.lam)
    if options.lam_length_alpha is not None:
        lam = advantages_lib.length_adaptive_lam(counts_B, options.lam_length_alpha)
    advantages, returns = gae(token_rewards, values, mask, options.gamma, lam, after)
    if (options.critic_gamma, options.critic_lam, options.lam_length_alpha) != (None, None, None):
        gamma = options.gamma if options.critic_gamma is None else options.critic_gamma
        critic_lam = options.lam if options.critic_lam is None else options.critic_lam
        _, returns = gae(
            token_rewards, values, mask, gamma, jnp.full(len(counts_B), critic_lam), after
        )
    return (
        advantages,
        returns,
        {
            "critic/returns_mean": masked.masked_mean(returns, taught),
            "critic/returns_std": jnp.sqrt(masked.masked_variance(returns, taught)),
            "critic/values_mean": masked.masked_mean(values, taught),
            "critic/values_std": jnp.sqrt(masked.masked_variance(values, taught)),
            "critic/explained_variance": masked.explained_variance(values, returns, taught),
        },
    )


def _without_critic(config, token_rewards, mask):
    """Advantages of a whole response against the prompt's others, or of each token's reward to go."""
    options, n = config.algorithm, config.rollout.n
    if options.adv_estimator == "reinforce_plus_plus":
        return jax.vmap(advantages_lib.reward_to_go, in_axes=(0, 0, None))(
            token_rewards, mask, options.gamma
        )
    estimators = {
        "grpo": functools.partial(advantages_lib.grpo, by_std=options.norm_adv_by_std_in_grpo),
        "rloo": advantages_lib.rloo,
        "reinforce_plus_plus_baseline": advantages_lib.group_mean_baseline,
    }
    of_responses = estimators[options.adv_estimator](
        masked.masked_sum(token_rewards, mask, axis=1), n
    )
    return jnp.where(mask, of_responses[:, None], 0.0)


def _next_coefficient(options, step, coefficient, divergence, mask):
    """Of the KL, for the step after this one."""
    if options.type != "adaptive":
        return kl_coefficient(options, step + 1)
    current = (
        masked.masked_mean(divergence, mask)
        if options.target_unit == "token"
        else masked.masked_sum(divergence, mask) / len(mask)
    )
    moved = kl.adaptive_kl_coef(
        coefficient, current, options.target_kl, options.horizon, len(mask), options.error_clip
    )
    return jnp.where(
        jnp.isfinite(moved), moved, coefficient
    )  # one broken rollout must not break all that follow
