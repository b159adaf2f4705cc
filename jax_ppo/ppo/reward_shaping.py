"""Rewards of a rollout as rewards of its tokens, with the KL penalty."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jax_ppo.config.schema import Algorithm, Reward
from jax_ppo.kernels import kl, masked, shaping
from jax_ppo.kernels import moments as running_moments
from jax_ppo.kernels.moments import Moments
from jax_ppo.ppo import kl_estimators
from jax_ppo.ppo.experience_types import ExperienceOptions, Mask, Masks, Metrics, Tokens
from jax_ppo.ppo.forward_passes import ForwardOutputs
from jax_ppo.types import Sequences


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
    earned = rewards
    if step_rewards is not None:
        earned = rewards + step_rewards.sum(1)
    lengths = sequences.lengths
    # Metrics describe what was earned, before any shaping.
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
    # The score is earned by the last chosen token, not by a tool's output after it.
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
        # Normalize before clipping: the clip then counts standard deviations.
        rewards_B = shaping.normalize_scores(rewards_B, moments, options.normalize_shift)
    if options.clip is not None:
        rewards_B = jnp.clip(rewards_B, -options.clip, options.clip)
    if options.overlong_buffer_len:
        # Penalties come after normalization, which would change their size relative to a score.
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
    algorithm: Algorithm, old_logprobs: Tokens, scores: ForwardOutputs, actions: Mask
) -> Tokens:
    """Return the KL to the reference at each token; 0 without a reference."""
    if scores.ref_logprobs is None:
        return jnp.zeros(actions.shape, jnp.float32)
    # The exact KL, if a forward pass computed it, replaces the estimate from the sampled token.
    if scores.kl is not None:
        return scores.kl
    kind = kl_estimators.get_kl_estimator(algorithm.kl_penalty, "algorithm.kl_penalty")
    return kl.kl_estimate(old_logprobs, scores.ref_logprobs, actions, kind)


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
    metrics = {
        "reward/shaped_mean": masked.masked_sum(token_rewards, actions) / len(actions),
        "kl/reference": masked.masked_mean(kl_tokens, actions),
        "kl/coefficient": kl_coef,
    }
    # What the adaptive controller compares with its target.
    if algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_ctrl.target_unit == "sequence":
        metrics["kl/reference_per_response"] = masked.masked_sum(kl_tokens, actions) / len(actions)
    return token_rewards, metrics
