"""The learning rate's schedules and weight decay; tests/ppo/test_update.py has AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.config.training_options import Optim
from jax_ppo.training.optimizer import descend, learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("schedule", "half_way", "end"),
    # After two steps of warm-up, from 2 to a quarter of it: the cosine is half way between them in
    # the middle, as the line is.
    [("constant", 2.0, 2.0), ("linear", 1.25, 0.5), ("cosine", 1.25, 0.5)],
)
def test_a_schedule_ends_at_its_floor_and_stays_there(schedule, half_way, end):
    options = Optim(lr=2.0, lr_warmup_steps=2, lr_schedule=schedule, min_lr_ratio=0.25)
    rates = [float(learning_rate(options, jnp.int32(step), 10)) for step in (0, 1, 2, 6, 10, 1000)]
    np.testing.assert_allclose(rates, [1.0, 2.0, 2.0, half_way, end, end], rtol=1e-6)


def test_weight_decay_leaves_norms_alone():
    params = {"norm": {"scale": jnp.ones(3)}, "embed": {"embedding": jnp.ones((2, 3))}}
    transform = make_optimizer(Optim(weight_decay=0.1), 1.0)
    moved_params, _, _, _ = descend(
        transform, params, transform.init(params), jax.tree.map(jnp.zeros_like, params), 1.0
    )
    np.testing.assert_array_equal(moved_params["norm"]["scale"], 1.0)
    np.testing.assert_allclose(moved_params["embed"]["embedding"], 0.9, rtol=1e-6)
