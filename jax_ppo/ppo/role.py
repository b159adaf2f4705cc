"""The optimizer steps of one role on a rollout: mini-batches, micro-batches, gradients.

Each token's weight in a loss is fixed by its whole mini-batch before the mini-batch is split into
micro-batches or over devices, so neither split changes the gradient.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float32, Int32

from jax_ppo.config.schema import Optim
from jax_ppo.kernels import losses
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import objectives
from jax_ppo.ppo.loss_metrics import OPTIMIZER_STEPS, Metric
from jax_ppo.ppo.objectives import ActorContext, Metrics, Weights
from jax_ppo.runtime.sharding import constrain_rows
from jax_ppo.training import packing
from jax_ppo.training.gradients import add_gradient
from jax_ppo.training.networks import full_parameters
from jax_ppo.training.optimizer import descend, make_optimizer, rounding_keys
from jax_ppo.training.stochastic_rounding import zero_gradients
from jax_ppo.types import Experience, MiniBatches, Params

# Parameters, optimizer state, and whether the policy is still within `target_kl`.
Carry = tuple[Params, optax.OptState, jax.Array]


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """End of a role's optimizer steps on a rollout.

    Attributes:
      metric: the metric that is compared.
      limit: no further steps are taken once a mini-batch exceeds it.
    """

    metric: str
    limit: float


@dataclasses.dataclass(frozen=True)
class Role:
    """A role that learns: its model, its objective and its optimizer.

    Attributes:
      name: the prefix of its own metrics.
      net: its model.
      objective: (params, context, rows, experience, weights) -> (loss, metrics), see objectives.py.
      metrics: how each of the objective's metrics is reduced.
      optim: options of the optimizer.
      grad_clip: largest global gradient norm.
      aggregation: see `registries.AGGREGATIONS`.
      loss_scale: tokens, the divisor of "seq-mean-token-sum-norm".
      early_stop: `None` takes all steps.
      base: frozen parameters that the role's adapters apply to; `None` without adapters.
      rounding_seed: seed of the stochastic rounding of what is stored in bfloat16.
      logs_optimizer_steps: return the metrics of each optimizer step besides the reduced ones.
    """

    name: str
    net: Transformer
    objective: Callable[..., objectives.LossAndMetrics]
    metrics: Mapping[str, Metric]
    optim: Optim
    grad_clip: float
    aggregation: str
    loss_scale: float
    early_stop: EarlyStop | None = None
    base: Params | None = None
    rounding_seed: int = 0
    logs_optimizer_steps: bool = False

    def train(
        self,
        params: Params,
        optimizer_state: optax.OptState,
        rate: Float32[Array, ""],
        update_enabled: bool | jax.Array,
        context: ActorContext | None,
        experience: Experience,
        batches: MiniBatches,
    ) -> tuple[Params, optax.OptState, Metrics]:
        """Take all optimizer steps on one rollout.

        Args:
          params: the role's parameters, or its adapters.
          optimizer_state: the state of their optimizer.
          rate: the learning rate.
          update_enabled: bool scalar; False measures without moving anything.
          context: constants of the objective.
          experience: the rollout's experience.
          batches: U mini-batches.

        Returns:
          The new parameters and optimizer state, and metrics.
        """
        transform = make_optimizer(self.optim, self.grad_clip)

        def mini_batch(
            carry: Carry, batch: MiniBatches
        ) -> tuple[Carry, tuple[Metrics, jax.Array, jax.Array]]:
            params, optimizer_state, within_target_kl = carry
            # Past the target, or without any token to learn from, no micro-batch is run.
            any_tokens = jnp.any(count_learned_tokens(experience, batch) > 0)
            has_tokens = within_target_kl & any_tokens
            batch = dataclasses.replace(batch, counts=jnp.where(has_tokens, batch.counts, 0))
            # Measure first: the step that exceeds the target is not taken either.
            stored_key, sum_key = rounding_keys(self.rounding_seed, self.name, optimizer_state)
            gradients, metrics = self.gradients(params, context, experience, batch, sum_key)
            if self.early_stop is not None:
                within_target_kl &= metrics[self.early_stop.metric] <= self.early_stop.limit
            params, optimizer_state, norm, is_finite = descend(
                transform=transform,
                params=params,
                opt_state=optimizer_state,
                gradients=gradients,
                rate=rate,
                update_enabled=update_enabled & within_target_kl & has_tokens,
                key=stored_key,
            )
            metrics |= {
                f"{self.name}/grad_norm": norm,
                f"{self.name}/skipped": (~is_finite).astype(jnp.float32),
            }
            carry = (params, optimizer_state, within_target_kl)
            return carry, (metrics, has_tokens, within_target_kl & has_tokens)

        # One compiled loop over epochs and mini-batches: no return to the host in between.
        start = (params, optimizer_state, jnp.bool_(True))
        (params, optimizer_state, _), (metrics_U, has_tokens_U, taken_U) = jax.lax.scan(
            mini_batch, start, batches
        )
        metrics = self._reduce_over_steps(metrics_U, has_tokens_U)
        if self.early_stop is not None:
            metrics[f"{self.name}/steps_taken"] = jnp.sum(taken_U)
        if self.logs_optimizer_steps:
            prefix = f"{OPTIMIZER_STEPS}{self.name}/"
            metrics |= {
                prefix + name: jnp.where(has_tokens_U, values_U, jnp.nan)
                for name, values_U in metrics_U.items()
            }
        return params, optimizer_state, metrics

    def gradients(
        self,
        params: Params,
        context: ActorContext | None,
        experience: Experience,
        batch: MiniBatches,
        key: jax.Array | None = None,
    ) -> tuple[Params, Metrics]:
        """Return gradients and metrics of one mini-batch, summed over micro-batches.

        The gradients are summed in `optim.gradient_dtype`, the metrics in float32.

        Args:
          params: the role's parameters, or its adapters.
          context: constants of the objective.
          experience: the rollout's experience.
          batch: one mini-batch, without the leading U.
          key: the second of `rounding_keys`; `None` if gradients are summed in float32.
        """
        # Weights are those of the whole mini-batch, whatever its split.
        counts_B = count_learned_tokens(experience, batch)
        loss_B = losses.loss_weights(counts_B, self.aggregation, self.loss_scale)
        mean_B = losses.loss_weights(counts_B, "token-mean")
        sequence_B = (counts_B > 0) / jnp.maximum(jnp.sum(counts_B > 0), 1)

        def micro_batch(i: jax.Array, carry: tuple[Params, Metrics]) -> tuple[Params, Metrics]:
            # The devices split the plan, so that each gathers its own rows only.
            plan = jax.tree.map(lambda x: constrain_rows(x[i]), batch.packing)
            rows = packing.gather_rows(experience.sequences, plan)
            weights = Weights(
                loss=jnp.where(rows.mask, loss_B[rows.samples], 0),
                mean=jnp.where(rows.mask, mean_B[rows.samples], 0),
            )
            own_share = packing.sequence_weights(experience.sequences, rows)
            weights = dataclasses.replace(weights, sequence=own_share * sequence_B[rows.samples])

            def objective(learned: Params) -> objectives.LossAndMetrics:
                # Inside the gradient, so that adapters receive theirs through the join.
                all_params = full_parameters(self.net, learned, self.base)
                return self.objective(all_params, context, rows, experience, weights)

            gradient_sum, totals = carry
            sum_key = None if key is None else jax.random.fold_in(key, i)
            gradient_sum, metrics = add_gradient(
                objective, params, gradient_sum, sum_key, trains_layers=self.net.lora is None
            )
            totals = {
                name: metric.combine(totals[name], metrics[name])
                for name, metric in self.metrics.items()
            }
            return gradient_sum, totals

        zeros = zero_gradients(params, self.optim.gradient_dtype)
        start = {name: jnp.float32(metric.start) for name, metric in self.metrics.items()}
        return jax.lax.fori_loop(0, batch.counts, micro_batch, (zeros, start))

    def _reduce_over_steps(self, metrics_U: Metrics, has_tokens_U: Bool[Array, " U"]) -> Metrics:
        """Return one value per metric from the optimizer steps that had tokens."""
        # Besides the objective's own metrics: what `train` adds per optimizer step.
        reductions = {
            **self.metrics,
            f"{self.name}/grad_norm": Metric.MEAN,
            f"{self.name}/skipped": Metric.SUM,
        }
        return {
            name: reductions[name].over_steps(values_U, has_tokens_U)
            for name, values_U in metrics_U.items()
        }


def count_learned_tokens(experience: Experience, batch: MiniBatches) -> Int32[Array, " B"]:
    """Return the number of action tokens of each sample that a mini-batch learns from.

    Samples outside the mini-batch, or excluded by the sample mask, have 0.
    """
    learned_B = batch.members & experience.sample_mask
    return jnp.where(learned_B, experience.action_mask.sum(1), 0)
