"""The learner: optimizer steps over mini-batches and micro-batches, for any objective.

    for each of the U mini-batches of a rollout:                      # scan_mini_batches
        weights = objective.weigh(mini-batch)                         # gradients
        for each of its micro-batches, at most A, of packed rows:     # add_micro_batch
            gradients += gradients of objective.loss(params, rows, weights)
        params = params moved against the gradients                   # take_optimizer_step

An objective fixes each token's weight by its whole mini-batch before the mini-batch is split into
micro-batches or over devices, so neither split changes the gradient.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

from jax_ppo.config.schema import Actor, Critic, Supervised
from jax_ppo.models.lora import join_params
from jax_ppo.runtime import placement
from jax_ppo.runtime.sharding import constrain_rows, constrain_tree
from jax_ppo.training import packing
from jax_ppo.training.optimizer import (
    add_gradients,
    descend,
    make_optimizer,
    rounding_keys,
    split_frozen,
    zero_gradients,
)
from jax_ppo.training.packing import Rows
from jax_ppo.training.random_streams import Stream
from jax_ppo.types import NOTHING, MiniBatches, Packing, Params, Sequences

Metrics = dict[str, jax.Array]
LossAndMetrics = tuple[Float32[Array, ""], Metrics]
# Parameters, optimizer state, and whether the metric of the early stop is still within its limit.
Carry = tuple[Params, optax.OptState, jax.Array]


class Metric(enum.Enum):
    """Reduction of a metric: over the rows of a mini-batch, then over optimizer steps.

    MEAN: the sum over rows, whose shares are weighted; then the mean over optimizer steps.
    SUM: the sum over both, 0 if there were none. MIN, MAX: the extreme over both.
    FIRST_MAX, FIRST_SUM: the maximum or the sum over rows of the first optimizer step that was run.
    """

    MEAN = enum.auto()
    SUM = enum.auto()
    MIN = enum.auto()
    MAX = enum.auto()
    FIRST_MAX = enum.auto()
    FIRST_SUM = enum.auto()

    @property
    def start(self) -> float:
        """Return the value that the first share is combined with."""
        if self in (Metric.MEAN, Metric.SUM, Metric.FIRST_SUM):
            return 0.0
        return math.inf if self is Metric.MIN else -math.inf

    def combine(self, total: jax.Array, share: jax.Array) -> jax.Array:
        """Return the value of two groups of rows together."""
        if self is Metric.MIN:
            return jnp.minimum(total, share)
        if self in (Metric.MAX, Metric.FIRST_MAX):
            return jnp.maximum(total, share)
        return total + share

    def over_steps(self, values_U: jax.Array, was_run_U: jax.Array) -> jax.Array:
        """Return one value for all optimizer steps that were run; `NOTHING` if none, 0 for SUM."""
        if self is Metric.SUM:
            return jnp.sum(values_U, where=was_run_U)
        if self in (Metric.MIN, Metric.MAX):
            extreme = jnp.min if self is Metric.MIN else jnp.max
            value = extreme(values_U, where=was_run_U, initial=self.start)
        elif self in (Metric.FIRST_MAX, Metric.FIRST_SUM):
            value = values_U[jnp.argmax(was_run_U)]
        else:
            value = jnp.sum(values_U, where=was_run_U) / jnp.maximum(jnp.sum(was_run_U), 1)
        return jnp.where(jnp.any(was_run_U), value, NOTHING)


class Objective(Protocol):
    """The loss of the samples of one rollout or batch, which a learner minimizes."""

    @property
    def sequences(self) -> Sequences:
        """Return the samples that mini-batches consist of."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Return how each metric of `loss` is reduced."""

    def has_tokens(self, batch: MiniBatches) -> jax.Array:
        """Return whether a mini-batch has anything to learn from, bool scalar."""

    def weigh(self, batch: MiniBatches) -> Any:
        """Return what `loss` needs of the whole mini-batch, such as the weights of its samples."""

    def loss(self, params: Params, rows: Rows, weights: Any) -> LossAndMetrics:
        """Return the share of a mini-batch's loss and metrics that some of its rows contribute."""


@dataclasses.dataclass(frozen=True)
class Learner:
    """Optimizer steps on an objective."""

    rounding_stream: Stream  # with `rounding_seed`, addresses the random numbers of rounding
    objective: Objective
    options: Actor | Critic | Supervised  # the section of what is trained
    prefix: str = ""  # begins the names of the metrics that the learner adds
    # A metric, and the limit beyond which a mini-batch ends the steps on a rollout.
    early_stop: tuple[str, float] | None = None
    rounding_seed: int = 0  # of the stochastic rounding of what is stored in bfloat16

    def scan_mini_batches(
        self,
        params: Params,
        optimizer_state: optax.OptState,
        rate: Float32[Array, ""],
        update_enabled: bool | jax.Array,
        batches: MiniBatches,
    ) -> tuple[Params, optax.OptState, Metrics]:
        """Take one optimizer step per mini-batch; `batches` has a leading axis U of them.

        If `update_enabled` is False, metrics are computed, but nothing changes. The new parameters
        and optimizer state stay in the memory they were given in, laid out by `TRAIN_RULES`;
        metrics are over all optimizer steps.
        """
        skipped = f"{self.prefix}skipped"

        def mini_batch(
            carry: Carry, batch: MiniBatches
        ) -> tuple[Carry, tuple[Metrics, jax.Array, jax.Array]]:
            params, optimizer_state, within_limit = carry
            # Past the limit, or without any token to learn from, no micro-batch is run.
            runs = within_limit & self.objective.has_tokens(batch)
            batch = dataclasses.replace(batch, counts=jnp.where(runs, batch.counts, 0))
            params, optimizer_state, metrics, is_within = self.take_optimizer_step(
                params, optimizer_state, rate, update_enabled & runs, batch
            )
            within_limit &= is_within
            was_taken = within_limit & runs & update_enabled & (metrics[skipped] == 0)
            return (params, optimizer_state, within_limit), (metrics, runs, was_taken)

        # One compiled loop over epochs and mini-batches: no return to the host in between.
        start = (*placement.to_device((params, optimizer_state)), jnp.bool_(True))
        (*trained, _), (metrics_U, was_run_U, taken_U) = jax.lax.scan(mini_batch, start, batches)
        reductions = {  # besides the objective's metrics: what `take_optimizer_step` adds
            **self.objective.metrics,
            f"{self.prefix}grad_norm": Metric.MEAN,
            skipped: Metric.SUM,
        }
        metrics = {
            name: reductions[name].over_steps(values_U, was_run_U)
            for name, values_U in metrics_U.items()
        }
        if self.early_stop is not None:
            metrics[f"{self.prefix}steps_taken"] = jnp.sum(taken_U)
        # Without the constraint, the compiler may split arrays that TRAIN_RULES replicates, and the
        # next call would compile another program for this layout.
        new_params, new_optimizer = constrain_tree(tuple(trained))
        return (
            placement.to_memory_of(new_params, params),
            placement.to_memory_of(new_optimizer, optimizer_state),
            metrics,
        )

    def take_optimizer_step(
        self,
        params: Params,
        optimizer_state: optax.OptState,
        rate: Float32[Array, ""],
        update_enabled: bool | jax.Array,
        batch: MiniBatches,
    ) -> tuple[Params, optax.OptState, Metrics, bool | jax.Array]:
        """Take the optimizer step of one mini-batch: `batch` without the leading axis U.

        Return new parameters and optimizer state, metrics, and whether the mini-batch is within the
        limit of the early stop; if it is not, parameters and state are unchanged.
        """
        stored_key, sum_key = rounding_keys(
            self.rounding_seed, self.rounding_stream, optimizer_state
        )
        gradients, metrics = self.gradients(params, batch, sum_key)
        trained, frozen = split_frozen(self.options, params)
        is_within: bool | jax.Array = True
        if self.early_stop is not None:
            # Measured before the step, so that a step past the limit is not taken.
            metric, limit = self.early_stop
            is_within = metrics[metric] <= limit
        trained, optimizer_state, norm, is_finite = descend(
            transform=make_optimizer(self.options),
            params=trained,
            opt_state=optimizer_state,
            gradients=gradients,
            rate=rate,
            update_enabled=update_enabled & is_within,
            key=stored_key,
        )
        metrics |= {
            f"{self.prefix}grad_norm": norm,
            f"{self.prefix}skipped": (~is_finite).astype(jnp.float32),
        }
        return join_params(frozen, trained), optimizer_state, metrics, is_within

    def gradients(
        self, params: Params, batch: MiniBatches, key: jax.Array | None = None
    ) -> tuple[Params, Metrics]:
        """Return gradients and metrics of one mini-batch, summed over micro-batches.

        Only what is trained has gradients. They are summed in `optim.gradient_dtype`, metrics in
        float32. `key`, the second of `rounding_keys`, rounds sums in bfloat16.
        """
        objective = self.objective
        weights = objective.weigh(batch)
        trained, frozen = split_frozen(self.options, params)

        def loss(trained: Params, rows: Rows) -> LossAndMetrics:
            return objective.loss(join_params(frozen, trained), rows, weights)

        def add_micro_batch(i: jax.Array, sums: tuple[Params, Metrics]) -> tuple[Params, Metrics]:
            rows = gather_micro_batch(objective.sequences, batch.packing, i)
            gradients, metrics = jax.grad(loss, has_aux=True)(trained, rows)
            micro_key = None if key is None else jax.random.fold_in(key, i)
            combined = {
                name: metric.combine(sums[1][name], metrics[name])
                for name, metric in objective.metrics.items()
            }
            return add_gradients(sums[0], gradients, micro_key), combined

        zeros = zero_gradients(trained, self.options.optim.gradient_dtype)
        start = {name: jnp.float32(metric.start) for name, metric in objective.metrics.items()}
        return jax.lax.fori_loop(0, batch.counts, add_micro_batch, (zeros, start))


def gather_micro_batch(sequences: Sequences, packed: Packing, i: jax.Array) -> Rows:
    """Return the rows of micro-batch i of a packing [A, R, L]."""
    # The devices split the packing, so that each gathers only a part of the rows.
    return packing.gather_rows(sequences, jax.tree.map(lambda x: constrain_rows(x[i]), packed))
