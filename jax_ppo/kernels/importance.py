"""Off-policy corrections: importance weights, and how far sampler and trainer differ."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jax_ppo.kernels.kl import MAX_LOG_RATIO
from jax_ppo.kernels.masked_statistics import (
    assert_one_shape,
    masked_max,
    masked_mean,
    masked_min,
    masked_variance,
    starts_of_turns,
    zero_outside,
)

# A function of the tokens' log-ratios, 0 where mask is 0, and of the mask.
LogWeight = Callable[[jax.Array, jax.Array], jax.Array]
Starts = Shaped[Array, " *batch T"] | None  # 1 on the first token of each turn


def importance_weights(
    logprobs: Float[Array, " *batch T"],
    sampled_logprobs: Float[Array, " *batch T"],
    mask: Shaped[Array, " *batch T"],
    log_weight: LogWeight,
    upper: float,
    lower: float = 0.0,
    masks: bool = False,
) -> Float[Array, " *batch T"]:
    """Return w = pi / mu for tokens that mu sampled, bounded.

        truncated   min(max(w, lower), upper)
        masked      w where lower <= w <= upper, 0 elsewhere

    pi is the policy that PPO's ratio starts from: with these weights on the clipped surrogate it is
    decoupled PPO (Hilton et al. 2022, arXiv 2110.00641, eq. 5). Truncation is IMPALA's (Espeholt et
    al. 2018, arXiv 1802.01561, eq. 1), masking per token IcePop (Ling team 2025, arXiv 2510.18855:
    0.5 and 5); with an upper bound alone it is masked importance sampling (Liu et al. 2025,
    https://richardli.xyz/rl-collapse).

    `registries.IMPORTANCE_WEIGHTS` lists what a ratio can be taken over. Only the ratio of whole
    responses, unbounded, is unbiased. Bounds on it change the objective, as if each score were
    multiplied by (bounded w) / w: a mask keeps the rest unbiased, an upper bound takes weight from
    what mu draws too rarely, and a lower bound gives weight to what pi hardly draws.

    Args:
      logprobs: log-probabilities under pi, one response per row.
      sampled_logprobs: those under mu, at the same temperature.
      mask: 1 on the tokens that mu chose, in any pattern; products run over these alone.
      log_weight: returns the logarithm of each token's w, such as `token_log_ratio`.
      upper: at least 1.
      lower: in [0, 1).
      masks: mask instead of truncating.

    Returns:
      float32 in [0, upper]; 0 where mask is 0. A constant: no gradient flows through it.
    """
    assert_one_shape(logprobs=logprobs, sampled_logprobs=sampled_logprobs, mask=mask)
    log_ratios = zero_outside(logprobs, mask) - zero_outside(sampled_logprobs, mask)
    # exp may overflow to infinity, which the bounds cut off.
    weights = jnp.exp(log_weight(log_ratios, mask))
    if masks:
        weights = jnp.where((weights >= lower) & (weights <= upper), weights, 0.0)
    else:
        weights = jnp.clip(weights, lower, upper)
    return jax.lax.stop_gradient(zero_outside(weights, mask))


# Logarithms of weights, for `log_weight`. Only `turn_log_ratio` reads where turns start.


def unweighted(log_ratios: jax.Array, mask: jax.Array, starts: Starts = None) -> jax.Array:
    """Return 0: all weights are 1."""
    return jnp.zeros_like(log_ratios)


def token_log_ratio(log_ratios: jax.Array, mask: jax.Array, starts: Starts = None) -> jax.Array:
    """Return each token's log-ratio. Biased: the preceding tokens are still mu's."""
    return log_ratios


def sequence_log_ratio(log_ratios: jax.Array, mask: jax.Array, starts: Starts = None) -> jax.Array:
    """Return the sum over the response: the log of the product, whose variance grows with T."""
    return jnp.broadcast_to(log_ratios.sum(-1, keepdims=True), mask.shape)


def sequence_mean_log_ratio(
    log_ratios: jax.Array, mask: jax.Array, starts: Starts = None
) -> jax.Array:
    """Return the mean over the response: the log of the geometric mean.

    Biased like GSPO's ratio (arXiv 2507.18071), but of one size for all lengths, so that narrow
    bounds reject whole responses.
    """
    counts = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    return sequence_log_ratio(log_ratios, mask) / counts


def turn_log_ratio(log_ratios: jax.Array, mask: jax.Array, starts: Starts = None) -> jax.Array:
    """Return the sum over the token's turn: the chosen tokens from one start to the next.

    Biased like a token's ratio, by the preceding turns; its variance is between those of a token's
    and a response's. Without `starts`, turns are chosen tokens that nothing interrupts.
    """
    starts = starts_of_turns(mask) if starts is None else starts
    # Tokens between turns have the number of the turn before, and log-ratios of 0.
    turns = jnp.cumsum(starts, axis=-1)
    length = mask.shape[-1]

    def sum_over_turn(x_T: jax.Array, turns_T: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x_T, turns_T, num_segments=length + 1)[turns_T]

    rows = (x.reshape(-1, length) for x in (log_ratios, turns))
    return jax.vmap(sum_over_turn)(*rows).reshape(mask.shape)


def effective_sample_size(
    weights: Float[Array, " *shape"], mask: Shaped[Array, " *shape"]
) -> Float[Array, ""]:
    """Return (mean w)^2 / mean w^2 over the mask, in [0, 1].

    The share of samples of equal weights that estimate a mean as well (Kong 1992). 0 if all are 0.
    """
    second_moment = masked_mean(jnp.square(weights), mask)
    return jnp.square(masked_mean(weights, mask)) / jnp.where(second_moment > 0, second_moment, 1.0)


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
    differ most in d; a single token can dominate the other metrics. Where all p or all q are equal,
    the correlation is 1 if p = q throughout, and 0 otherwise.

    Both log-probs, finite where mask = 1, are at the same temperature. Returns float32 scalars,
    constants to differentiation; for an empty mask 0, and a correlation of 1.
    """
    assert_one_shape(logprobs=logprobs, sampled_logprobs=sampled_logprobs, mask=mask)
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
