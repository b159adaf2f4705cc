"""Per-token estimators of KL(actor || reference), and the controller of its coefficient.

`training/control.py` applies the controller after each step, if the options configure it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jax_ppo.kernels.masked_statistics import (
    assert_one_shape,
    difference_beyond_rounding,
    zero_outside,
)

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_estimate(
    logprobs: Float[Array, " *shape"],
    ref_logprobs: Float[Array, " *shape"],
    mask: Shaped[Array, " *shape"],
    estimator: Callable[[jax.Array], jax.Array],
) -> Float[Array, " *shape"]:
    """Return a per-token estimate of KL(actor || reference) in nats.

    Estimators are functions of d = log actor(token) - log reference(token). k1, k2 and k3 are
    Schulman's (http://joschu.net/blog/kl-approx.html), abs (`absolute`) and k3+ (`k3_plus`) verl's,
    and clamped AlpacaFarm's (Dubois et al. 2023, arXiv 2305.14387). The bias depends on the use: as
    an ESTIMATE in rewards and metrics, or as a LOSS differentiated through `logprobs` (arXiv
    2510.01555). Both tables hold for tokens sampled from the actor itself; for an older policy's
    tokens none is unbiased without importance weights.

        name     value            as an estimate of KL(actor || reference)
        k1       d                unbiased, any sign, high variance
        abs      |d|              biased high: E|d| >= |E d|
        k2       d^2 / 2          biased, correct to second order, >= 0
        k3       exp(-d) - 1 + d  unbiased where unclamped, >= 0, low variance
        k3+      as k3            as k3
        clamped  max(d, 0)        biased high: E max(d, 0) >= E d

        name     expected gradient as a loss
        k1       0: it restrains nothing
        abs      of sum |actor - reference| (2 total variations)
        k2       of KL(actor || reference): unbiased
        k3       of KL(reference || actor), the other KL: biased
        k3+      of KL(actor || reference), as k2: unbiased
        clamped  of sum max(actor - reference, 0) (1 total variation)

    The second table treats the preceding tokens as fixed: no loss blames a token for leading to
    where the KL is larger. A reward does: k1 in the reward with gamma = 1 is the one unbiased way
    to the KL of whole responses. But no gradient flows through the value of a reward: in a reward,
    the other estimators push with the gradient of their expectation MINUS the second table's. The
    two cancel near the reference: k3 and k2 hardly restrain a policy that is close to it.

    Only the values of k3 and k3+ are clamped, like verl's `low_var_kl`: d to +-20 before the
    exponential, and the result to +-10. A clamped token is underestimated; k3 has no gradient
    there.

    Args:
      logprobs: log-probabilities <= 0 of the sampled tokens under the actor.
      ref_logprobs: those under the reference, at the same temperature.
      mask: 1 on the tokens that the policy chose and that count, in any pattern.
      estimator: a function of d, which is 0 where mask is 0.

    Returns:
      float32; 0 where mask is 0, and exactly 0 where the log-probs differ by rounding alone.
    """
    assert_one_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    log_ratio = difference_beyond_rounding(
        zero_outside(logprobs, mask), zero_outside(ref_logprobs, mask)
    )
    return zero_outside(estimator(log_ratio), mask)


def k1(log_ratio: jax.Array) -> jax.Array:
    """Return d."""
    return log_ratio


def absolute(log_ratio: jax.Array) -> jax.Array:
    """Return |d|, with a gradient of 0 at 0, where that of `jnp.abs` is 1."""
    return jax.nn.relu(log_ratio) + jax.nn.relu(-log_ratio)


def k2(log_ratio: jax.Array) -> jax.Array:
    """Return d^2 / 2."""
    return 0.5 * jnp.square(log_ratio)


def k3(log_ratio: jax.Array) -> jax.Array:
    """Return exp(-d) - 1 + d, clamped."""
    log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, because exp(-d) - 1 keeps no digit of d^2 / 2 in float32 once |d| < 1e-4.
    return jnp.clip(jnp.expm1(-log_ratio) + log_ratio, -MAX_K3, MAX_K3)


def k3_plus(log_ratio: jax.Array) -> jax.Array:
    """Return the value of k3 with the gradient of k2."""
    square = k2(log_ratio)
    # The difference in parentheses is 0.
    return jax.lax.stop_gradient(k3(log_ratio)) + (square - jax.lax.stop_gradient(square))


def clamped(log_ratio: jax.Array) -> jax.Array:
    """Return max(d, 0), with a gradient of 0 at 0, where that of `jnp.maximum` is 1/2."""
    return jax.nn.relu(log_ratio)


def adaptive_kl_coef(
    coef: float | Float[Array, ""],
    current_kl: float | Float[Array, ""],
    target_kl: float | Float[Array, ""],
    horizon: float,
    batch_size: int | Shaped[Array, ""],
) -> Float[Array, ""]:
    """Return the KL coefficient after one step of a proportional controller.

        error = clip(current / target - 1, -0.2, 0.2)
        coef' = coef * (1 + error * batch_size / horizon)

    Ziegler et al. 2019 (arXiv 1909.08593, section 2.2), as in the authors' code (horizon 10,000):
    an error that stays at the clip changes the coefficient by about exp(+-0.2) every `horizon`
    samples. It stays positive while 0.2 batch_size < horizon. A KL of NaN does not change it.

    Args:
      coef: the present coefficient.
      current_kl: in nats, summed over a response and averaged over samples, or averaged over
        tokens.
      target_kl: > 0, in the same unit: 6 per response in the paper, 0.1 per token in verl.
      horizon: in samples.
      batch_size: samples since the last step of the controller.
    """
    # Clipped, so that one unusual rollout moves the coefficient by little.
    error = jnp.clip(jnp.asarray(current_kl, jnp.float32) / target_kl - 1.0, -0.2, 0.2)
    return coef * (1.0 + jnp.nan_to_num(error) * batch_size / horizon)
