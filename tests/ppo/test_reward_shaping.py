import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.ppo.reward_shaping import soft_overlong_penalty


def test_soft_overlong_penalty_by_hand():
    # At most 20, buffer 8, factor 2: 0 up to 12; then 1/4 per token: -0.25 for 13, half of 2 for
    # 16, all of it for 20, and no more.
    penalty = jax.jit(soft_overlong_penalty, static_argnums=(1, 2, 3))(
        jnp.array([0, 12, 13, 16, 20, 25]), 20, 8, 2.0
    )
    assert penalty.dtype == jnp.float32
    np.testing.assert_array_equal(penalty, [0, 0, -0.25, -1, -2, -2])
