"""The losses of actor and critic on packed rows, and their metrics.

An objective returns the share of a mini-batch's loss that its rows contribute. Shares of the loss
add up over rows; shares of a metric combine as its `learner.Metric` states.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_ppo.config import plugins
from jax_ppo.config.schema import Actor, Config, Critic, Teacher
from jax_ppo.errors import UserError
from jax_ppo.kernels import kl, losses
from jax_ppo.kernels.losses import Clip, LossInputs, MiniBatchTokens, PolicyBatch, PolicyLoss
from jax_ppo.models.heads import compute_scalars
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo.forward_passes import reuses_logprobs
from jax_ppo.ppo.reward_shaping import get_kl_estimator
from jax_ppo.registries import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, inputs_named
from jax_ppo.training import forward, packing
from jax_ppo.training.learner import LossAndMetrics, Metric, Metrics
from jax_ppo.training.networks import full_parameters
from jax_ppo.training.optimizer import rounding_seed
from jax_ppo.training.packing import Rows
from jax_ppo.types import Experience, MiniBatches, Params, Sequences, pytree

# The metrics of the losses, and how each is reduced. Those of the critic come with the loss of the
# actor if the two share a trunk.
METRICS: Mapping[str, Metric] = {
    "actor/loss": Metric.MEAN,
    "actor/pg_loss": Metric.MEAN,
    "actor/kl_loss": Metric.MEAN,
    "actor/entropy": Metric.MEAN,
    "actor/approx_kl": Metric.MEAN,
    "actor/ratio_mean": Metric.MEAN,
    "actor/ratio_min": Metric.MIN,
    "actor/ratio_max": Metric.MAX,
    "actor/log_ratio_max": Metric.MAX,
    # Near 0 if the old log-probs are right; exactly 0 if those being differentiated replace them.
    "actor/first_log_ratio": Metric.FIRST_MAX,
    "actor/clip_fraction": Metric.MEAN,
    "actor/dual_clip_fraction": Metric.MEAN,
    "actor/router_loss": Metric.MEAN,
    "actor/teacher_kl": Metric.MEAN,
    "actor/inexact_logprobs": Metric.FIRST_SUM,
    "critic/loss": Metric.MEAN,
    "critic/clip_fraction": Metric.MEAN,
    "critic/router_loss": Metric.MEAN,
}
# Names after `actor/` that the learner and the update use besides.
OTHER_ACTOR_METRICS = ("grad_norm", "skipped", "steps_taken", "lr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Options of the update of actor and critic; a static argument of compiled functions."""

    actor: Actor
    critic: Critic
    temperature: float  # divides the logits, as in sampling
    # The coefficient of the KL to the teacher over the vocabulary; 0 without one.
    teacher_coef: float
    # Whether the log-probs being differentiated are also the old ones. This is the case if the
    # rollout gets one optimizer step and its log-probs were not computed again.
    is_on_policy: bool
    # Whether the critic's head shares the actor's trunk: the value loss is then added, from the
    # same pass.
    shares_trunk: bool
    warmup_steps: int  # first steps of the run, in which only the critic learns
    # Tokens, the divisor of "seq-mean-token-sum-norm", so that both roles' losses have the same
    # scale.
    loss_scale: float
    rounding_seed: int  # the run's seed if either role rounds to bfloat16, else 0
    is_exact: bool = False  # whether to count log-probs whose bits differ from the rollout's

    @classmethod
    def from_config(cls, config: Config) -> "UpdateOptions":
        """Collect the options from all sections."""
        actor, critic, seed = config.actor, config.critic, config.seed
        return cls(
            actor=actor,
            critic=critic,
            temperature=config.rollout.temperature,
            teacher_coef=config.teacher.loss_coef if config.teacher.path else 0.0,
            is_on_policy=(
                config.updates_once and reuses_logprobs(config) and not config.rollout.exact
            ),
            shares_trunk=config.shares_trunk,
            warmup_steps=config.trainer.critic_warmup,
            loss_scale=actor.loss_scale_factor or config.data.max_response_length,
            rounding_seed=rounding_seed(actor.optim, seed) or rounding_seed(critic.optim, seed),
            is_exact=config.rollout.exact,
        )


@pytree
class Weights:
    """Weights of the tokens of a mini-batch, [R, L], or of any token of each sample, [B]."""

    # Weights in the loss, according to `loss_agg_mode`; 0 where the rows' mask is False.
    loss: Float32[Array, "..."]
    mean: Float32[Array, "..."]  # weights in means over the mini-batch's tokens; likewise
    # Weights of all tokens, prompts included, in means over tokens and then over the mini-batch's
    # sequences; of a sample, its own weight.
    sequence: Float32[Array, "..."]


@pytree
class ActorWeights:
    """The weights of the actor's loss on a mini-batch."""

    tokens: Weights
    values: Weights | None  # of the values of a critic that shares the trunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutObjective:
    """The common part of both roles' objectives on one rollout; see `learner.Objective`."""

    options: UpdateOptions
    aggregation: str  # see `registries.AGGREGATIONS`
    net: Transformer  # the role's model
    # The frozen parameters that adapters are joined with; not read without adapters.
    base: Params | None
    experience: Experience

    @property
    def sequences(self) -> Sequences:
        """Return the rollout's samples."""
        return self.experience.sequences

    def has_tokens(self, batch: MiniBatches) -> jax.Array:
        """Return whether a mini-batch has any token to learn from, bool scalar."""
        return jnp.any(count_learned_tokens(self.experience, batch) > 0)

    def weigh_tokens(
        self, batch: MiniBatches, mask_BxT: Bool[Array, "B T"] | None = None
    ) -> Weights:
        """Return the weights of samples: of a mask's tokens, or of all action tokens.

        They are fixed by the whole mini-batch, whatever its split.
        """
        counts_B = count_learned_tokens(self.experience, batch, mask_BxT)
        divisors = AGGREGATIONS[self.aggregation].function
        return Weights(
            loss=losses.loss_weights(counts_B, divisors, self.options.loss_scale),
            mean=losses.loss_weights(counts_B, losses.token_mean),
            sequence=(counts_B > 0) / jnp.maximum(jnp.sum(counts_B > 0), 1),
        )

    def token_weights(
        self, rows: Rows, weights: Weights, mask_BxT: Bool[Array, "B T"] | None = None
    ) -> Weights:
        """Return what `weigh_tokens` returned for samples at each token of some rows."""
        mask = rows.mask
        if mask_BxT is not None:
            mask &= mask_BxT[rows.samples, rows.steps]
        own_share = packing.sequence_weights(self.sequences, rows)
        return Weights(
            loss=jnp.where(mask, weights.loss[rows.samples], 0),
            mean=jnp.where(mask, weights.mean[rows.samples], 0),
            sequence=own_share * weights.sequence[rows.samples],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorObjective(RolloutObjective):
    """The policy loss, plus the KL to the reference, minus the entropy bonus."""

    # The reference's model and parameters; read only by a KL over the vocabulary.
    reference: tuple[Transformer, Params | None] | None = None
    # The teacher's model and parameters; `None` if the loss has no KL to it.
    teacher: tuple[Transformer, Params] | None = None
    plugin_metrics: tuple[str, ...] = ()  # of a user-defined policy loss

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Return how each metric of the loss is reduced."""
        absent = {
            "actor/router_loss": not self.options.actor.router_aux_loss_coef,
            "actor/teacher_kl": self.teacher is None,
            "actor/inexact_logprobs": not self.options.is_exact,
            "critic/router_loss": True,
        }
        roles = ("actor/", "critic/") if self.options.shares_trunk else "actor/"
        metrics = {
            name: metric
            for name, metric in METRICS.items()
            if name.startswith(roles) and not absent.get(name)
        }
        return metrics | dict.fromkeys(self.plugin_metrics, Metric.MEAN)

    def weigh(self, batch: MiniBatches) -> ActorWeights:
        """Return the weights of samples; see `weigh_tokens`."""
        values = None
        if self.options.shares_trunk:
            values = self.weigh_tokens(batch, self.experience.value_mask)
        return ActorWeights(tokens=self.weigh_tokens(batch), values=values)

    def loss(self, params: Params, rows: Rows, weights: ActorWeights) -> LossAndMetrics:
        """Return the share of a mini-batch's loss that its rows contribute, and metrics."""
        options, net, experience = self.options, self.net, self.experience
        actor = options.actor
        token_weights = self.token_weights(rows, weights.tokens)
        # Inside the gradient, so that adapters receive theirs through the join.
        params = full_parameters(net, params, self.base)
        hidden, router_loss_RxL = forward.run_decoder(
            net, params, rows, with_router_loss=actor.router_aux_loss_coef > 0, replays_routing=True
        )
        # One pass over the vocabulary gives log-probs and entropy.
        logprobs_RxL, entropy_RxL = forward.target_logprobs(
            net, params, hidden, rows, options.temperature
        )
        assert entropy_RxL is not None, "the loss needs the entropy"
        if not actor.entropy_coeff:
            # With a coefficient of 0 alone, the entropy's backward pass would still run.
            entropy_RxL = jax.lax.stop_gradient(entropy_RxL)
        inputs = policy_loss_inputs(
            options, logprobs_RxL, rows, experience, members_B=weights.tokens.sequence > 0
        )
        policy, plugin_metrics = compute_policy_loss(actor.policy_loss, inputs)
        # Weights for tokens that an older policy or another program sampled.
        importance_RxL: int | jax.Array = 1
        if experience.importance is not None:
            importance_RxL = packing.to_rows(experience.importance, rows)

        # The sum of all terms; those that the options leave out are not computed.
        pg_loss = jnp.sum(token_weights.loss * importance_RxL * policy.loss)
        kl_loss = self._kl_loss(params, hidden, logprobs_RxL, rows, token_weights)
        entropy_bonus = jnp.sum(token_weights.loss * entropy_RxL)
        loss = pg_loss + actor.kl_loss_coef * kl_loss - actor.entropy_coeff * entropy_bonus
        metrics = {"actor/pg_loss": pg_loss, "actor/kl_loss": kl_loss}
        if self.teacher is not None:
            teacher_kl_RxL = self._kl_over_vocabulary(params, hidden, *self.teacher, rows)
            loss += options.teacher_coef * jnp.sum(token_weights.loss * teacher_kl_RxL)
            metrics["actor/teacher_kl"] = jnp.sum(token_weights.mean * teacher_kl_RxL)
        if router_loss_RxL is not None:
            router_loss = jnp.sum(token_weights.sequence * router_loss_RxL)
            loss += actor.router_aux_loss_coef * router_loss
            metrics["actor/router_loss"] = router_loss
        metrics["actor/loss"] = loss
        for name, per_token in plugin_metrics.items():
            metrics[f"actor/{name}"] = jnp.sum(token_weights.mean * per_token)
        metrics |= _policy_metrics(policy, entropy_RxL, token_weights)
        if options.is_exact:
            differs_RxL = _bits(logprobs_RxL) != _bits(inputs.batch.old_logprobs)
            metrics["actor/inexact_logprobs"] = jnp.sum(rows.mask & differs_RxL, dtype=jnp.float32)
        if weights.values is not None:
            value_part, critic_metrics = weighted_value_loss(
                options.critic,
                compute_scalars(params, hidden),
                rows,
                experience,
                self.token_weights(rows, weights.values, experience.value_mask),
            )
            loss += value_part
            metrics |= critic_metrics
        return loss, metrics

    def _kl_loss(
        self,
        params: Params,
        hidden: Float[Array, "R L D"],
        logprobs: Float[Array, "R L"],
        rows: Rows,
        weights: Weights,
    ) -> Float32[Array, ""]:
        """Return the weighted KL to the reference, exact or estimated; 0 if the loss has none."""
        options = self.options
        if not options.actor.use_kl_loss:
            return jnp.float32(0)
        name = options.actor.kl_loss_type
        if needs_reference_pass(options.actor):
            # The exact KL needs the reference's hidden states: a forward pass per micro-batch.
            net, reference = self.reference or (self.net, None)
            assert reference is not None, "a KL loss needs a reference"
            kl_tokens = self._kl_over_vocabulary(params, hidden, net, reference, rows)
        else:
            assert self.experience.ref_logprobs is not None, "a KL loss needs a reference"
            ref_logprobs = packing.to_rows(self.experience.ref_logprobs, rows)
            estimator = get_kl_estimator(name, "actor.kl_loss_type")
            kl_tokens = kl.kl_estimate(logprobs, ref_logprobs, rows.mask, estimator)
        return jnp.sum(weights.loss * kl_tokens)

    def _kl_over_vocabulary(
        self,
        params: Params,
        hidden: Float[Array, "R L D"],
        other_net: Transformer,
        other: Params,
        rows: Rows,
    ) -> Float[Array, "R L"]:
        """Return KL(actor || other) of each token, with another frozen policy."""
        other_hidden = forward.hidden_states(other_net, other, rows)
        return forward.kl_over_vocabulary(
            self.net, params, hidden, other_net, other, other_hidden, rows, self.options.temperature
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticObjective(RolloutObjective):
    """The value loss of a separate critic."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Return how each metric of the loss is reduced."""
        metrics = {name: x for name, x in METRICS.items() if name.startswith("critic/")}
        if not self.options.critic.router_aux_loss_coef:
            del metrics["critic/router_loss"]
        return metrics

    def weigh(self, batch: MiniBatches) -> Weights:
        """Return the weights of samples; see `weigh_tokens`."""
        return self.weigh_tokens(batch, self.experience.value_mask)

    def loss(self, params: Params, rows: Rows, weights: Weights) -> LossAndMetrics:
        """Return the share of a mini-batch's loss, and metrics; arguments as for the actor."""
        critic = self.options.critic
        coef = critic.router_aux_loss_coef
        token_weights = self.token_weights(rows, weights, self.experience.value_mask)
        params = full_parameters(self.net, params, self.base)
        hidden, router_loss_RxL = forward.run_decoder(
            self.net, params, rows, with_router_loss=coef > 0
        )
        values = compute_scalars(params, hidden)
        loss, metrics = weighted_value_loss(critic, values, rows, self.experience, token_weights)
        if router_loss_RxL is not None:
            router_loss = jnp.sum(token_weights.sequence * router_loss_RxL)
            loss += coef * router_loss
            metrics |= {"critic/loss": loss, "critic/router_loss": router_loss}
        return loss, metrics


def count_learned_tokens(
    experience: Experience, batch: MiniBatches, mask_BxT: Bool[Array, "B T"] | None = None
) -> Int32[Array, " B"]:
    """Return the number of tokens of each sample that a mini-batch learns from.

    They are the tokens of the mask, or all action tokens. Samples outside the mini-batch, or
    excluded by the sample mask, have 0.
    """
    counted_BxT = experience.action_mask if mask_BxT is None else mask_BxT
    return jnp.where(batch.members & experience.sample_mask, counted_BxT.sum(1), 0)


def needs_reference_pass(options: Actor) -> bool:
    """Return whether the loss has a KL over the vocabulary, from the reference's hidden states."""
    return options.use_kl_loss and KL_ESTIMATORS.lookup(options.kl_loss_type).needs_vocabulary


def roles_of_losses(actor: Actor, teacher: Teacher) -> tuple[str, ...]:
    """Return the frozen roles that the actor's loss runs."""
    reference = ("reference",) if needs_reference_pass(actor) else ()
    return (*reference, "teacher") if teacher.path and teacher.loss_coef else reference


def clip_bounds(options: Actor) -> Clip:
    """Return the bounds of the ratio that the options set."""
    return Clip(
        low=options.clip_ratio if options.clip_ratio_low is None else options.clip_ratio_low,
        high=options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high,
        dual=options.clip_ratio_c or None,
    )


def policy_loss_inputs(
    options: UpdateOptions,
    logprobs: Float[Array, "R L"],
    rows: Rows,
    experience: Experience,
    members_B: Bool[Array, " B"],
) -> LossInputs:
    """Return what a policy loss can ask for on some rows of the mini-batch of these samples."""
    # Counts and sums cover whole responses, wherever their tokens are packed.
    action_counts_B = experience.action_mask.sum(1)
    batch = PolicyBatch(
        logprobs=logprobs,
        # The same policy: a ratio of 1, however differently the sampler's program rounds.
        old_logprobs=(
            jax.lax.stop_gradient(logprobs)
            if options.is_on_policy
            else packing.to_rows(experience.old_logprobs, rows)
        ),
        advantages=packing.to_rows(experience.advantages, rows),
        mask=rows.mask,
        action_counts=action_counts_B[rows.samples],
    )
    return LossInputs(
        batch=batch,
        clip=clip_bounds(options.actor),
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

    A user-defined loss is validated while the program is traced: one that takes a mean itself would
    depend on how a batch is split. Raise `UserError` if it cannot be loaded, returns neither a
    `PolicyLoss` nor that and a dict of metrics, or if a field or metric is not one number per
    token.
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


def _bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


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


def weighted_value_loss(
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
    )
    loss = options.value_loss_coef * jnp.sum(weights.loss * value.loss)
    return loss, {
        "critic/loss": loss,
        "critic/clip_fraction": jnp.sum(weights.mean * value.clipped),
    }
