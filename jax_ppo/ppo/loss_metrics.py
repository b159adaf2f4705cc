"""The metrics of the losses, and how their shares are combined over rows and optimizer steps."""

from collections.abc import Mapping

from jax_ppo.training.learner import Metric

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
