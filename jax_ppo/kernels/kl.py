"""Estimates of KL(actor || reference) from the tokens that were sampled, and the controller of its coefficient."""

import jax
import jax.numpy as jnp

from jax_ppo.kernels.masked import zero_outside

KL_KINDS = ("k1", "abs", "k2", "k3")

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_estimate(logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array, kind: str) -> jax.Array:
    """Per-token estimate of KL(actor || reference) in nats, from d = log actor(token) - log reference(token).

    The estimators are Schulman's (http://joschu.net/blog/kl-approx.html), named as he names them, and "abs" is verl's.
    How biased one is depends on its use: as an ESTIMATE that goes into rewards and metrics, or as a LOSS that is
    differentiated through `logprobs` (arXiv 2510.01555). Both columns hold for tokens sampled from the actor itself:

        kind  value            as an estimate of KL(actor || ref)        expected gradient as a loss
        k1    d                unbiased, any sign, high variance         0: it restrains nothing
        abs   |d|              biased high: E|d| >= |E d|                of sum |actor - ref| (2 total variations)
        k2    d^2 / 2          biased, right to second order, >= 0       of KL(actor || ref): unbiased
        k3    exp(-d) - 1 + d  unbiased where unclamped, >= 0, low var.  of KL(ref || actor), the other KL: biased

    So k1 in the reward and k2 in the loss push the same way; k3 in the loss is a different regulariser. For tokens of
    an older policy none is unbiased without importance weights.

    k3 alone is clamped, as verl's `low_var_kl` is: d to +-20 before the exponential, so that it cannot overflow, and
    the result to +-10, on both sides of d alike. A clamped token is underestimated and has no gradient.

    Args:
      logprobs, ref_logprobs: log-probabilities <= 0 of the tokens sampled, any shape, at one temperature.
      mask: 1 on the tokens that count, same shape.
      kind: one of KL_KINDS.

    Returns:
      float32 of the same shape; 0 where mask is 0, and exactly 0 where logprobs == ref_logprobs.
    """
    assert logprobs.shape == ref_logprobs.shape == mask.shape, (logprobs.shape, ref_logprobs.shape, mask.shape)
    log_ratio = zero_outside(logprobs, mask) - zero_outside(ref_logprobs, mask)
    if kind == "k1":
        return log_ratio
    if kind == "abs":
        return jnp.abs(log_ratio)
    if kind == "k2":
        return 0.5 * jnp.square(log_ratio)
    if kind == "k3":
        log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1, because exp(-d) - 1 keeps no digit of d^2 / 2 in float32 once |d| < 1e-4.
        return jnp.clip(jnp.expm1(-log_ratio) + log_ratio, -MAX_K3, MAX_K3)
    raise ValueError(f"KL estimator {kind!r} is not one of {KL_KINDS}")


def adaptive_kl_coef(
    coef: float | jax.Array,
    current_kl: float | jax.Array,
    target_kl: float | jax.Array,
    horizon: float,
    batch_size: int | jax.Array,
) -> jax.Array:
    """The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2), one step of it.

        error = clip(current / target - 1, -0.2, 0.2)
        coef' = coef * (1 + error * batch_size / horizon)

    Units: current_kl and target_kl are nats, both summed over a response and averaged over samples (the authors' target
    of 6) or both averaged over tokens (verl's of 0.1); one against the other is wrong by the length of a response.
    target_kl > 0. The paper's gain K is written batch_size / horizon, both counted in samples, as in the authors' code
    (horizon 10,000): an error that stays at the clip changes the coefficient by a factor of about exp(+-0.2) every
    `horizon` samples. The coefficient stays positive as long as 0.2 batch_size < horizon.
    """
    error = jnp.clip(jnp.asarray(current_kl, jnp.float32) / target_kl - 1.0, -0.2, 0.2)
    return coef * (1.0 + error * batch_size / horizon)
