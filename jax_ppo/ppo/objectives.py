"""What actor and critic minimise: their losses on packed rows, and what is reported of them.

Each function gives the share of a mini-batch's loss that some of its rows bear: shares add up over rows to the loss, and their
metrics to the metrics (but for *_min and *_max, of which the least and the greatest is taken).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ppo.config import parsing, plugins
from jax_ppo.config.schema import POLICY_LOSSES, Config
from jax_ppo.errors import UserError
from jax_ppo.kernels import kl, losses, policy_losses, schedules
from jax_ppo.models import heads
from jax_ppo.ppo import scoring
from jax_ppo.training import forward
from jax_ppo.training import packing as packing_lib
from jax_ppo.training.networks import Networks
from jax_ppo.training.state import TrainState
from jax_ppo.types import Experience, pytree

ACTOR_METRICS = (
    "actor/loss",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/approx_kl",
    "actor/ratio_mean",
    "actor/ratio_min",
    "actor/ratio_max",
    "actor/log_ratio_max",
    "actor/clip_fraction",
    "actor/dual_clip_fraction",
)
CRITIC_METRICS = ("critic/loss", "critic/clip_fraction")


def policy_loss(
    name: str,
) -> Callable[[policy_losses.PolicyBatch, policy_losses.Clip], losses.PolicyLoss]:
    """The loss that actor.policy_loss names. Raises UserError for one of the user's own that can not be loaded."""
    if name in POLICY_LOSSES:
        return policy_losses.LOSSES[name]
    return plugins.load_plugin(name, "actor.policy_loss", ("batch", "clip"), by_name=False)


@pytree
class Weights:
    """Of each token in a mini-batch's loss and in its means; [R, L] float32, 0 off the mask.

    Attributes:
      loss: as loss_agg_mode has it.
      mean: of the mini-batch's tokens.
    """

    loss: jax.Array
    mean: jax.Array


@pytree
class ActorContext:
    """What the actor's loss reads besides rows and experience, and no gradient goes to.

    Attributes:
      reference: parameters; None where the loss has no KL over the whole vocabulary.
      kl_coef, entropy_coef: float32 scalars, of this step.
    """

    reference: dict | None
    kl_coef: jax.Array
    entropy_coef: jax.Array


def actor_context(config: Config, state: TrainState) -> ActorContext:
    options = config.actor
    entropy_coef = jnp.float32(options.entropy_coeff)
    if options.entropy_schedule:
        entropy_coef = schedules.piecewise(
            parsing.parse_schedule(options.entropy_schedule), state.step, linear=True
        )
    return ActorContext(
        reference=state.reference
        if options.use_kl_loss and options.kl_loss_type == "full"
        else None,
        kl_coef=state.control.kl_coef
        if options.kl_loss_ctrl
        else jnp.float32(options.kl_loss_coef),
        entropy_coef=entropy_coef,
    )


def actor_loss(
    config: Config,
    nets: Networks,
    params,
    context: ActorContext,
    rows: packing_lib.Rows,
    experience: Experience,
    weights: Weights,
):
    """The policy loss, plus the KL to the reference if asked, minus the entropy bonus. Returns (loss, metrics)."""
    hidden = forward.hidden_states(nets.actor, params, rows)
    return _actor_loss(config, nets, params, hidden, context, rows, experience, weights)


def _actor_loss(config, nets, params, hidden, context, rows, experience, weights):
    options, temperature = config.actor, config.rollout.temperature
    logprobs, entropy = forward.token_logprobs(nets.actor, params, hidden, rows, temperature)
    if config.updates_once and scoring.reuses_logprobs(config):
        old = jax.lax.stop_gradient(
            logprobs
        )  # the same policy: a ratio of 1, whatever the sampler's program rounds otherwise
    else:
        old = packing_lib.to_rows(experience.old_logprobs, rows)
    advantages = packing_lib.to_rows(experience.advantages, rows)
    counts_B = experience.action_mask.sum(1)
    batch = policy_losses.PolicyBatch(
        logprobs,
        old,
        advantages,
        rows.mask,
        counts_B[rows.samples],
        lambda x: packing_lib.sample_sums(x, rows, len(counts_B)),
    )
    low = options.clip_ratio if options.clip_ratio_low is None else options.clip_ratio_low
    high = options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high
    policy = policy_loss(options.policy_loss)(
        batch, policy_losses.Clip(low, high, options.clip_ratio_c or None)
    )
    _check_policy_loss(options.policy_loss, policy, rows.mask.shape)
    if not (options.entropy_coeff or options.entropy_schedule):
        entropy = jax.lax.stop_gradient(
            entropy
        )  # a factor of 0 alone would not spare its backward pass
    importance = (
        1 if experience.importance is None else packing_lib.to_rows(experience.importance, rows)
    )
    pg_loss = jnp.sum(weights.loss * importance * policy.loss)
    kl_loss = jnp.float32(0)
    if context.reference is not None:
        ref_hidden = forward.hidden_states(nets.actor, context.reference, rows)
        divergence = forward.reference_kl(
            nets.actor, params, hidden, context.reference, ref_hidden, rows, temperature
        )
        kl_loss = jnp.sum(weights.loss * divergence)
    elif options.use_kl_loss:
        ref_logprobs = packing_lib.to_rows(experience.ref_logprobs, rows)
        kl_loss = jnp.sum(
            weights.loss * kl.kl_estimate(logprobs, ref_logprobs, rows.mask, options.kl_loss_type)
        )
    loss = (
        pg_loss + context.kl_coef * kl_loss - context.entropy_coef * jnp.sum(weights.loss * entropy)
    )

    counts = weights.mean > 0

    def mean(x):
        return jnp.sum(weights.mean * x)

    return loss, {
        "actor/loss": loss,
        "actor/pg_loss": pg_loss,
        "actor/kl_loss": kl_loss,
        "actor/entropy": mean(entropy),
        # Schulman's k3 of the step itself: non-negative, 0 while the policy has not moved.
        "actor/approx_kl": mean(jnp.expm1(policy.log_ratio) - policy.log_ratio),
        "actor/ratio_mean": mean(policy.ratio),
        "actor/ratio_min": jnp.where(counts, policy.ratio, jnp.inf).min(),
        "actor/ratio_max": jnp.where(counts, policy.ratio, -jnp.inf).max(),
        "actor/log_ratio_max": jnp.where(counts, jnp.abs(policy.log_ratio), 0).max(),
        "actor/clip_fraction": mean(policy.clipped),
        "actor/dual_clip_fraction": mean(policy.dual_clipped),
    }


def _check_policy_loss(name, found, shape):
    """What a loss of the user's own returns: one that takes a mean itself would depend on how a batch is cut."""
    if not isinstance(found, losses.PolicyLoss):
        raise UserError(
            f"config.actor.policy_loss={name!r}: returned {type(found).__name__}; expected a "
            "kernels.losses.PolicyLoss"
        )
    for field, value in found._asdict().items():
        if jnp.shape(value) != shape:
            raise UserError(
                f"config.actor.policy_loss={name!r}: its {field} has shape {jnp.shape(value)}; expected a number "
                f"for each token, {shape}"
            )


def critic_loss(
    config: Config,
    nets: Networks,
    params,
    context: None,
    rows: packing_lib.Rows,
    experience: Experience,
    weights: Weights,
):
    """The value loss. Returns (loss, metrics)."""
    return _critic_loss(
        config, forward.scalars(nets.critic, params, rows), rows, experience, weights
    )


def shared_loss(
    config: Config,
    nets: Networks,
    params,
    context: ActorContext,
    rows: packing_lib.Rows,
    experience: Experience,
    weights: Weights,
):
    """The sum of the policy's and the value loss, of one pass through the trunk that actor and critic share. Returns (loss,
    metrics)."""
    hidden = forward.hidden_states(nets.actor, params, rows)
    of_actor, actor_metrics = _actor_loss(
        config, nets, params, hidden, context, rows, experience, weights
    )
    of_critic, critic_metrics = _critic_loss(
        config, heads.compute_scalars(params, hidden), rows, experience, weights
    )
    return of_actor + of_critic, actor_metrics | critic_metrics


def _critic_loss(config, values, rows, experience, weights):
    options = config.critic
    old, returns = (packing_lib.to_rows(x, rows) for x in (experience.values, experience.returns))
    value = losses.value_loss(
        values, old, returns, rows.mask, options.cliprange_value or None, options.huber_delta
    )
    loss = options.value_loss_coef * jnp.sum(weights.loss * value.loss)
    return loss, {
        "critic/loss": loss,
        "critic/clip_fraction": jnp.sum(weights.mean * value.clipped),
    }
