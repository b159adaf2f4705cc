import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import schedules

POINTS = ((10, 1.0), (20, 3.0), (40, 0.0))


@pytest.mark.parametrize(
    ("linear", "expected"),
    [
        (False, [1, 1, 1, 3, 3, 0, 0]),
        (True, [1, 1, 1.8, 3, 1.5, 0, 0]),  # 14: 1 + 4/10 x 2; 30: half of 3
    ],
)
def test_by_hand(linear, expected):
    steps = jnp.array([0, 10, 14, 20, 30, 40, 1000])
    result = jax.jit(lambda s: schedules.piecewise(POINTS, s, linear))(steps)  # traced steps
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    one = schedules.piecewise(POINTS, 14, linear)
    assert one.shape == () and one.dtype == jnp.float32
    np.testing.assert_allclose(one, expected[2], rtol=1e-6)


@pytest.mark.parametrize("linear", [False, True])
def test_one_point_is_a_constant(linear):
    np.testing.assert_array_equal(
        schedules.piecewise(((5, 0.25),), jnp.array([0, 5, 9]), linear), 0.25
    )


def test_a_step_changes_at_its_point_and_not_one_off():
    result = schedules.piecewise(
        ((0, 1.0), (10_000_001, 2.0)), jnp.array([10_000_000, 10_000_001]), linear=False
    )
    np.testing.assert_array_equal(result, [1, 2])
