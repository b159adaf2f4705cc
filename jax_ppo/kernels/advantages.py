"""Advantages and returns of one sequence of tokens."""

import jax
import jax.numpy as jnp

from jax_ppo.kernels.masked import zero_outside


def gae(
    rewards_T: jax.Array,
    values_T: jax.Array,
    mask_T: jax.Array,
    gamma: float,
    lam: float,
    bootstrap_value: float | jax.Array = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) of one response.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}
        G_t     = A_t + V_t

    One sequence; `vmap` it over a batch. gamma and lam lie in [0, 1]. lam = 1 is the discounted return minus the value:
    no bias from the critic, and the most variance. lam = 0 is the one-step error: all of the critic's bias, and the
    least variance.

    Args:
      rewards_T: r_t, the reward for emitting token t.
      values_T: V_t, the value of the state in which token t is chosen, that is before it is emitted.
      mask_T: 1 on the tokens of the response, a prefix of the row; 0 on padding, which may hold anything.
      bootstrap_value: V after the last token of the response, wherever in the row that is. 0 for a response that ended.

    Returns:
      (advantages_T, returns_T), float32, 0 where mask is 0. Advantages are raw: whiten them afterwards, since returns
      made from whitened advantages would be no estimate of anything.
    """
    assert rewards_T.ndim == 1, f"gae takes one sequence, not an array of shape {rewards_T.shape}: vmap it"
    assert rewards_T.shape == values_T.shape == mask_T.shape, (rewards_T.shape, values_T.shape, mask_T.shape)
    rewards_T, values_T = zero_outside(rewards_T, mask_T), zero_outside(values_T, mask_T)

    def step_back(after, now):
        advantage_after, value_after = after
        reward, value, kept = now
        delta = reward + gamma * value_after - value
        advantage = delta + gamma * lam * advantage_after
        # Padding hands on what it was given, so the last real token sees the bootstrap value and no padding.
        carry = (jnp.where(kept, advantage, advantage_after), jnp.where(kept, value, value_after))
        return carry, jnp.where(kept, advantage, 0.0)

    end = (jnp.zeros((), jnp.float32), jnp.asarray(bootstrap_value, jnp.float32))
    _, advantages_T = jax.lax.scan(step_back, end, (rewards_T, values_T, mask_T.astype(bool)), reverse=True)
    return advantages_T, advantages_T + values_T
