"""From forward passes and rewards of a rollout to the experience that the update learns from.

`estimate_experience` is a pipeline of functions: shape rewards, subtract the KL penalty, estimate
advantages, whiten, normalize returns, weight by importance, set the next step's control.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jax_ppo.config.schema import Algorithm
from jax_ppo.config.training_options import KLControl
from jax_ppo.kernels import importance
from jax_ppo.kernels.masked_statistics import (
    Moments,
    masked_mean,
    masked_sum,
    starts_of_turns,
    update_moments,
    whiten,
    zero_outside,
)
from jax_ppo.ppo import advantages, reward_shaping
from jax_ppo.ppo.forward_passes import ForwardOutputs
from jax_ppo.ppo.reward_shaping import EarnedRewards, ExperienceOptions, Mask, Masks, Tokens
from jax_ppo.registries import ADVANTAGE_ESTIMATORS, IMPORTANCE_WEIGHTS, KL_CONTROLLERS
from jax_ppo.runtime.compiled_programs import program
from jax_ppo.training.learner import Metrics
from jax_ppo.types import Control, Experience, Sequences


@program("estimate", static_argnames=("options",))
def estimate_experience(
    options: ExperienceOptions,
    control: Control,
    sequences: Sequences,
    sampled_logprobs: Tokens,
    outputs: ForwardOutputs,
    rewards: EarnedRewards,
) -> tuple[Experience, Metrics]:
    """Return the experience that the update learns from, and metrics: scalars on the mesh.

    Without log-probs in `outputs` the sampler's are the old ones; else metrics compare both.
    """
    algorithm = options.algorithm
    masks = select_tokens(algorithm, sequences)
    old_logprobs = sampled_logprobs if outputs.old_logprobs is None else outputs.old_logprobs
    reward_moments = control.moments.get("rewards")
    # Running moments include this rollout before they normalize it.
    if options.reward.normalize == "running":
        assert reward_moments is not None, "running moments start with the first step's control"
        reward_moments = update_moments(
            reward_moments, rewards.scores, jnp.ones(rewards.scores.shape, bool)
        )
    token_rewards, metrics = reward_shaping.shape_rewards(
        options, reward_moments, sequences, masks, rewards
    )
    kl_tokens = reward_shaping.reference_kl(algorithm, old_logprobs, outputs, masks.actions)
    token_rewards, teacher_metrics = reward_shaping.add_teacher_rewards(
        options.teacher, token_rewards, old_logprobs, outputs, masks.actions
    )
    token_rewards, kl_metrics = reward_shaping.add_kl_penalty(
        algorithm, control.kl_coef, token_rewards, kl_tokens, masks.actions
    )
    if algorithm.whiten_rewards:
        token_rewards = whiten(token_rewards, masks.actions, shift_mean=False)
    estimates, return_moments, advantage_metrics = advantages.estimate_advantages(
        options,
        token_rewards,
        sequences,
        masks,
        outputs,
        control.moments.get("returns"),
        rewards.figures,
    )
    # Correct for a sampler with older weights or other rounding, if configured.
    weights, weight_metrics = weight_by_importance(
        algorithm, outputs, old_logprobs, sampled_logprobs, masks
    )
    experience = Experience(
        sequences=sequences,
        sample_mask=masks.samples,
        old_logprobs=old_logprobs,
        ref_logprobs=outputs.ref_logprobs,
        values=outputs.values,
        rewards=zero_outside(token_rewards, masks.actions),
        advantages=estimates.advantages,
        returns=estimates.returns,
        value_mask=masks.values,
        importance=weights,
        control=next_control(
            algorithm.kl_ctrl,
            control.kl_coef,
            kl_tokens,
            masks.actions,
            {"rewards": reward_moments, "returns": return_moments},
        ),
    )
    metrics |= teacher_metrics | kl_metrics | advantage_metrics | weight_metrics
    return experience, metrics


def select_tokens(algorithm: Algorithm, sequences: Sequences) -> Masks:
    """Return which tokens count; `mask_truncated` excludes responses that were cut off."""
    actions = sequences.action_mask
    samples = ~(sequences.truncated & algorithm.mask_truncated)
    loss = actions & samples[:, None]
    starts = sequences.turn_starts
    if starts is None:
        starts = starts_of_turns(actions)
    values_turns = ADVANTAGE_ESTIMATORS.lookup(algorithm.adv_estimator).values_turns
    return Masks(
        actions=actions,
        samples=samples,
        loss=loss,
        starts=starts,
        values=loss & starts if values_turns else None,
    )


def weight_by_importance(
    algorithm: Algorithm,
    outputs: ForwardOutputs,
    old_logprobs: Tokens,
    sampled_logprobs: Tokens,
    masks: Masks,
) -> tuple[Tokens | None, Metrics]:
    """Return the sampled tokens' importance weights, `None` if not configured, and metrics."""
    metrics: Metrics = {}
    if outputs.old_logprobs is not None:
        # How far sampler and trainer differ; reported even if no weights correct for it.
        mismatch = importance.mismatch(old_logprobs, sampled_logprobs, masks.actions)
        metrics = {f"rollout/{name}": value for name, value in mismatch.items()}
    if algorithm.rollout_is == "none":
        return None, metrics
    upper, lower = algorithm.rollout_is_threshold, algorithm.rollout_is_lower
    weights = importance.importance_weights(
        old_logprobs,
        sampled_logprobs,
        masks.actions,
        functools.partial(IMPORTANCE_WEIGHTS[algorithm.rollout_is].function, starts=masks.starts),
        upper=upper,
        lower=lower,
        masks=algorithm.rollout_is_masks,
    )
    # A weight at a bound was truncated to it; one of 0 was masked.
    is_cut = ((weights >= upper) | (weights <= lower)).astype(jnp.float32)
    return weights, metrics | {
        "rollout/importance_mean": masked_mean(weights, masks.actions),
        "rollout/importance_cut_share": masked_mean(is_cut, masks.actions),
        "rollout/effective_sample_size": importance.effective_sample_size(weights, masks.actions),
    }


def next_control(
    options: KLControl,
    kl_coef: Float32[Array, ""],
    kl_tokens: Tokens,
    actions: Mask,
    moments: dict[str, Moments | None],
) -> Control:
    """Return the control of the next step: its KL coefficient, and the moments that are kept."""
    samples = len(actions)
    # The target is per token or per response, so the measured KL is averaged the same way.
    if options.target_unit == "token":
        current = masked_mean(kl_tokens, actions)
    else:
        current = masked_sum(kl_tokens, actions) / samples
    return Control(
        kl_coef=KL_CONTROLLERS[options.type].function(options, kl_coef, current, samples),
        moments={name: value for name, value in moments.items() if value is not None},
    )
