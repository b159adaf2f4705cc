"""The metrics of the losses, and how their shares are combined over rows and optimizer steps."""

import enum
from collections.abc import Mapping

import jax
import jax.numpy as jnp

# Begins the names of metrics that have a value for each optimizer step; the role's name follows.
OPTIMIZER_STEPS = "optimizer_steps/"


class Metric(enum.Enum):
    """Reduction of a metric: over the rows of a mini-batch, then over optimizer steps.

    MEAN: shares add up to a mini-batch's value; the mean over steps.
    SUM: shares add up; the sum over steps, 0 if there were none.
    MIN, MAX: the extreme of all shares of all steps.
    FIRST_MAX: the maximum over rows, of the first step.
    """

    MEAN = enum.auto()
    SUM = enum.auto()
    MIN = enum.auto()
    MAX = enum.auto()
    FIRST_MAX = enum.auto()

    @property
    def start(self) -> float:
        """Return the value that the first share is combined with."""
        return {
            Metric.MIN: float("inf"),
            Metric.MAX: -float("inf"),
            Metric.FIRST_MAX: -float("inf"),
        }.get(self, 0.0)

    def combine(self, total: jax.Array, share: jax.Array) -> jax.Array:
        """Return the value of two groups of rows together."""
        if self is Metric.MIN:
            return jnp.minimum(total, share)
        if self in (Metric.MAX, Metric.FIRST_MAX):
            return jnp.maximum(total, share)
        return total + share

    def over_steps(self, values_U: jax.Array, has_tokens_U: jax.Array) -> jax.Array:
        """Return one value of all steps that had tokens; NaN if none had, except for SUM."""
        if self is Metric.SUM:
            return jnp.sum(values_U, where=has_tokens_U)
        if self is Metric.MIN:
            value = jnp.min(values_U, where=has_tokens_U, initial=self.start)
        elif self is Metric.MAX:
            value = jnp.max(values_U, where=has_tokens_U, initial=self.start)
        elif self is Metric.FIRST_MAX:
            value = values_U[jnp.argmax(has_tokens_U)]
        else:
            value = jnp.sum(values_U, where=has_tokens_U) / jnp.sum(has_tokens_U)
        return jnp.where(jnp.any(has_tokens_U), value, jnp.nan)


ACTOR_METRICS: Mapping[str, Metric] = {
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
}


# What the actor's update adds to the metrics of its loss.
UPDATE_METRICS = (
    "actor/router_loss",
    "actor/grad_norm",
    "actor/skipped",
    "actor/steps_taken",
    "actor/lr",
)


CRITIC_METRICS: Mapping[str, Metric] = {
    "critic/loss": Metric.MEAN,
    "critic/clip_fraction": Metric.MEAN,
}
