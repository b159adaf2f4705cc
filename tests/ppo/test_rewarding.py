"""Rewards of a rollout: failures of the rule over steps."""

import dataclasses

import numpy as np
import pytest

from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError
from jax_ppo.ppo.rewarding import FailedSteps, RuleRewards


def rewards(failures):
    scores = np.zeros(4, np.float32)
    return RuleRewards(
        scores=scores,
        steps=None,
        correct=scores,
        failures=failures,
        extra={},
        first_failure="row 2 of the batch" if failures else "",
    )


def test_a_rule_that_fails_on_everything_for_some_steps_stops_the_run():
    """Regression: the run went on with fallback scores only."""
    steps = FailedSteps(dataclasses.replace(Reward(), function="mine.py:f"))
    for step, failures in enumerate([4, 4, 3, 4, 4]):  # 3 of 4 starts the count again
        steps.count(step, rewards(failures))
    with pytest.raises(UserError) as error:
        steps.count(5, rewards(4))
    assert str(error.value) == (
        "config.reward.function='mine.py:f' failed on every response of 3 consecutive steps "
        "(config.reward.max_failed_steps=3). The first failure of step 6 was row 2 of the batch"
    )
