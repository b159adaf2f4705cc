"""Off-policy corrections: importance weights, and how far sampler and trainer differ."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jax_ppo.kernels.kl import MAX_LOG_RATIO
from jax_ppo.kernels.masked import (
    masked_max,
    masked_mean,
    masked_min,
    masked_variance,
    zero_outside,
)

LEVELS = ("token", "sequence")


def truncated_weights(
    logprobs: Float[Array, " *batch T"],
    sampled_logprobs: Float[Array, " *batch T"],
    mask: Shaped[Array, " *batch T"],
    level: str,
    threshold: float,
) -> Float[Array, " *batch T"]:
    """Return min(pi / mu, C) for tokens that mu sampled.

    pi is the policy that PPO's ratio starts from. Multiplied by the clipped surrogate, whose ratio
    remains that of the trained policy to pi, these weights give decoupled PPO (Hilton et al. 2022,
    arXiv 2110.00641, eq. 5) with the truncation of IMPALA (Espeholt et al. 2018, arXiv 1802.01561,
    eq. 1).

        "token"     pi(t) / mu(t) of each token alone. Biased: the preceding tokens are still mu's.
        "sequence"  the product of these over the response, for all its tokens. Unbiased where
                    nothing is truncated, with a variance that grows with the length.

    Truncation at C bounds the variance and takes weight from tokens that mu draws too rarely.

    Args:
      logprobs: log-probabilities under pi, one response per row.
      sampled_logprobs: those under mu, at the same temperature.
      mask: 1 on the tokens that mu chose, in any pattern; products run over these alone.
      level: one of LEVELS.
      threshold: C, at least 1.

    Returns:
      float32 in [0, C]; 0 where mask is 0. A constant: no gradient flows through it.

    Raises:
      ValueError: `level` is unknown.
    """
    assert logprobs.shape == sampled_logprobs.shape == mask.shape, (
        logprobs.shape,
        sampled_logprobs.shape,
        mask.shape,
    )
    log_weights = zero_outside(logprobs, mask) - zero_outside(sampled_logprobs, mask)
    if level == "sequence":
        # A product of ratios is a sum of logs; every token of the response gets it.
        log_weights = jnp.broadcast_to(log_weights.sum(-1, keepdims=True), mask.shape)
    elif level != "token":
        raise ValueError(f"importance weights of {level!r} are not one of {LEVELS}")
    # exp may overflow to infinity, which the threshold cuts off.
    return jax.lax.stop_gradient(zero_outside(jnp.minimum(jnp.exp(log_weights), threshold), mask))


def mismatch(
    logprobs: Float[Array, " *shape"],
    sampled_logprobs: Float[Array, " *shape"],
    mask: Shaped[Array, " *shape"],
) -> dict[str, Float[Array, ""]]:
    """Return metrics of the difference between sampler and trainer on the sampled tokens.

    With p the probability by one, q by the other and d = log p - log q:

        logprob_difference      mean |d| in nats
        prob_difference_mean    mean |p - q|, in [0, 1]
        prob_difference_max     max |p - q|, in [0, 1]
        exp_abs_log_ratio_mean  mean exp |d|, >= 1, d clamped to +-20 so that it cannot overflow
        log_ratio_max           max |d| in nats, not clamped
        prob_correlation        Pearson correlation of p and q, in [-1, 1]

    Differences of probabilities barely reflect tokens of small probability, where two programs
    differ most in d; the other metrics do, and a single token can dominate them. The correlation
    is undefined where all p or all q are equal (or too small for float32 to distinguish): it is
    then 1 if p = q throughout, and 0 otherwise.

    Args:
      logprobs: log-probabilities by one program, finite where mask = 1.
      sampled_logprobs: those by the other, at the same temperature.
      mask: 1 on the tokens that the policy chose and that count, in any pattern.

    Returns:
      float32 scalars, constants to differentiation. For an empty mask all are 0, except a
      correlation of 1.
    """
    assert logprobs.shape == sampled_logprobs.shape == mask.shape, (
        logprobs.shape,
        sampled_logprobs.shape,
        mask.shape,
    )
    # Metrics only: no gradient may reach the loss through them.
    log_p = jax.lax.stop_gradient(zero_outside(logprobs, mask))
    log_q = jax.lax.stop_gradient(zero_outside(sampled_logprobs, mask))
    p = jnp.exp(log_p)
    q = jnp.exp(log_q)
    distance = jnp.abs(log_p - log_q)
    largest_difference = masked_max(jnp.abs(p - q), mask)
    if_undefined = jnp.where(largest_difference == 0, 1.0, 0.0)
    return {
        "logprob_difference": masked_mean(distance, mask),
        "prob_difference_mean": masked_mean(jnp.abs(p - q), mask),
        "prob_difference_max": largest_difference,
        "exp_abs_log_ratio_mean": masked_mean(jnp.exp(jnp.minimum(distance, MAX_LOG_RATIO)), mask),
        "log_ratio_max": masked_max(distance, mask),
        "prob_correlation": _correlation(p, q, mask, if_undefined),
    }


def _correlation(x: jax.Array, y: jax.Array, mask: jax.Array, if_undefined: jax.Array) -> jax.Array:
    """Return Cov[x, y] / (std[x] std[y]), and `if_undefined` where that is 0 / 0."""
    # Roots before the product: a product of two small variances would underflow.
    spreads = jnp.sqrt(masked_variance(x, mask)) * jnp.sqrt(masked_variance(y, mask))
    covariance = masked_mean((x - masked_mean(x, mask)) * (y - masked_mean(y, mask)), mask)
    # Rounding can leave equal numbers a variance of 1e-17, so compare the extremes as well.
    x_varies = masked_min(x, mask) < masked_max(x, mask)
    y_varies = masked_min(y, mask) < masked_max(y, mask)
    defined = x_varies & y_varies & (spreads > 0)
    correlation = jnp.clip(covariance / jnp.where(defined, spreads, 1.0), -1.0, 1.0)
    return jnp.where(defined, correlation, if_undefined)
