"""From scores and rewards of a rollout to the experience that the update learns from.

`estimate_experience` is a pipeline: shape rewards, subtract the KL penalty, estimate advantages,
normalize returns, whiten, weight by importance, and set the next step's control. Each step is a
function that returns its result with the metrics that describe it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jax_ppo.config.schema import Algorithm, Config, KLControl, Reward
from jax_ppo.kernels import advantages as estimators
from jax_ppo.kernels import importance, kl, masked, shaping
from jax_ppo.kernels import moments as running_moments
from jax_ppo.kernels.moments import Moments
from jax_ppo.ppo.scoring import Scores
from jax_ppo.training.kl_schedule import kl_coefficient
from jax_ppo.types import Control, Experience, Sequences

Metrics = dict[str, jax.Array]
Tokens = Float32[Array, "B T"]
Mask = Bool[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class ExperienceOptions:
    """What `estimate_experience` reads; a static argument of the compiled function.

    Attributes:
      algorithm: the section of the config.
      reward: the section of the config.
      max_response_length: T, the length beyond which responses are cut off.
      responses_per_prompt: n, the size of the groups that are compared without a critic.
      has_critic: advantages come from a critic.
      whitens_advantages: advantages are whitened over the rollout.
      normalizes_values: the critic learns normalized returns.
    """

    algorithm: Algorithm
    reward: Reward
    max_response_length: int
    responses_per_prompt: int
    has_critic: bool
    whitens_advantages: bool
    normalizes_values: bool

    @classmethod
    def from_config(cls, config: Config) -> "ExperienceOptions":
        """Collect what the estimate reads."""
        return cls(
            algorithm=config.algorithm,
            reward=config.reward,
            max_response_length=config.data.max_response_length,
            responses_per_prompt=config.rollout.n,
            has_critic=config.has_critic,
            whitens_advantages=config.whitens_advantages,
            normalizes_values=config.critic.normalize_values,
        )


class Masks(NamedTuple):
    """What counts.

    Attributes:
      actions: the response tokens that the policy chose.
      samples: False for samples that are excluded from all losses.
      loss: the action tokens of the samples that are not excluded.
    """

    actions: Mask
    samples: Bool[Array, " B"]
    loss: Mask


class Estimates(NamedTuple):
    """Advantages, raw or whitened, and the critic's targets (`None` without a critic)."""

    advantages: Tokens
    returns: Tokens | None


@functools.partial(jax.jit, static_argnames=("options",))
def estimate_experience(
    options: ExperienceOptions,
    step: Int32[Array, ""],
    control: Control,
    sequences: Sequences,
    sampled_logprobs: Tokens,
    scores: Scores,
    rewards: Float32[Array, " B"],
    step_rewards: Tokens | None,
) -> tuple[Experience, Metrics]:
    """Shape rewards and estimate advantages.

        r_t = [t is the last action] * score + step reward - kl_coef * KL_t

    (Ziegler et al. 2019, arXiv 1909.08593), where the score is the reward after `shape_scores`.
    Returns are computed before advantages are whitened over the whole rollout.

    Args:
      options: see `ExperienceOptions`.
      step: number of completed steps.
      control: of this step.
      sequences: the rollout.
      sampled_logprobs: `Rollout.logprobs`. They are the old log-probs if `scores` has none;
        otherwise the two are compared: equal numbers from another program, or older weights.
      scores: see `Scores`.
      rewards: the reward of each sample.
      step_rewards: rewards earned within the responses; `None` if there are none.

    Returns:
      The experience, and metrics: scalars on the mesh.
    """
    algorithm, moments = options.algorithm, control.moments
    old_logprobs = sampled_logprobs if scores.old_logprobs is None else scores.old_logprobs
    masks = select_tokens(algorithm, sequences)

    reward_moments = update_reward_moments(options.reward, moments.get("rewards"), rewards)
    token_rewards, metrics = shape_rewards(
        options, reward_moments, sequences, masks, rewards, step_rewards
    )
    kl_tokens = reference_kl(algorithm, old_logprobs, scores, masks.actions)
    token_rewards, kl_metrics = add_kl_penalty(
        algorithm, control.kl_coef, token_rewards, kl_tokens, masks.actions
    )
    if algorithm.whiten_rewards:
        token_rewards = masked.whiten(token_rewards, masks.actions, shift_mean=False)

    raw, advantage_metrics = estimate_advantages(
        options, token_rewards, sequences, masks, scores, moments.get("returns")
    )
    whitened = whiten_advantages(options, raw, masks)
    estimates, return_moments = normalize_returns(options, whitened, masks, moments.get("returns"))
    weights, weight_metrics = weight_by_importance(
        algorithm, scores, old_logprobs, sampled_logprobs, masks.actions
    )
    experience = Experience(
        sequences=sequences,
        sample_mask=masks.samples,
        old_logprobs=old_logprobs,
        ref_logprobs=scores.ref_logprobs,
        values=scores.values,
        advantages=estimates.advantages,
        returns=estimates.returns,
        importance=weights,
        control=next_control(
            algorithm.kl_ctrl,
            step,
            control.kl_coef,
            kl_tokens,
            masks.actions,
            {"rewards": reward_moments, "returns": return_moments},
        ),
    )
    return experience, metrics | kl_metrics | advantage_metrics | weight_metrics


def select_tokens(algorithm: Algorithm, sequences: Sequences) -> Masks:
    """Return which tokens count; `mask_truncated` excludes responses that were cut off."""
    actions = sequences.action_mask
    samples = jnp.ones_like(sequences.truncated)
    if algorithm.mask_truncated:
        samples = ~sequences.truncated
    return Masks(actions=actions, samples=samples, loss=actions & samples[:, None])


def update_reward_moments(
    options: Reward, moments: Moments | None, rewards: Float32[Array, " B"]
) -> Moments | None:
    """Return the moments that normalize scores, with this rollout's rewards if they are running."""
    if options.normalize != "running":
        return moments
    assert moments is not None, "running moments start with the first step's control"
    return running_moments.update_moments(moments, rewards, jnp.ones(rewards.shape, bool))


def shape_rewards(
    options: ExperienceOptions,
    moments: Moments | None,
    sequences: Sequences,
    masks: Masks,
    rewards: Float32[Array, " B"],
    step_rewards: Tokens | None,
) -> tuple[Tokens, Metrics]:
    """Return the reward of each token before the KL penalty, [B, T]."""
    earned = rewards if step_rewards is None else rewards + step_rewards.sum(1)
    lengths = sequences.lengths
    metrics = {
        "reward/mean": earned.mean(),
        "reward/std": earned.std(),
        "reward/min": earned.min(),
        "reward/max": earned.max(),
        "response_length/mean": lengths.mean(dtype=jnp.float32),
        "response_length/min": lengths.min(),
        "response_length/max": lengths.max(),
    }
    if options.algorithm.mask_truncated:
        metrics["response_length/masked_share"] = 1 - masks.samples.mean(dtype=jnp.float32)
    scores = shape_scores(
        options.reward, options.max_response_length, moments, rewards, lengths, sequences.truncated
    )
    token_rewards = jnp.where(last_actions(masks.actions), scores[:, None], 0.0)
    if step_rewards is not None:
        token_rewards += move_to_actions(step_rewards, masks.actions)
    return token_rewards, metrics


def shape_scores(
    options: Reward,
    max_response_length: int,
    moments: Moments | None,
    rewards_B: Float32[Array, " B"],
    lengths_B: Int32[Array, " B"],
    truncated_B: Bool[Array, " B"],
) -> Float32[Array, " B"]:
    """Normalize and clip the samples' scores, then subtract penalties for ending and length.

    Lengths count all tokens of a response, including those that the policy did not choose: a
    penalty for length is about the cost of the whole response.
    """
    if moments is not None:
        rewards_B = shaping.normalize_scores(rewards_B, moments, options.normalize_shift)
    if options.clip is not None:
        rewards_B = jnp.clip(rewards_B, -options.clip, options.clip)
    if options.overlong_buffer_len:
        rewards_B += shaping.soft_overlong_penalty(
            lengths_B,
            max_response_length,
            options.overlong_buffer_len,
            options.overlong_penalty_factor,
        )
    return (
        rewards_B - options.missing_eos_penalty * truncated_B - options.length_penalty * lengths_B
    )


def last_actions(mask_BxT: Mask) -> Mask:
    """Return True on the last action token of each response, which earns the response's score."""
    actions_left_BxT = jnp.cumsum(mask_BxT[:, ::-1], axis=1)[:, ::-1]
    return mask_BxT & (actions_left_BxT == 1)


def move_to_actions(rewards_BxT: Tokens, mask_BxT: Mask) -> Tokens:
    """Move each reward on a token of the environment to the last action token before it.

    A reward before the first action token moves to that token. A response without action tokens
    has no place for rewards; they end up under the mask, where no loss reads them.
    """
    columns_T = jnp.arange(mask_BxT.shape[1])
    previous_BxT = jax.lax.cummax(jnp.where(mask_BxT, columns_T, -1), axis=1)
    first_Bx1 = jnp.argmax(mask_BxT, axis=1, keepdims=True)
    target_BxT = jnp.where(previous_BxT < 0, first_Bx1, previous_BxT)

    def move(rewards_T: jax.Array, target_T: jax.Array) -> jax.Array:
        return jnp.zeros_like(rewards_T).at[target_T].add(rewards_T)

    return jax.vmap(move)(rewards_BxT, target_BxT)


def reference_kl(
    algorithm: Algorithm, old_logprobs: Tokens, scores: Scores, actions: Mask
) -> Tokens:
    """Return the KL to the reference at each token; 0 without a reference."""
    if scores.ref_logprobs is None:
        return jnp.zeros(actions.shape, jnp.float32)
    if scores.kl is not None:
        return scores.kl
    return kl.kl_estimate(old_logprobs, scores.ref_logprobs, actions, algorithm.kl_penalty)


def add_kl_penalty(
    algorithm: Algorithm,
    kl_coef: Float32[Array, ""],
    token_rewards: Tokens,
    kl_tokens: Tokens,
    actions: Mask,
) -> tuple[Tokens, Metrics]:
    """Subtract `kl_coef` x KL from each token's reward if the algorithm has a KL in its reward."""
    if algorithm.use_kl_in_reward:
        token_rewards -= kl_coef * kl_tokens
    return token_rewards, {
        "reward/shaped_mean": masked.masked_sum(token_rewards, actions) / len(actions),
        "kl/reference": masked.masked_mean(kl_tokens, actions),
        "kl/coefficient": kl_coef,
    }


def estimate_advantages(
    options: ExperienceOptions,
    token_rewards: Tokens,
    sequences: Sequences,
    masks: Masks,
    scores: Scores,
    return_moments: Moments | None,
) -> tuple[Estimates, Metrics]:
    """Return raw advantages, and returns in units of reward if there is a critic."""
    metrics: Metrics = {}
    if options.has_critic:
        values, final_values = critic_values(options, sequences, scores, return_moments)
        advantages, returns = generalized_advantages(
            options.algorithm, token_rewards, values, final_values, masks.actions
        )
        estimates = Estimates(advantages=advantages, returns=returns)
        metrics = critic_metrics(values, returns, masks.loss)
    else:
        advantages = critic_free_advantages(options, token_rewards, masks.actions)
        estimates = Estimates(advantages=advantages, returns=None)
    metrics |= {
        "advantages/mean": masked.masked_mean(estimates.advantages, masks.loss),
        "advantages/std": jnp.sqrt(masked.masked_variance(estimates.advantages, masks.loss)),
    }
    return estimates, metrics


def critic_values(
    options: ExperienceOptions,
    sequences: Sequences,
    scores: Scores,
    moments: Moments | None,
) -> tuple[Tokens, Float32[Array, " B"]]:
    """Return values in units of reward, and the value that each response bootstraps from.

    The latter is the value of the state after the response's last token, whoever chose that token,
    if the response was truncated and bootstrapping is configured; otherwise it is 0.
    """
    bootstraps = options.algorithm.bootstrap_truncated
    assert scores.values is not None, "GAE needs a critic's values"
    values = scores.values
    final_values = jnp.zeros(len(sequences.truncated), jnp.float32)
    if bootstraps:
        assert scores.last_values is not None, "bootstrapping needs the final states' values"
        final_values = scores.last_values
    if options.normalizes_values:
        assert moments is not None, "normalized values need the moments of returns"
        mean, std = moments.mean, running_moments.moments_std(moments)
        values = mean + std * values
        final_values = mean + std * final_values
    return values, jnp.where(sequences.truncated & bootstraps, final_values, 0.0)


def generalized_advantages(
    algorithm: Algorithm,
    token_rewards: Tokens,
    values: Tokens,
    final_values: Float32[Array, " B"],
    actions: Mask,
) -> tuple[Tokens, Tokens]:
    """Return advantages and returns by GAE; the returns may have a gamma and lambda of their own.

    Steps are actions: tokens that the policy did not choose neither discount nor end an episode.
    """
    samples = len(actions)
    # Lambda and the final value differ from sample to sample.
    gae: Callable[..., tuple[jax.Array, jax.Array]]
    gae = jax.vmap(estimators.gae, in_axes=(0, 0, 0, None, 0, 0))
    lam = jnp.full(samples, algorithm.lam)
    if algorithm.lam_length_alpha is not None:
        lam = estimators.length_adaptive_lam(actions.sum(1), algorithm.lam_length_alpha)
    advantages, returns = gae(token_rewards, values, actions, algorithm.gamma, lam, final_values)

    own_return_options = (algorithm.critic_gamma, algorithm.critic_lam, algorithm.lam_length_alpha)
    if own_return_options != (None, None, None):
        gamma = algorithm.gamma if algorithm.critic_gamma is None else algorithm.critic_gamma
        critic_lam = algorithm.lam if algorithm.critic_lam is None else algorithm.critic_lam
        lam = jnp.full(samples, critic_lam)
        _, returns = gae(token_rewards, values, actions, gamma, lam, final_values)
    return advantages, returns


def critic_metrics(values: Tokens, returns: Tokens, loss_mask: Mask) -> Metrics:
    """Describe returns and values in units of reward."""
    return {
        "critic/returns_mean": masked.masked_mean(returns, loss_mask),
        "critic/returns_std": jnp.sqrt(masked.masked_variance(returns, loss_mask)),
        "critic/values_mean": masked.masked_mean(values, loss_mask),
        "critic/values_std": jnp.sqrt(masked.masked_variance(values, loss_mask)),
        "critic/explained_variance": masked.explained_variance(values, returns, loss_mask),
    }


def critic_free_advantages(
    options: ExperienceOptions, token_rewards: Tokens, actions: Mask
) -> Tokens:
    """Return each token's reward to go, or one advantage per response within its prompt's group."""
    algorithm = options.algorithm
    if algorithm.adv_estimator == "reinforce_plus_plus":
        reward_to_go = jax.vmap(estimators.reward_to_go, in_axes=(0, 0, None))
        return reward_to_go(token_rewards, actions, algorithm.gamma)
    group_estimators: dict[str, Callable[..., jax.Array]] = {
        "grpo": functools.partial(estimators.grpo, by_std=algorithm.norm_adv_by_std_in_grpo),
        "rloo": estimators.rloo,
        "reinforce_plus_plus_baseline": estimators.group_mean_baseline,
    }
    response_rewards = masked.masked_sum(token_rewards, actions, axis=1)
    by_group = group_estimators[algorithm.adv_estimator]
    advantages_B = by_group(response_rewards, options.responses_per_prompt)
    return jnp.where(actions, advantages_B[:, None], 0.0)


def whiten_advantages(options: ExperienceOptions, estimates: Estimates, masks: Masks) -> Estimates:
    """Whiten advantages over the tokens of the whole rollout that count, if configured."""
    if not options.whitens_advantages:
        return estimates
    shift = options.algorithm.whiten_shift_mean
    whitened = masked.whiten(estimates.advantages, masks.loss, shift_mean=shift)
    return estimates._replace(advantages=whitened)


def normalize_returns(
    options: ExperienceOptions, estimates: Estimates, masks: Masks, moments: Moments | None
) -> tuple[Estimates, Moments | None]:
    """Normalize the critic's targets by moments that include them, if configured."""
    if not options.normalizes_values:
        return estimates, moments
    assert moments is not None, "the moments of returns start with the first step's control"
    assert estimates.returns is not None, "only a critic has returns to normalize"
    updated = running_moments.update_moments(moments, estimates.returns, masks.loss)
    normalized = (estimates.returns - updated.mean) / running_moments.moments_std(updated)
    return estimates._replace(returns=masked.zero_outside(normalized, masks.actions)), updated


def weight_by_importance(
    algorithm: Algorithm,
    scores: Scores,
    old_logprobs: Tokens,
    sampled_logprobs: Tokens,
    actions: Mask,
) -> tuple[Tokens | None, Metrics]:
    """Return the importance weights of the sampled tokens, `None` if they are not configured.

    The metrics also compare the sampler's log-probs with those computed again, if any were.
    """
    metrics: Metrics = {}
    if scores.old_logprobs is not None:
        mismatch = importance.mismatch(old_logprobs, sampled_logprobs, actions)
        metrics = {f"rollout/{name}": value for name, value in mismatch.items()}
    if algorithm.rollout_is == "none":
        return None, metrics
    threshold = algorithm.rollout_is_threshold
    weights = importance.truncated_weights(
        old_logprobs, sampled_logprobs, actions, algorithm.rollout_is, threshold
    )
    is_cut = (weights >= threshold).astype(jnp.float32)
    return weights, metrics | {
        "rollout/importance_mean": masked.masked_mean(weights, actions),
        "rollout/importance_cut_share": masked.masked_mean(is_cut, actions),
    }


def next_control(
    options: KLControl,
    step: Int32[Array, ""],
    kl_coef: Float32[Array, ""],
    kl_tokens: Tokens,
    actions: Mask,
    moments: dict[str, Moments | None],
) -> Control:
    """Return the control of the next step: its KL coefficient, and the moments that are kept."""
    return Control(
        kl_coef=_next_kl_coefficient(options, step, kl_coef, kl_tokens, actions),
        moments={name: value for name, value in moments.items() if value is not None},
    )


def _next_kl_coefficient(
    options: KLControl,
    step: Int32[Array, ""],
    kl_coef: Float32[Array, ""],
    kl_tokens: Tokens,
    actions: Mask,
) -> Float32[Array, ""]:
    """Return the schedule's coefficient, or the adaptive controller's after this rollout."""
    if options.type != "adaptive":
        return kl_coefficient(options, step + 1)
    samples = len(actions)
    if options.target_unit == "token":
        current = masked.masked_mean(kl_tokens, actions)
    else:
        current = masked.masked_sum(kl_tokens, actions) / samples
    adapted = kl.adaptive_kl_coef(
        kl_coef, current, options.target_kl, options.horizon, samples, options.error_clip
    )
    # One rollout with non-finite numbers must not spoil all steps that follow.
    return jnp.where(jnp.isfinite(adapted), adapted, kl_coef)
