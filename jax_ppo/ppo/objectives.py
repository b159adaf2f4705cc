"""The losses of actor and critic on packed rows, and their metrics.

An objective returns the share of a mini-batch's loss that its rows contribute. Shares of the loss
add up over rows; shares of a metric combine as its `learner.Metric` states.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_ppo.config.schema import Actor, Config, Critic, Teacher
from jax_ppo.kernels import kl, losses
from jax_ppo.models.heads import compute_scalars
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo.forward_passes import reuses_logprobs
from jax_ppo.ppo.policy_loss import compute_policy_loss, policy_loss_inputs, policy_metrics
from jax_ppo.ppo.reward_shaping import get_kl_estimator
from jax_ppo.registries import AGGREGATIONS, KL_ESTIMATORS
from jax_ppo.training import forward, packing
from jax_ppo.training.forward import DecoderOutput
from jax_ppo.training.learner import LossAndMetrics, Metric
from jax_ppo.training.networks import full_parameters
from jax_ppo.training.optimizer import rounding_seed
from jax_ppo.training.packing import Rows
from jax_ppo.types import Experience, MiniBatches, Params, Sequences, pytree

# How metrics are reduced. The actor's objective also returns the critic's if they share a trunk.
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
    # Near 0 if the old log-probs are right; exactly 0 with `UpdateOptions.is_on_policy`.
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
# Names, after `actor/`, of further metrics that the learner and the update add.
OTHER_ACTOR_METRICS = ("grad_norm", "skipped", "steps_taken", "lr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Options of the update of actor and critic; a static argument of compiled functions."""

    actor: Actor
    critic: Critic
    temperature: float  # divides the logits, as in sampling
    teacher_coef: float  # weight of KL(actor || teacher) over the vocabulary; 0: no teacher
    # Whether the update's log-probs, without their gradient, serve as the old ones: the rollout
    # gets one optimizer step, and no forward pass has computed the old ones.
    is_on_policy: bool
    shares_trunk: bool  # whether the critic is a head on the actor's trunk; its loss is then added
    critic_warmup: int  # first steps of the run, in which only the critic learns
    loss_scale: float  # tokens, the divisor of "seq-mean-token-sum-norm" of both roles
    rounding_seed: int  # the run's seed if either role rounds to bfloat16, else 0
    is_exact: bool = False  # whether to count log-probs that differ from the rollout's

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
            critic_warmup=config.trainer.critic_warmup,
            loss_scale=actor.loss_scale_factor or config.data.max_response_length,
            rounding_seed=rounding_seed(actor.optim, seed) or rounding_seed(critic.optim, seed),
            is_exact=config.rollout.exact,
        )


@pytree
class Weights:
    """Weights of a mini-batch: for each token, [R, L], or for each sample, [B].

    A sample's `loss` and `mean` are given to each of its tokens that the mask selects; its
    `sequence` is divided among all its tokens, prompt included.
    """

    loss: Float32[Array, "..."]  # in the loss, according to `loss_agg_mode`
    mean: Float32[Array, "..."]  # in the mean over the mini-batch's tokens
    sequence: Float32[Array, "..."]  # in the mean over sequences of their means over tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutObjective:
    """The common part of both roles' objectives on one rollout; see `learner.Objective`."""

    options: UpdateOptions
    aggregation: str  # see `registries.AGGREGATIONS`
    net: Transformer  # the role's model
    base: Params | None  # the frozen parameters below the adapters; unused without adapters
    experience: Experience

    @property
    def sequences(self) -> Sequences:
        """Return the rollout's samples."""
        return self.experience.sequences

    def has_tokens(self, batch: MiniBatches) -> jax.Array:
        """Return whether a mini-batch has any token to learn from, bool scalar."""
        return jnp.any(count_learned_tokens(self.experience, batch) > 0)

    def sample_weights(
        self, batch: MiniBatches, mask_BxT: Bool[Array, "B T"] | None = None
    ) -> Weights:
        """Return the weights [B] of a whole mini-batch's samples; by default all actions count."""
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
        """Return the weights of the tokens of some rows, [R, L], from their samples' weights."""
        mask = rows.mask
        if mask_BxT is not None:
            mask &= mask_BxT[rows.samples, rows.steps]
        share_RxL = packing.sequence_weights(self.sequences, rows)
        return Weights(
            loss=jnp.where(mask, weights.loss[rows.samples], 0),
            mean=jnp.where(mask, weights.mean[rows.samples], 0),
            sequence=share_RxL * weights.sequence[rows.samples],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorObjective(RolloutObjective):
    """The policy loss, plus the KL to the reference, minus the entropy bonus."""

    # The reference's model and parameters; used only by a KL over the vocabulary.
    reference: tuple[Transformer, Params] | None = None
    # The teacher's model and parameters; `None` if the loss has no KL to it.
    teacher: tuple[Transformer, Params] | None = None
    plugin_metrics: tuple[str, ...] = ()  # names of a user-defined policy loss's metrics

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Return how each metric of the loss is reduced."""
        absent = {
            "actor/router_loss": not self.options.actor.router_aux_loss_coef,
            "actor/teacher_kl": self.teacher is None,
            "actor/inexact_logprobs": not self.options.is_exact,
            "critic/router_loss": True,
        }
        prefixes = ("actor/", "critic/") if self.options.shares_trunk else ("actor/",)
        metrics = {
            name: metric
            for name, metric in METRICS.items()
            if name.startswith(prefixes) and not absent.get(name)
        }
        return metrics | dict.fromkeys(self.plugin_metrics, Metric.MEAN)

    def weigh(self, batch: MiniBatches) -> tuple[Weights, Weights | None]:
        """Return the samples' weights in the policy loss, and in a shared critic's value loss."""
        value_weights = None
        if self.options.shares_trunk:
            value_weights = self.sample_weights(batch, self.experience.value_mask)
        return self.sample_weights(batch), value_weights

    def loss(
        self, params: Params, rows: Rows, weights: tuple[Weights, Weights | None]
    ) -> LossAndMetrics:
        """Return the share of a mini-batch's loss that its rows contribute, and metrics."""
        policy_weights, value_weights = weights
        options, net, experience = self.options, self.net, self.experience
        actor = options.actor
        token_weights = self.token_weights(rows, policy_weights)
        # Joined inside the differentiated function, so that adapters receive gradients.
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
            # A coefficient of 0 would not keep the entropy's backward pass from running.
            entropy_RxL = jax.lax.stop_gradient(entropy_RxL)
        members_B = policy_weights.sequence > 0
        inputs = policy_loss_inputs(
            actor, logprobs_RxL, rows, experience, members_B, options.is_on_policy
        )
        policy, plugin_metrics = compute_policy_loss(actor.policy_loss, inputs)
        # Weights for tokens that an older policy or another program sampled.
        importance_RxL: int | jax.Array = 1
        if experience.importance is not None:
            importance_RxL = packing.to_rows(experience.importance, rows)

        # The sum of all terms; those that the options leave out are not computed.
        pg_loss = jnp.sum(token_weights.loss * importance_RxL * policy.loss)
        output = DecoderOutput(net, params, hidden)
        kl_loss = self._kl_loss(output, logprobs_RxL, rows, token_weights)
        entropy_bonus = jnp.sum(token_weights.loss * entropy_RxL)
        loss = pg_loss + actor.kl_loss_coef * kl_loss - actor.entropy_coeff * entropy_bonus
        metrics = {"actor/pg_loss": pg_loss, "actor/kl_loss": kl_loss}
        if self.teacher is not None:
            teacher_kl_RxL = self._kl_over_vocabulary(output, self.teacher, rows)
            loss += options.teacher_coef * jnp.sum(token_weights.loss * teacher_kl_RxL)
            metrics["actor/teacher_kl"] = jnp.sum(token_weights.mean * teacher_kl_RxL)
        if router_loss_RxL is not None:
            router_loss = jnp.sum(token_weights.sequence * router_loss_RxL)
            loss += actor.router_aux_loss_coef * router_loss
            metrics["actor/router_loss"] = router_loss
        metrics["actor/loss"] = loss  # without a shared critic's, added below
        metrics |= policy_metrics(policy, entropy_RxL, plugin_metrics, token_weights.mean)
        if options.is_exact:
            differs_RxL = rows.mask & (logprobs_RxL != inputs.batch.old_logprobs)
            metrics["actor/inexact_logprobs"] = jnp.sum(differs_RxL, dtype=jnp.float32)
        if value_weights is not None:
            value_part, critic_metrics = weighted_value_loss(
                options.critic,
                compute_scalars(params, hidden),
                rows,
                experience,
                self.token_weights(rows, value_weights, experience.value_mask),
            )
            loss += value_part
            metrics |= critic_metrics
        return loss, metrics

    def _kl_loss(
        self, output: DecoderOutput, logprobs: Float[Array, "R L"], rows: Rows, weights: Weights
    ) -> Float32[Array, ""]:
        """Return the weighted KL to the reference, exact or estimated; 0 if the loss has none."""
        options = self.options
        if not options.actor.use_kl_loss:
            return jnp.float32(0)
        if needs_reference_pass(options.actor):
            # The exact KL needs the reference's hidden states: a forward pass per micro-batch.
            assert self.reference is not None, "a KL loss needs a reference"
            kl_tokens = self._kl_over_vocabulary(output, self.reference, rows)
        else:
            assert self.experience.ref_logprobs is not None, "a KL loss needs a reference"
            ref_logprobs = packing.to_rows(self.experience.ref_logprobs, rows)
            estimator = get_kl_estimator(options.actor.kl_loss_type, "actor.kl_loss_type")
            kl_tokens = kl.kl_estimate(logprobs, ref_logprobs, rows.mask, estimator)
        return jnp.sum(weights.loss * kl_tokens)

    def _kl_over_vocabulary(
        self, output: DecoderOutput, other: tuple[Transformer, Params], rows: Rows
    ) -> Float[Array, "R L"]:
        """Return KL(actor || other) at each token; `other` is a frozen model and its parameters."""
        other_output = DecoderOutput(*other, forward.hidden_states(*other, rows))
        return forward.kl_over_vocabulary(output, other_output, rows, self.options.temperature)


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
        """Return the samples' weights in the value loss."""
        return self.sample_weights(batch, self.experience.value_mask)

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

    They are the tokens that the mask selects, by default all action tokens; samples that are
    outside the mini-batch, or excluded from all losses, have none.
    """
    counted_BxT = experience.action_mask if mask_BxT is None else mask_BxT
    return jnp.where(batch.members & experience.sample_mask, counted_BxT.sum(1), 0)


def needs_reference_pass(options: Actor) -> bool:
    """Return whether the loss has a KL over the vocabulary, from the reference's hidden states."""
    return options.use_kl_loss and KL_ESTIMATORS.lookup(options.kl_loss_type).needs_vocabulary


def roles_of_losses(actor: Actor, teacher: Teacher) -> tuple[str, ...]:
    """Return the frozen roles whose forward passes the actor's loss runs."""
    reference = ("reference",) if needs_reference_pass(actor) else ()
    return (*reference, "teacher") if teacher.path and teacher.loss_coef else reference


def weighted_value_loss(
    options: Critic,
    values: Float[Array, "R L"],
    rows: Rows,
    experience: Experience,
    weights: Weights,
) -> LossAndMetrics:
    """Return the weighted value loss, without a router loss, and its metrics."""
    assert experience.values is not None, "a value loss needs values"
    assert experience.returns is not None, "a value loss needs returns"
    # All three are in the critic's unit, normalized or not.
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
