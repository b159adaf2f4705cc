"""Importance weights for tokens that one policy sampled and another learns from."""

import jax
import jax.numpy as jnp

from jax_ppo.kernels.masked import zero_outside

LEVELS = ("token", "sequence")


def truncated_weights(logprobs: jax.Array, sampled_logprobs: jax.Array, mask: jax.Array, level: str,
                      threshold: float) -> jax.Array:
    """min(pi / mu, C) of tokens that mu sampled, where pi is the policy that the ratio of PPO starts from.

    Times the clipped surrogate, whose ratio stays that of the trained policy to pi, this is decoupled PPO (Hilton et al. 2022,
    arXiv 2110.00641, eq. 5) with the truncation of IMPALA (Espeholt et al. 2018, arXiv 1802.01561, eq. 1).

        "token"     pi(t) / mu(t) of each token alone. Biased: the tokens before it are still mu's.
        "sequence"  the product of these over the response, for all its tokens. Unbiased where nothing is cut off, and of a
                    variance that grows with the length.

    Cutting off at C bounds the variance and takes weight from tokens that mu draws too rarely.

    Args:
      logprobs, sampled_logprobs: of pi and mu, [..., T], at one temperature.
      mask: 1 on the tokens sampled, same shape.
      level: one of LEVELS.
      threshold: C, at least 1.

    Returns:
      float32 of the same shape, in [0, C]; 0 where mask is 0. A constant: no gradient flows through it.
    """
    assert logprobs.shape == sampled_logprobs.shape == mask.shape, (logprobs.shape, sampled_logprobs.shape, mask.shape)
    log_weights = zero_outside(logprobs, mask) - zero_outside(sampled_logprobs, mask)
    if level == "sequence":
        log_weights = jnp.broadcast_to(log_weights.sum(-1, keepdims=True), mask.shape)
    elif level != "token":
        raise ValueError(f"importance weights of {level!r} are none of {LEVELS}")
    return jax.lax.stop_gradient(zero_outside(jnp.minimum(jnp.exp(log_weights), threshold), mask))
