"""Estimates of KL(actor || reference) from the tokens that were sampled, and the controller of its coefficient."""

import jax
import jax.numpy as jnp

from jax_ppo.kernels.masked import zero_outside

KL_KINDS = ("k1", "abs", "k2", "k3", "k3+", "clamped")

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_estimate(
    logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array, kind: str
) -> jax.Array:
    """Per-token estimate of KL(actor || reference) in nats, from d = log actor(token) - log reference(token).

    k1, k2 and k3 are Schulman's (http://joschu.net/blog/kl-approx.html), named as he names them, "abs" and "k3+" verl's,
    "clamped" AlpacaFarm's (Dubois et al. 2023, arXiv 2305.14387). How biased one is depends on its use: as an ESTIMATE that
    goes into rewards and metrics, or as a LOSS that is differentiated through `logprobs` (arXiv 2510.01555). Both columns
    hold for tokens sampled from the actor itself:

        kind     value            as an estimate of KL(actor || ref)        expected gradient as a loss
        k1       d                unbiased, any sign, high variance         0: it restrains nothing
        abs      |d|              biased high: E|d| >= |E d|                of sum |actor - ref| (2 total variations)
        k2       d^2 / 2          biased, right to second order, >= 0       of KL(actor || ref): unbiased
        k3       exp(-d) - 1 + d  unbiased where unclamped, >= 0, low var.  of KL(ref || actor), the other KL: biased
        k3+      that of k3       as k3                                     that of k2: of KL(actor || ref), unbiased
        clamped  max(d, 0)        biased high: E max(d, 0) >= E d           of sum max(actor - ref, 0) (1 total variation)

    So k3 in the loss is a different regulariser than k2, and k3+ reports k3 while it pushes as k2. "clamped" punishes tokens
    made MORE likely than under the reference, and pays nothing back for those made less likely. For tokens of an older policy
    none is unbiased without importance weights.

    The last column takes the tokens before as given: no loss blames a token for leading where the KL is larger. A reward
    does: k1 in it with gamma = 1 is the one unbiased way to the KL of whole responses, and with gamma = 0 pushes as k2 in the
    loss. But through a reward's own value no gradient runs. What the others push with in a reward is the gradient of their
    expectation LESS that of the last column: of KL(actor || ref) - KL(ref || actor) for k3, which cancel near the reference,
    so that k3 (and k2) in the reward hardly restrain a policy that is close to it; "abs" punishes tokens there that are
    suppressed already.

    The values of k3 and k3+ alone are clamped, as verl's `low_var_kl` is: d to +-20 before the exponential, so that it cannot
    overflow, and the result to +-10, on both sides of d alike. A clamped token is underestimated; k3 has no gradient there,
    k3+ keeps k2's.

    Args:
      logprobs, ref_logprobs: log-probabilities <= 0 of the tokens sampled, any shape, at one temperature.
      mask: 1 on the tokens that the policy chose and that count, same shape, contiguous or not.
      kind: one of KL_KINDS.

    Returns:
      float32 of the same shape; 0 where mask is 0, and exactly 0 where logprobs == ref_logprobs.
    """
    assert logprobs.shape == ref_logprobs.shape == mask.shape, (
        logprobs.shape,
        ref_logprobs.shape,
        mask.shape,
    )
    log_ratio = zero_outside(logprobs, mask) - zero_outside(ref_logprobs, mask)
    if kind == "k1":
        return log_ratio
    if kind == "abs":
        return jax.nn.relu(log_ratio) + jax.nn.relu(
            -log_ratio
        )  # whose gradient at 0 is 0, where that of jnp.abs is 1
    if kind == "k2":
        return 0.5 * jnp.square(log_ratio)
    if kind == "k3":
        return _k3(log_ratio)
    if kind == "k3+":
        k2 = 0.5 * jnp.square(log_ratio)
        return jax.lax.stop_gradient(_k3(log_ratio)) + (k2 - jax.lax.stop_gradient(k2))
    if kind == "clamped":
        return jax.nn.relu(log_ratio)  # its gradient at 0 is 0, where that of maximum is 1/2
    raise ValueError(f"KL estimator {kind!r} is not one of {KL_KINDS}")


def _k3(log_ratio):
    log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, because exp(-d) - 1 keeps no digit of d^2 / 2 in float32 once |d| < 1e-4.
    return jnp.clip(jnp.expm1(-log_ratio) + log_ratio, -MAX_K3, MAX_K3)


def adaptive_kl_coef(
    coef: float | jax.Array,
    current_kl: float | jax.Array,
    target_kl: float | jax.Array,
    horizon: float,
    batch_size: int | jax.Array,
    clip: float = 0.2,
) -> jax.Array:
    """The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2), one step of it.

        error = clip(current / target - 1, -c, c)
        coef' = coef * (1 + error * batch_size / horizon)

    Units: current_kl and target_kl are nats, both summed over a response and averaged over samples (the authors' target
    of 6) or both averaged over tokens (verl's of 0.1); one against the other is wrong by the length of a response.
    target_kl > 0. The paper's gain K is written batch_size / horizon, both counted in samples, as in the authors' code
    (horizon 10,000): an error that stays at the clip c (theirs is 0.2) changes the coefficient by a factor of about
    exp(+-c) every `horizon` samples. The coefficient stays positive as long as c batch_size < horizon.
    """
    error = jnp.clip(jnp.asarray(current_kl, jnp.float32) / target_kl - 1.0, -clip, clip)
    return coef * (1.0 + error * batch_size / horizon)
