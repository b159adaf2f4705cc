"""The policy loss that an option names, its inputs on packed rows, and its metrics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from jax_ppo.config import plugins
from jax_ppo.config.schema import Actor
from jax_ppo.errors import UserError
from jax_ppo.kernels.losses import Clip, LossInputs, MiniBatchTokens, PolicyBatch, PolicyLoss
from jax_ppo.registries import POLICY_LOSSES, inputs_named
from jax_ppo.training import packing
from jax_ppo.training.learner import Metrics
from jax_ppo.training.packing import Rows
from jax_ppo.types import Experience


def clip_bounds(options: Actor) -> Clip:
    """Return the bounds of the ratio that the options set."""
    return Clip(
        low=options.clip_ratio if options.clip_ratio_low is None else options.clip_ratio_low,
        high=options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high,
        dual=options.clip_ratio_c or None,
    )


def policy_loss_inputs(
    options: Actor,
    logprobs: Float[Array, "R L"],
    rows: Rows,
    experience: Experience,
    members_B: Bool[Array, " B"],
    is_on_policy: bool,
) -> LossInputs:
    """Return what a policy loss can ask for on some rows of the mini-batch of `members_B`."""
    # Counts and sums cover whole responses, wherever their tokens are packed.
    action_counts_B = experience.action_mask.sum(1)
    batch = PolicyBatch(
        logprobs=logprobs,
        # The same policy: a ratio of 1, however differently the sampler's program rounds.
        old_logprobs=(
            jax.lax.stop_gradient(logprobs)
            if is_on_policy
            else packing.to_rows(experience.old_logprobs, rows)
        ),
        advantages=packing.to_rows(experience.advantages, rows),
        mask=rows.mask,
        action_counts=action_counts_B[rows.samples],
    )
    return LossInputs(
        batch=batch,
        clip=clip_bounds(options),
        sequence_sum=lambda x: packing.sample_sums(x, rows, len(action_counts_B)),
        mini_batch=MiniBatchTokens(
            old_logprobs=experience.old_logprobs,
            advantages=experience.advantages,
            mask=experience.action_mask & members_B[:, None],
        ),
        to_rows=lambda x: packing.to_rows(x, rows),
    )


def compute_policy_loss(name: str, inputs: LossInputs) -> tuple[PolicyLoss, Metrics]:
    """Compute the policy loss that an option names, and a user-defined loss's metrics.

    A user-defined loss is validated while traced: one that takes a mean would depend on how the
    batch is split. Raise `UserError` if it cannot be loaded, returns neither a `PolicyLoss` nor
    that and a dict of metrics, or if a field or metric is not one number per token.
    """
    named = inputs._asdict()
    if name in POLICY_LOSSES:
        function = POLICY_LOSSES[name].function
        return function(**inputs_named(function, named)), {}
    function = plugins.load_plugin(
        name,
        "actor.policy_loss",
        ("batch", "clip"),
        by_name=True,
        other_arguments=lambda loss: tuple(inputs_named(loss, named)) or None,
    )
    result: Any = function(**inputs_named(function, named))
    policy, metrics = result if type(result) is tuple and len(result) == 2 else (result, {})
    if not isinstance(policy, PolicyLoss) or not isinstance(metrics, dict):
        raise UserError(
            f"config.actor.policy_loss={name!r}: returned {plugins.describe_result(result)}; "
            "expected a kernels.losses.PolicyLoss, or that and a dict of metrics"
        )
    per_token = policy._asdict() | {f"metric {key!r}": value for key, value in metrics.items()}
    shape = inputs.batch.mask.shape
    for field, value in per_token.items():
        if np.shape(value) != shape:
            raise UserError(
                f"config.actor.policy_loss={name!r}: its {field} has shape {np.shape(value)}; "
                f"expected one number per token, {shape}"
            )
    return policy, metrics


def policy_metrics(
    policy: PolicyLoss,
    entropy: Float[Array, "R L"],
    others: Metrics,
    weights: Float32[Array, "R L"],
) -> Metrics:
    """Return metrics of how far the policy has moved; `weights` are those of tokens in means."""
    counts = weights > 0

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(weights * x)

    # Reported twice: over all steps, and of the first step alone (FIRST_MAX).
    log_ratio_max = jnp.where(counts, jnp.abs(policy.log_ratio), 0).max()
    return {
        **{f"actor/{name}": mean(per_token) for name, per_token in others.items()},
        "actor/entropy": mean(entropy),
        # Schulman's k3 of the update itself: non-negative, 0 while the policy has not moved.
        "actor/approx_kl": mean(jnp.expm1(policy.log_ratio) - policy.log_ratio),
        "actor/ratio_mean": mean(policy.ratio),
        "actor/ratio_min": jnp.where(counts, policy.ratio, jnp.inf).min(),
        "actor/ratio_max": jnp.where(counts, policy.ratio, -jnp.inf).max(),
        "actor/log_ratio_max": log_ratio_max,
        "actor/first_log_ratio": log_ratio_max,
        "actor/clip_fraction": mean(policy.clipped),
        "actor/dual_clip_fraction": mean(policy.dual_clipped),
    }
