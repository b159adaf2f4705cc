import jax.numpy as jnp
import pytest

from jax_ppo.training.learner import Metric
from jax_ppo.types import NOTHING


@pytest.mark.parametrize(
    ("metric", "some", "none"),
    [
        (Metric.MEAN, 5.0, NOTHING),
        (Metric.SUM, 10.0, 0.0),
        (Metric.MIN, 3.0, NOTHING),
        (Metric.MAX, 7.0, NOTHING),
        (Metric.FIRST_MAX, 7.0, NOTHING),
        (Metric.FIRST_SUM, 7.0, NOTHING),
    ],
)
def test_metrics_are_of_the_optimizer_steps_that_were_run(metric, some, none):
    """The first mini-batch and the last had no token to learn from."""
    values = jnp.array([99.0, 7.0, 3.0, -99.0])
    assert metric.over_steps(values, jnp.array([False, True, True, False])) == some
    assert metric.over_steps(values, jnp.zeros(4, bool)) == none
