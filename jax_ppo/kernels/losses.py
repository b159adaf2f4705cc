"""The losses of PPO per token, and the weights that make a batch's loss of them.

A loss of a mini-batch is sum_i sum_t w_i loss_it, with w from `loss_weights` over the token counts of the WHOLE mini-batch.
A plain sum can be cut into micro-batches, packed rows or devices in any way and is still the same number, and so is its
gradient. A mean of means is not.

In every function mask = 1 means "the policy chose this token, and it counts". The selected tokens need not be contiguous: tokens
that a tool inserted are masked out inside a response. Elements under mask = 0 may hold anything, NaN included, and come back
0 in value and gradient. Results are float32, or float64 where the inputs are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.kernels.kl import MAX_LOG_RATIO
from jax_ppo.kernels.masked import zero_outside

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


class PolicyLoss(NamedTuple):
    """Per token, float32, in the shape of the inputs. Under the mask: loss 0, ratio 1, log_ratio 0, no flag set."""

    loss: jax.Array
    ratio: jax.Array  # exp(log_ratio), in [exp(-20), exp(20)]
    log_ratio: jax.Array  # log-prob now - log-prob then, in nats, clamped to +-20: |log_ratio| = 20 says it was clamped
    clipped: (
        jax.Array
    )  # 1 where the clipped term was the larger loss, so that the token has no gradient
    dual_clipped: (
        jax.Array
    )  # 1 where the dual clip capped the loss, so that the token has no gradient


class ValueLoss(NamedTuple):
    """Per token, float32, in the shape of the inputs, 0 under the mask."""

    loss: jax.Array
    clipped: (
        jax.Array
    )  # 1 where the clipped term was the larger loss, so that the token has no gradient


def loss_weights(
    action_counts_B: jax.Array, mode: str, scale: float | jax.Array | None = None
) -> jax.Array:
    """Weight of each token of each sample, such that sum_i sum_t w_i loss_it is the loss of these B samples together.

        "token-mean"               1 / sum_j count_j    every token alike (DAPO, arXiv 2503.14476), long responses more
        "seq-mean-token-sum"       1 / n                the policy gradient of the expected return; scales with the lengths
        "seq-mean-token-mean"      1 / (count_i n)      every sample alike (GRPO), tokens of long responses less
        "seq-mean-token-sum-norm"  1 / (n scale)        the policy gradient over a constant (Dr. GRPO, arXiv 2503.20783)

    where n counts the samples of count > 0. A sample of count 0 is absent: its weight is 0, and it makes no other
    weight smaller. If all are absent, all weights are 0.

    What the on-policy gradient ascends: the expected return with the two sums; E[return / count] with
    "seq-mean-token-mean", biased against long good responses and for long bad ones; and E[return n / (count + counts of
    the n - 1 others)] with "token-mean": the same bias in a small mini-batch, gone (but for a factor) in a large one.

    Args:
      action_counts_B: how many tokens of each sample of the whole mini-batch the mask selects, >= 0.
      mode: one of AGGREGATIONS.
      scale: > 0, tokens, the same at every step (the longest response allowed, say); for "seq-mean-token-sum-norm" alone.

    Returns:
      weights_B, float32 (float64 under jax_enable_x64).
    """
    assert action_counts_B.ndim == 1, f"counts of shape {action_counts_B.shape}, expected [B]"
    dtype = jnp.result_type(float)
    present_B = action_counts_B > 0
    samples = jnp.maximum(jnp.sum(present_B), 1).astype(dtype)
    if mode == "token-mean":
        tokens_B = jnp.maximum(jnp.sum(action_counts_B), 1).astype(dtype)
    elif mode == "seq-mean-token-sum":
        tokens_B = samples
    elif mode == "seq-mean-token-mean":
        tokens_B = jnp.maximum(action_counts_B, 1).astype(dtype) * samples
    elif mode == "seq-mean-token-sum-norm":
        assert scale is not None, f"{mode} divides by a scale in tokens, and none was given"
        tokens_B = samples * scale
    else:
        raise ValueError(f"loss aggregation {mode!r} is not one of {AGGREGATIONS}")
    return jnp.where(present_B, 1.0 / tokens_B, 0.0)


def policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7), negated, per token.

        rho  = pi(token) / pi_old(token) = exp(logprobs - old_logprobs)
        loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
        and where A < 0:  min(loss, -dual_clip A)

    clip_low = clip_high = epsilon is the paper's; clip_high > clip_low is DAPO's "clip higher" (arXiv 2503.14476). The
    last line is the dual clip (Ye et al. 2020, arXiv 1912.09729): the clip alone leaves the loss of a bad token that
    became likelier unbounded in rho. Where a clipped term is the active one the gradient is 0, which biases the policy
    gradient on purpose.

    Args:
      logprobs: log-probabilities <= 0 under the policy being trained, the one input a gradient is meant to flow to.
      old_logprobs: the same tokens under the policy at the start of the update (not of the reference).
      advantages: A, usually whitened.
      mask: 1 on the tokens that count. All four have one shape, any rank.
      clip_low, clip_high: > 0, clip_low < 1.
      dual_clip: > 1, or None for no dual clip.
    """
    shapes = (logprobs.shape, old_logprobs.shape, advantages.shape, mask.shape)
    assert len(set(shapes)) == 1, (
        f"logprobs, old_logprobs, advantages, mask differ in shape: {shapes}"
    )
    advantages = zero_outside(advantages, mask)
    log_ratio = zero_outside(logprobs, mask) - zero_outside(old_logprobs, mask)
    log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)  # exp overflows float32 at 88
    ratio = jnp.exp(log_ratio)

    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss

    dual_clipped = jnp.zeros_like(clipped)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        dual_clipped = (advantages < 0) & (loss > ceiling)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, ceiling), loss)
    return PolicyLoss(
        loss, ratio, log_ratio, clipped.astype(jnp.float32), dual_clipped.astype(jnp.float32)
    )


def value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    clip: float | None,
    huber_delta: float | None = None,
) -> ValueLoss:
    """Squared error of the critic per token, clipped as OpenAI's PPO clips it (baselines' ppo2; not in the paper).

        loss = max(h(V - G), h(clip(V, V_old - clip, V_old + clip) - G)),  h(e) = e^2 / 2
        and with huber_delta (Huber 1964):                                 h(e) = delta (|e| - delta / 2) where |e| > delta

    A value that has moved further than `clip` from where it stood, towards the return, gets no gradient. clip = None is
    the plain h(V - G), and the numbers in old_values then do not matter. The square learns the mean of the returns. Huber's
    loss, whose gradient is the error cut off at +-delta, learns something between their mean and their median: biased
    where returns are skewed.

    Args:
      values: V, from the critic being trained, the one input a gradient is meant to flow to.
      old_values: V_old, from the critic at the start of the update.
      returns: G, raw advantages + V_old.
      mask: 1 on the tokens that count. All four have one shape, any rank.
      clip: > 0, in units of reward, or None.
      huber_delta: > 0, in units of reward, or None for the square everywhere.
    """
    shapes = (values.shape, old_values.shape, returns.shape, mask.shape)
    assert len(set(shapes)) == 1, f"values, old_values, returns, mask differ in shape: {shapes}"
    values, old_values, returns = (zero_outside(x, mask) for x in (values, old_values, returns))
    unclipped_loss = _half_squared_error(values - returns, huber_delta)
    if clip is None:
        return ValueLoss(unclipped_loss, jnp.zeros_like(unclipped_loss))
    # clip(V, ...) and not V_old + clip(V - V_old): inside the range it is V to the bit, so nothing is flagged there.
    clipped_loss = _half_squared_error(
        jnp.clip(values, old_values - clip, old_values + clip) - returns, huber_delta
    )
    clipped = clipped_loss > unclipped_loss
    return ValueLoss(jnp.maximum(unclipped_loss, clipped_loss), clipped.astype(jnp.float32))


def _half_squared_error(error, huber_delta):
    """error^2 / 2, going on as a straight line where |error| > huber_delta."""
    if huber_delta is None:
        return 0.5 * jnp.square(error)
    bend = jnp.clip(error, -huber_delta, huber_delta)
    return bend * (error - 0.5 * bend)
