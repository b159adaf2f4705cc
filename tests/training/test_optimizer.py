"""The learning rate's schedules; AdamW is in tests/ppo/test_update.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.config.schema import Optim
from jax_ppo.training.optimizer import learning_rate


@pytest.mark.parametrize(
    ("schedule", "half_way", "end"),
    # From 2 to a quarter of it: the cosine is half way between them in the middle, as the line is.
    [("constant", 2.0, 2.0), ("linear", 1.25, 0.5), ("cosine", 1.25, 0.5)],
)
def test_a_schedule_ends_at_its_floor_and_stays_there(schedule, half_way, end):
    options = Optim(lr=2.0, lr_warmup_steps=2, lr_schedule=schedule, min_lr_ratio=0.25)
    rates = [float(learning_rate(options, jnp.int32(step), 10)) for step in (2, 6, 10, 11, 1000)]
    np.testing.assert_allclose(rates, [2.0, half_way, end, end, end], rtol=1e-6)
