"""The losses of actor and critic on packed rows, and their metrics.

Each loss function returns the share of a mini-batch's loss that its rows contribute. Shares of the
loss add up over rows; shares of a metric combine as its `learner.Metric` states.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jax_ppo.config import plugins
from jax_ppo.config.schema import Actor, Config, Critic
from jax_ppo.errors import UserError
from jax_ppo.kernels import kl, losses
from jax_ppo.kernels.losses import PolicyLoss
from jax_ppo.kernels.policy_losses import Clip, PolicyBatch
from jax_ppo.models.heads import compute_scalars
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import kl_estimators
from jax_ppo.ppo.forward_passes import reuses_logprobs
from jax_ppo.registries import KL_ESTIMATORS, POLICY_LOSSES
from jax_ppo.training import forward, packing
from jax_ppo.training.learner import LossAndMetrics, Metric, Metrics
from jax_ppo.training.networks import full_parameters
from jax_ppo.training.packing import Rows
from jax_ppo.types import Experience, MiniBatches, Params, Sequences, pytree


@dataclasses.dataclass(frozen=True)
class ActorLossOptions:
    """Options of the actor's loss; part of a static argument of compiled functions.

    Attributes:
      actor: the section of the config.
      temperature: divides the logits, as in sampling.
      is_on_policy: whether the log-probs being differentiated are also the old ones. This is the
        case if the rollout gets one optimizer step and its log-probs were not computed again.
    """

    actor: Actor
    temperature: float
    is_on_policy: bool

    @classmethod
    def from_config(cls, config: Config) -> "ActorLossOptions":
        """Collect what the actor's loss reads."""
        return cls(
            actor=config.actor,
            temperature=config.rollout.temperature,
            is_on_policy=config.updates_once and reuses_logprobs(config),
        )


def get_policy_loss(name: str) -> Callable[[PolicyBatch, Clip], PolicyLoss]:
    """Return the loss that `actor.policy_loss` names.

    Raises:
      UserError: a `module:function` that cannot be loaded.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name].function
    return plugins.load_plugin(name, "actor.policy_loss", ("batch", "clip"), by_name=False)


@pytree
class Weights:
    """Weights of the tokens of a mini-batch, 0 where the rows' mask is False.

    Attributes:
      loss: weights in the loss, according to `loss_agg_mode`.
      mean: weights in means over the mini-batch's tokens.
      sequence: weights of all tokens, prompts included, in means over tokens and then over the
        mini-batch's sequences; `None` if no loss needs them.
    """

    loss: Float32[Array, "R L"]
    mean: Float32[Array, "R L"]
    sequence: Float32[Array, "R L"] | None = None


@pytree
class ActorContext:
    """Inputs of the actor's loss that are constant during an update.

    Attributes:
      reference: parameters; `None` if the loss has no KL over the whole vocabulary.
      kl_coef: coefficient of the KL loss.
      entropy_coef: coefficient of the entropy bonus.
    """

    reference: Params | None
    kl_coef: Float32[Array, ""]
    entropy_coef: Float32[Array, ""]


@dataclasses.dataclass(frozen=True)
class RolloutObjective:
    """The objective of a role on one rollout: a `learner.Objective`.

    Attributes:
      loss_function: (params, context, rows, experience, weights) -> (loss, metrics).
      metrics: how each of its metrics is reduced.
      aggregation: see `registries.AGGREGATIONS`.
      loss_scale: tokens, the divisor of "seq-mean-token-sum-norm".
      net: the role's model.
      base: frozen parameters that the role's adapters apply to; `None` without adapters.
      context: constants of the actor's loss.
      experience: the rollout's experience.
    """

    loss_function: Callable[..., LossAndMetrics]
    metrics: Mapping[str, Metric]
    aggregation: str
    loss_scale: float
    net: Transformer
    base: Params | None
    context: ActorContext | None
    experience: Experience

    @property
    def sequences(self) -> Sequences:
        """Return the rollout's samples."""
        return self.experience.sequences

    def has_tokens(self, batch: MiniBatches) -> jax.Array:
        """Return whether a mini-batch has any token to learn from, bool scalar."""
        return jnp.any(count_learned_tokens(self.experience, batch) > 0)

    def weigh(self, batch: MiniBatches) -> tuple[Float32[Array, " B"], ...]:
        """Return the weights of a sample's tokens in the loss and in means, and its own in means.

        They are fixed by the whole mini-batch, whatever its split.
        """
        counts_B = count_learned_tokens(self.experience, batch)
        loss_B = losses.loss_weights(counts_B, self.aggregation, self.loss_scale)
        mean_B = losses.loss_weights(counts_B, "token-mean")
        sequence_B = (counts_B > 0) / jnp.maximum(jnp.sum(counts_B > 0), 1)
        return loss_B, mean_B, sequence_B

    def loss(
        self, params: Params, rows: Rows, weights: tuple[Float32[Array, " B"], ...]
    ) -> LossAndMetrics:
        """Return the share of a mini-batch's loss that its rows contribute, and metrics.

        Args:
          params: the role's parameters, or its adapters.
          rows: some rows of the mini-batch.
          weights: as `weigh` returns them.
        """
        loss_B, mean_B, sequence_B = weights
        own_share = packing.sequence_weights(self.sequences, rows)
        token_weights = Weights(
            loss=jnp.where(rows.mask, loss_B[rows.samples], 0),
            mean=jnp.where(rows.mask, mean_B[rows.samples], 0),
            sequence=own_share * sequence_B[rows.samples],
        )
        # Inside the gradient, so that adapters receive theirs through the join.
        all_params = full_parameters(self.net, params, self.base)
        return self.loss_function(all_params, self.context, rows, self.experience, token_weights)


def count_learned_tokens(experience: Experience, batch: MiniBatches) -> Int32[Array, " B"]:
    """Return the number of action tokens of each sample that a mini-batch learns from.

    Samples outside the mini-batch, or excluded by the sample mask, have 0.
    """
    learned_B = batch.members & experience.sample_mask
    return jnp.where(learned_B, experience.action_mask.sum(1), 0)


def actor_context(options: Actor, reference: Params | None) -> ActorContext:
    """Return the context of one step."""
    # Estimated KLs read the reference's log-probs from the experience instead.
    if not (options.use_kl_loss and KL_ESTIMATORS.lookup(options.kl_loss_type).needs_vocabulary):
        reference = None
    return ActorContext(
        reference=reference,
        kl_coef=jnp.float32(options.kl_loss_coef),
        entropy_coef=jnp.float32(options.entropy_coeff),
    )


def actor_loss(
    options: ActorLossOptions,
    net: Transformer,
    params: Params,
    context: ActorContext,
    rows: Rows,
    experience: Experience,
    weights: Weights,
) -> LossAndMetrics:
    """Return the policy loss, plus the KL to the reference, minus the entropy bonus.

    Args:
      options: see `ActorLossOptions`.
      net: the actor's model.
      params: all of the model's parameters, including the base of adapters.
      context: constants of the step.
      rows: some rows of a mini-batch.
      experience: that of the whole rollout.
      weights: those of the tokens of these rows.
    """
    coef = options.actor.router_aux_loss_coef
    hidden, router_loss = forward.run_decoder(
        net, params, rows, with_router_loss=coef > 0, replays_routing=True
    )
    result = _actor_loss(options, net, params, hidden, context, rows, experience, weights)
    return _add_router_loss(result, "actor", coef, router_loss, weights)


def critic_loss(
    options: Critic,
    net: Transformer,
    params: Params,
    context: None,
    rows: Rows,
    experience: Experience,
    weights: Weights,
) -> LossAndMetrics:
    """Return the value loss; arguments as for `actor_loss`."""
    coef = options.router_aux_loss_coef
    hidden, router_loss = forward.run_decoder(net, params, rows, with_router_loss=coef > 0)
    values = compute_scalars(params, hidden)
    result = _critic_loss(options, values, rows, experience, weights)
    return _add_router_loss(result, "critic", coef, router_loss, weights)


def shared_loss(
    actor_options: ActorLossOptions,
    critic_options: Critic,
    net: Transformer,
    params: Params,
    context: ActorContext,
    rows: Rows,
    experience: Experience,
    weights: Weights,
) -> LossAndMetrics:
    """Return the sum of the policy and the value loss from one pass through a shared trunk."""
    coef = actor_options.actor.router_aux_loss_coef
    hidden, router_loss = forward.run_decoder(
        net, params, rows, with_router_loss=coef > 0, replays_routing=True
    )
    policy = _actor_loss(actor_options, net, params, hidden, context, rows, experience, weights)
    policy_part, actor_metrics = _add_router_loss(policy, "actor", coef, router_loss, weights)
    values = compute_scalars(params, hidden)
    value_part, critic_metrics = _critic_loss(critic_options, values, rows, experience, weights)
    return policy_part + value_part, actor_metrics | critic_metrics


def _add_router_loss(
    result: LossAndMetrics,
    role: str,
    coef: float,
    router_loss: Float[Array, "R L"] | None,
    weights: Weights,
) -> LossAndMetrics:
    """Return loss and metrics with the load-balancing loss of the routers, if there is one."""
    if router_loss is None:
        return result
    loss, metrics = result
    assert weights.sequence is not None, "sequences need weights"
    mean = jnp.sum(weights.sequence * router_loss)
    loss += coef * mean
    return loss, metrics | {f"{role}/loss": loss, f"{role}/router_loss": mean}


def _actor_loss(
    options: ActorLossOptions,
    net: Transformer,
    params: Params,
    hidden: Float[Array, "R L D"],
    context: ActorContext,
    rows: Rows,
    experience: Experience,
    weights: Weights,
) -> LossAndMetrics:
    """Return the actor's loss, without that of routers, from its hidden states."""
    actor = options.actor
    # One pass over the vocabulary gives log-probs and entropy.
    logprobs, entropy = forward.token_logprobs(net, params, hidden, rows, options.temperature)
    assert entropy is not None, "the loss needs the entropy"
    policy, plugin_metrics = _policy_loss(options, logprobs, rows, experience)
    if not actor.entropy_coeff:
        # With a coefficient of 0 alone, the entropy's backward pass would still run.
        entropy = jax.lax.stop_gradient(entropy)
    # Weights for tokens that an older policy or another program sampled.
    importance: int | jax.Array = 1
    if experience.importance is not None:
        importance = packing.to_rows(experience.importance, rows)
    pg_loss = jnp.sum(weights.loss * importance * policy.loss)
    kl_loss = _kl_loss(options, net, params, hidden, logprobs, context, rows, experience, weights)
    entropy_bonus = jnp.sum(weights.loss * entropy)
    loss = pg_loss + context.kl_coef * kl_loss - context.entropy_coef * entropy_bonus
    metrics = {"actor/loss": loss, "actor/pg_loss": pg_loss, "actor/kl_loss": kl_loss}
    for name, per_token in plugin_metrics.items():
        metrics[f"actor/{name}"] = jnp.sum(weights.mean * per_token)
    return loss, metrics | _policy_metrics(policy, entropy, weights)


def _policy_loss(
    options: ActorLossOptions, logprobs: Float[Array, "R L"], rows: Rows, experience: Experience
) -> tuple[PolicyLoss, dict[str, Float[Array, "R L"]]]:
    """Return the configured policy loss of each token, and a user-defined loss's metrics."""
    if options.is_on_policy:
        # The same policy: a ratio of 1, however differently the sampler's program rounds.
        old_logprobs = jax.lax.stop_gradient(logprobs)
    else:
        old_logprobs = packing.to_rows(experience.old_logprobs, rows)
    # Counts and sums cover whole responses, wherever their tokens are packed.
    action_counts_B = experience.action_mask.sum(1)
    batch = PolicyBatch(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=packing.to_rows(experience.advantages, rows),
        mask=rows.mask,
        action_counts=action_counts_B[rows.samples],
        sequence_sum=lambda x: packing.sample_sums(x, rows, len(action_counts_B)),
    )
    return compute_policy_loss(options.actor, batch)


def compute_policy_loss(
    options: Actor, batch: PolicyBatch
) -> tuple[PolicyLoss, dict[str, Float[Array, "R L"]]]:
    """Return the configured policy loss of each token, and a user-defined loss's metrics.

    Raises:
      UserError: a user-defined loss cannot be loaded, or returns something of another form.
    """
    clip = Clip(
        low=options.clip_ratio if options.clip_ratio_low is None else options.clip_ratio_low,
        high=options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high,
        dual=options.clip_ratio_c or None,
    )
    # A plugin's result is validated while the program is traced, once per compilation.
    result: object = get_policy_loss(options.policy_loss)(batch, clip)
    return _validate_policy_loss(options.policy_loss, result, batch.mask.shape)


def _kl_loss(
    options: ActorLossOptions,
    net: Transformer,
    params: Params,
    hidden: Float[Array, "R L D"],
    logprobs: Float[Array, "R L"],
    context: ActorContext,
    rows: Rows,
    experience: Experience,
    weights: Weights,
) -> Float32[Array, ""]:
    """Return the weighted KL to the reference, exact or estimated; 0 if the loss has none."""
    # The exact KL needs the reference's hidden states: a forward pass per micro-batch.
    if context.reference is not None:
        ref_hidden = forward.hidden_states(net, context.reference, rows)
        exact = forward.reference_kl(
            net, params, hidden, context.reference, ref_hidden, rows, options.temperature
        )
        return jnp.sum(weights.loss * exact)
    if options.actor.use_kl_loss:
        assert experience.ref_logprobs is not None, "a KL loss needs a reference"
        ref_logprobs = packing.to_rows(experience.ref_logprobs, rows)
        name = options.actor.kl_loss_type
        kind = kl_estimators.get_kl_estimator(name, "actor.kl_loss_type")
        return jnp.sum(weights.loss * kl.kl_estimate(logprobs, ref_logprobs, rows.mask, kind))
    return jnp.float32(0)


def _policy_metrics(policy: PolicyLoss, entropy: Float[Array, "R L"], weights: Weights) -> Metrics:
    """Return metrics of how far the policy has moved since the rollout."""
    counts = weights.mean > 0

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(weights.mean * x)

    # Reported twice: over all steps, and of the first step alone (FIRST_MAX).
    log_ratio_max = jnp.where(counts, jnp.abs(policy.log_ratio), 0).max()
    return {
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


def _validate_policy_loss(
    name: str, result: object, shape: tuple[int, ...]
) -> tuple[PolicyLoss, dict[str, Float[Array, "R L"]]]:
    """Return the loss and the metrics that a function returned.

    A plugin that takes a mean itself would depend on how a batch is split.

    Raises:
      UserError: the result is neither a `PolicyLoss` nor that and a dict of metrics, or one of the
        fields or metrics is not one number per token.
    """
    policy: object = result
    metrics: Any = {}
    if type(result) is tuple and len(result) == 2:
        policy, metrics = result
    if not isinstance(policy, PolicyLoss) or not isinstance(metrics, dict):
        raise UserError(
            f"config.actor.policy_loss={name!r}: returned {type(result).__name__}; expected a "
            "kernels.losses.PolicyLoss, or that and a dict of metrics"
        )
    per_token = policy._asdict() | {f"metric {key!r}": value for key, value in metrics.items()}
    for field, value in per_token.items():
        if jnp.shape(value) != shape:
            raise UserError(
                f"config.actor.policy_loss={name!r}: its {field} has shape {jnp.shape(value)}; "
                f"expected one number per token, {shape}"
            )
    return policy, metrics


def _critic_loss(
    options: Critic,
    values: Float[Array, "R L"],
    rows: Rows,
    experience: Experience,
    weights: Weights,
) -> LossAndMetrics:
    """Return the value loss, without that of routers, from the critic's values."""
    assert experience.values is not None, "a value loss needs values"
    assert experience.returns is not None, "a value loss needs returns"
    # Normalized or not, values, old values and returns are in one unit: the critic's.
    old_values = packing.to_rows(experience.values, rows)
    returns = packing.to_rows(experience.returns, rows)
    value = losses.value_loss(
        values=values,
        old_values=old_values,
        returns=returns,
        mask=rows.mask,
        clip=options.cliprange_value or None,
        huber_delta=options.huber_delta,
    )
    loss = options.value_loss_coef * jnp.sum(weights.loss * value.loss)
    return loss, {
        "critic/loss": loss,
        "critic/clip_fraction": jnp.sum(weights.mean * value.clipped),
    }
