"""Tokens that one policy sampled and another learns from: importance weights, and how far the two are apart."""

import jax
import jax.numpy as jnp

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
    logprobs: jax.Array, sampled_logprobs: jax.Array, mask: jax.Array, level: str, threshold: float
) -> jax.Array:
    """min(pi / mu, C) of tokens that mu sampled, where pi is the policy that the ratio of PPO starts from.

    Times the clipped surrogate, whose ratio stays that of the trained policy to pi, this is decoupled PPO (Hilton et al. 2022,
    arXiv 2110.00641, eq. 5) with the truncation of IMPALA (Espeholt et al. 2018, arXiv 1802.01561, eq. 1).

        "token"     pi(t) / mu(t) of each token alone. Biased: the tokens before it are still mu's.
        "sequence"  the product of these over the response, for all its tokens. Unbiased where nothing is cut off, and of a
                    variance that grows with the length.

    Cutting off at C bounds the variance and takes weight from tokens that mu draws too rarely.

    Args:
      logprobs, sampled_logprobs: of pi and mu, [..., T], at one temperature.
      mask: 1 on the tokens that mu chose, same shape, contiguous or not; a product runs over these alone.
      level: one of LEVELS.
      threshold: C, at least 1.

    Returns:
      float32 of the same shape, in [0, C]; 0 where mask is 0. A constant: no gradient flows through it.
    """
    assert logprobs.shape == sampled_logprobs.shape == mask.shape, (
        logprobs.shape,
        sampled_logprobs.shape,
        mask.shape,
    )
    log_weights = zero_outside(logprobs, mask) - zero_outside(sampled_logprobs, mask)
    if level == "sequence":
        log_weights = jnp.broadcast_to(log_weights.sum(-1, keepdims=True), mask.shape)
    elif level != "token":
        raise ValueError(f"importance weights of {level!r} are none of {LEVELS}")
    return jax.lax.stop_gradient(zero_outside(jnp.minimum(jnp.exp(log_weights), threshold), mask))


def mismatch(
    logprobs: jax.Array, sampled_logprobs: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
    """How far the sampler and the trained program are apart on the tokens sampled: p by one, q by the other, d = log p - log q.

        logprob_difference      mean |d| in nats
        prob_difference_mean    mean |p - q|, in [0, 1]
        prob_difference_max     max |p - q|, in [0, 1]
        exp_abs_log_ratio_mean  mean exp |d|, >= 1, d clamped to +-20 so that it cannot overflow
        log_ratio_max           max |d| in nats, not clamped
        prob_correlation        Pearson's of p and q, in [-1, 1]

    Differences of probabilities hardly see tokens of small probability, where two programs differ most in d; the others do, and
    one token can make them. A correlation is not defined where all p or all q are equal (or too small for float32 to tell
    apart): it is then 1 if p = q throughout, and else 0.

    Args:
      logprobs, sampled_logprobs: finite log-probabilities where mask = 1, any shape, at one temperature.
      mask: 1 on the tokens that the policy chose and that count, same shape, contiguous or not.

    Returns:
      float32 scalars, constants to differentiation; with an empty mask 0, and a correlation of 1.
    """
    assert logprobs.shape == sampled_logprobs.shape == mask.shape, (
        logprobs.shape,
        sampled_logprobs.shape,
        mask.shape,
    )
    log_p, log_q = (
        jax.lax.stop_gradient(zero_outside(x, mask)) for x in (logprobs, sampled_logprobs)
    )
    p, q, distance = jnp.exp(log_p), jnp.exp(log_q), jnp.abs(log_p - log_q)
    furthest = masked_max(jnp.abs(p - q), mask)
    return {
        "logprob_difference": masked_mean(distance, mask),
        "prob_difference_mean": masked_mean(jnp.abs(p - q), mask),
        "prob_difference_max": furthest,
        "exp_abs_log_ratio_mean": masked_mean(jnp.exp(jnp.minimum(distance, MAX_LOG_RATIO)), mask),
        "log_ratio_max": masked_max(distance, mask),
        "prob_correlation": _correlation(p, q, mask, otherwise=jnp.where(furthest == 0, 1.0, 0.0)),
    }


def _correlation(x, y, mask, otherwise):
    """Cov[x, y] / (std[x] std[y]), and `otherwise` where that is 0 / 0."""
    spreads = jnp.sqrt(masked_variance(x, mask)) * jnp.sqrt(masked_variance(y, mask))
    covariance = masked_mean((x - masked_mean(x, mask)) * (y - masked_mean(y, mask)), mask)
    # The variance of equal numbers can come out as 1e-17 in the place of 0.
    varies = [masked_min(each, mask) < masked_max(each, mask) for each in (x, y)]
    defined = varies[0] & varies[1] & (spreads > 0)
    return jnp.where(
        defined, jnp.clip(covariance / jnp.where(defined, spreads, 1.0), -1.0, 1.0), otherwise
    )
