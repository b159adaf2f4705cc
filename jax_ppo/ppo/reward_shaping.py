"""Rewards of a rollout's tokens, with the KL penalty, and the options that estimates share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jax_ppo.config import plugins
from jax_ppo.config.schema import Algorithm, Reward, Teacher
from jax_ppo.errors import UserError
from jax_ppo.kernels import kl
from jax_ppo.kernels.masked_statistics import (
    Moments,
    masked_mean,
    masked_sum,
    normalize_by_moments,
)
from jax_ppo.ppo.forward_passes import ForwardOutputs
from jax_ppo.registries import KL_CONTROLLERS, KL_ESTIMATORS
from jax_ppo.training.learner import Metrics
from jax_ppo.types import Sequences, pytree

KLFunction = Callable[[jax.Array], jax.Array]
Tokens = Float32[Array, "B T"]
Mask = Bool[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class ExperienceOptions:
    """Options of `estimate_experience`; a static argument of the compiled function."""

    algorithm: Algorithm
    reward: Reward
    teacher: Teacher
    max_response_length: int  # T, the length beyond which responses are cut off
    responses_per_prompt: int  # n, the size of the groups that are compared without a critic
    has_critic: bool  # advantages come from a critic
    whitens_advantages: bool  # advantages are whitened over the rollout
    normalizes_values: bool  # the critic learns normalized returns


@pytree
class EarnedRewards:
    """The rewards of a rollout's responses."""

    scores: Float32[Array, " B"]  # at their ends
    steps: Tokens | None = None  # within them
    # Further inputs of the advantage estimator, by name.
    figures: Mapping[str, Float32[Array, " B"]] = dataclasses.field(default_factory=dict)


class Masks(NamedTuple):
    """Masks over the tokens and samples of a rollout."""

    actions: Mask  # the response tokens that the policy chose
    samples: Bool[Array, " B"]  # False for samples that are excluded from all losses
    loss: Mask  # the action tokens of the samples that are not excluded
    starts: Mask  # the first action token of each turn
    # The tokens in `loss` whose values the critic learns; `None`: all of them.
    values: Mask | None = None


class Estimates(NamedTuple):
    """Advantages, raw or whitened, and the critic's targets (`None` without a critic)."""

    advantages: Tokens
    returns: Tokens | None
    size: float | Float32[Array, ""] = 0.0  # the largest magnitude they were computed from


def shape_rewards(
    options: ExperienceOptions,
    moments: Moments | None,
    sequences: Sequences,
    masks: Masks,
    rewards: EarnedRewards,
) -> tuple[Tokens, Metrics]:
    """Return the reward of each token before the KL penalty, [B, T]."""
    earned = rewards.scores
    if rewards.steps is not None:
        earned += rewards.steps.sum(1)
    lengths = sequences.lengths
    metrics = {  # metrics describe what was earned, before any shaping
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
    scores = shape_scores(options, moments, rewards.scores, lengths, sequences.truncated)
    # The score is earned by the last chosen token, not by a tool's output after it.
    token_rewards = jnp.where(last_actions(masks.actions), scores[:, None], 0.0)
    if rewards.steps is not None:
        token_rewards += move_to_actions(rewards.steps, masks.actions)
    return token_rewards, metrics


def shape_scores(
    options: ExperienceOptions,
    moments: Moments | None,
    rewards_B: Float32[Array, " B"],
    lengths_B: Int32[Array, " B"],
    truncated_B: Bool[Array, " B"],
) -> Float32[Array, " B"]:
    """Normalize and clip the samples' scores, then subtract penalties for ending and length.

    Lengths count all tokens of a response: a penalty is about the cost of the whole response.
    """
    reward = options.reward
    if moments is not None:
        # Before clipping: the clip then counts standard deviations, as do the coefficients of KL
        # and length. With gamma below 1 the shift moves the optimum: a low score is better late.
        rewards_B = normalize_by_moments(rewards_B, moments)
    if reward.clip is not None:
        rewards_B = jnp.clip(rewards_B, -reward.clip, reward.clip)
    if reward.overlong_buffer_len:
        # Penalties come after normalization, which would change their size relative to a score.
        rewards_B += soft_overlong_penalty(
            lengths_B,
            options.max_response_length,
            reward.overlong_buffer_len,
            reward.overlong_penalty_factor,
        )
    return rewards_B - reward.missing_eos_penalty * truncated_B - reward.length_penalty * lengths_B


def soft_overlong_penalty(
    lengths_B: Int32[Array, " B"], longest: int, buffer: int, factor: float
) -> Float32[Array, " B"]:
    """Return the amount to add to the score of a long response, in [-factor, 0].

        0                                               length <= longest - buffer
        -factor (length - (longest - buffer)) / buffer  in between
        -factor                                         length >= longest

    DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 13), times `factor`. It changes the objective on
    purpose: of two responses of equal score, the shorter is better once the longer ends within
    the buffer of 1 to `longest` tokens.
    """
    assert 0 < buffer <= longest, (
        f"a buffer of {buffer} tokens does not fit a response of {longest}"
    )
    over = lengths_B.astype(jnp.float32) - (longest - buffer)
    return -factor * jnp.clip(over / buffer, 0.0, 1.0)


def last_actions(mask_BxT: Mask) -> Mask:
    """Return True on the last action token of each response, which earns the response's score."""
    actions_left_BxT = jnp.cumsum(mask_BxT[:, ::-1], axis=1)[:, ::-1]
    return mask_BxT & (actions_left_BxT == 1)


def move_to_actions(rewards_BxT: Tokens, mask_BxT: Mask) -> Tokens:
    """Move each reward on a token of the environment to the last action token before it.

    A reward before the first action token moves to that token. A response without action tokens
    has no place for rewards; they end up where the mask is 0, and no loss reads them.
    """
    columns_T = jnp.arange(mask_BxT.shape[1])
    previous_BxT = jax.lax.cummax(jnp.where(mask_BxT, columns_T, -1), axis=1)
    first_Bx1 = jnp.argmax(mask_BxT, axis=1, keepdims=True)
    target_BxT = jnp.where(previous_BxT < 0, first_Bx1, previous_BxT)

    def move(rewards_T: jax.Array, target_T: jax.Array) -> jax.Array:
        return jnp.zeros_like(rewards_T).at[target_T].add(rewards_T)

    return jax.vmap(move)(rewards_BxT, target_BxT)


def add_teacher_rewards(
    options: Teacher,
    token_rewards: Tokens,
    old_logprobs: Tokens,
    outputs: ForwardOutputs,
    actions: Mask,
) -> tuple[Tokens, Metrics]:
    """Subtract the KL to the teacher, estimated from each sampled token, from the token's reward.

    With d = log actor(token) - log teacher(token) the reward -d follows the gradient of -KL(actor
    || teacher) of whole responses with gamma = 1; with gamma = 0 it follows that of each token's
    KL, as in Lu & Thinking Machines 2025 (https://thinkingmachines.ai/blog/on-policy-distillation).
    """
    if not options.use_task_rewards:
        token_rewards = jnp.zeros_like(token_rewards)
    if outputs.teacher_logprobs is None:
        return token_rewards, {}
    kl_tokens = kl.kl_estimate(old_logprobs, outputs.teacher_logprobs, actions, kl.k1)
    metrics = {"teacher/kl": masked_mean(kl_tokens, actions)}
    return token_rewards - options.reward_coef * kl_tokens, metrics


def reference_kl(
    algorithm: Algorithm, old_logprobs: Tokens, outputs: ForwardOutputs, actions: Mask
) -> Tokens:
    """Return the KL to the reference at each token; 0 without a reference."""
    if outputs.ref_logprobs is None:
        return jnp.zeros(actions.shape, jnp.float32)
    # The exact KL, if a forward pass computed it, replaces the estimate from the sampled token.
    if outputs.kl is not None:
        return outputs.kl
    estimator = get_kl_estimator(algorithm.kl_penalty, "algorithm.kl_penalty")
    return kl.kl_estimate(old_logprobs, outputs.ref_logprobs, actions, estimator)


def add_kl_penalty(
    algorithm: Algorithm,
    kl_coef: Float32[Array, ""],
    token_rewards: Tokens,
    kl_tokens: Tokens,
    actions: Mask,
) -> tuple[Tokens, Metrics]:
    """Subtract the KL to the reference from each token's reward, if configured.

        r_t = [t is the last action] * score + step reward - kl_coef * KL_t

    (Ziegler et al. 2019, arXiv 1909.08593), where the score is the reward after `shape_scores`.
    """
    if algorithm.use_kl_in_reward:
        token_rewards -= kl_coef * kl_tokens
    metrics = {
        "reward/shaped_mean": masked_sum(token_rewards, actions) / len(actions),
        "kl/reference": masked_mean(kl_tokens, actions),
        "kl/coefficient": kl_coef,
    }
    # What the adaptive controller compares with its target.
    control = algorithm.kl_ctrl
    if KL_CONTROLLERS[control.type].adapts and control.target_unit == "sequence":
        metrics["kl/reference_per_response"] = masked_sum(kl_tokens, actions) / len(actions)
    return token_rewards, metrics


def get_kl_estimator(name: str, option: str) -> KLFunction:
    """Return what `kernels.kl.kl_estimate` takes for the value of an option.

    A user-defined function gets d = log actor(token) - log reference(token), of any shape and 0 at
    tokens that do not count, and returns one number per token; otherwise `UserError` is raised.
    """
    if name in KL_ESTIMATORS:
        return KL_ESTIMATORS[name].function
    function = plugins.load_plugin(name, option, ("log_ratio",), by_name=False)

    def estimate(log_ratio: jax.Array) -> jax.Array:
        result = function(log_ratio)
        if np.shape(result) != log_ratio.shape:
            raise UserError(
                f"config.{option}={name!r}: returned {plugins.describe_result(result)}; expected "
                f"one number per token, {log_ratio.shape}"
            )
        return jnp.asarray(result, jnp.float32)

    return estimate
