"""The losses of PPO per token, and the weights that combine them into the loss of a batch.

The loss of a mini-batch is sum_i sum_t w_i loss_it, with w from `loss_weights` over the token
counts of the WHOLE mini-batch. A plain sum can be divided into micro-batches, packed rows or
devices in any way without changing its value or its gradient. A mean of means cannot.

In every function mask = 1 means "the policy chose this token, and the loss counts it". These tokens
need not be contiguous: tokens that a tool inserted are masked out inside a response. Where mask is
0, inputs may hold anything, NaN included; results and gradients are 0 there. Results are float32,
or float64 where the inputs are.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, Shaped

from jax_ppo.kernels.kl import MAX_LOG_RATIO
from jax_ppo.kernels.masked_statistics import assert_one_shape, zero_outside

Scale = float | Float[Array, ""] | None  # see `loss_weights`
SequenceSum = Callable[[jax.Array], jax.Array]  # see `LossInputs`
Divisors = Callable[[jax.Array, jax.Array, Scale], jax.Array]  # of (counts_B, samples, scale)


class PolicyBatch(NamedTuple):
    """Tokens of whole responses: arrays of one shape, of any rank."""

    # <= 0, under the policy being trained, the only input meant to receive a gradient.
    logprobs: Float[Array, " *shape"]
    old_logprobs: Float[Array, " *shape"]  # <= 0, under the policy at the start of the update
    advantages: Float[Array, " *shape"]  # per token
    # 1 on the tokens that the loss counts. Elsewhere the three above may be anything, even NaN.
    mask: Shaped[Array, " *shape"]
    # At each token, how many tokens of its response the mask selects; anything where mask is 0.
    action_counts: Integer[Array, " *shape"]


class MiniBatchTokens(NamedTuple):
    """The tokens of all responses of a step; the mask selects the tokens of one mini-batch."""

    old_logprobs: Float[Array, "B T"]  # under the policy that sampled
    advantages: Float[Array, "B T"]
    mask: Bool[Array, "B T"]


class Clip(NamedTuple):
    """Bounds of the ratio, clipped to [1 - low, 1 + high]; gmpo clips log-ratios instead."""

    low: float  # > 0, and < 1 except for gmpo
    high: float  # > 0
    dual: float | None = None  # > 1, or None for no dual clip


class LossInputs(NamedTuple):
    """Inputs that a policy loss may request by naming a parameter."""

    batch: PolicyBatch
    clip: Clip
    # Returns, at each token, the sum of x over its response; x is 0 where mask is 0.
    sequence_sum: SequenceSum
    mini_batch: MiniBatchTokens  # of which `batch` may hold only a part
    # Brings an array of the shape of `mini_batch`, [B, T], to the tokens of `batch`.
    to_rows: Callable[[jax.Array], jax.Array]


class PolicyLoss(NamedTuple):
    """Policy loss per token, float32; where mask is 0, loss 0, ratio 1, log_ratio 0, no flags."""

    loss: Float[Array, " *shape"]  # to be summed with the weights of `loss_weights`
    ratio: Float[Array, " *shape"]  # the ratio that the loss uses, in [exp(-20), exp(20)]
    # In nats, present log-prob - old log-prob, clamped to +-20 (where 20 means clamped).
    log_ratio: Float[Array, " *shape"]
    # 1 where the clip leaves the token no gradient (cispo: where it truncates the weight).
    clipped: Float[Array, " *shape"]
    # 1 where the dual clip capped the loss, so that the token has no gradient.
    dual_clipped: Float[Array, " *shape"]


def clipped_surrogate(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute the clipped surrogate of PPO, negated, per token.

        rho  = pi(token) / pi_old(token) = exp(logprobs - old_logprobs)
        loss = -min(rho A, clip(rho, 1 - low, 1 + high) A)
        and where A < 0:  min(loss, -dual A)

    Schulman et al. 2017, arXiv 1707.06347, eq. 7. low = high = epsilon is the paper's clip; high >
    low is DAPO's "clip higher" (arXiv 2503.14476). The last line is the dual clip (Ye et al. 2020,
    arXiv 1912.09729): without it, the loss of a token with A < 0 grows without bound as rho does. A
    clipped term has no gradient, which biases the policy gradient on purpose.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    ratio = jnp.exp(log_ratio)

    # The larger loss is the smaller surrogate: the paper's pessimistic bound.
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high)
    loss = jnp.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss

    dual_clipped = jnp.zeros_like(clipped)
    if clip.dual is not None:
        # Above a ratio of `dual`, a token with a negative advantage has no gradient.
        ceiling = -advantages * clip.dual
        dual_clipped = (advantages < 0) & (loss > ceiling)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, ceiling), loss)
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        log_ratio=log_ratio,
        clipped=clipped.astype(jnp.float32),
        dual_clipped=dual_clipped.astype(jnp.float32),
    )


def log_ratios_and_advantages(batch: PolicyBatch) -> tuple[jax.Array, jax.Array]:
    """Return the tokens' clamped log-ratios and their advantages, 0 where mask is 0."""
    assert_one_shape(**batch._asdict())
    # Masked inputs become 0 before any arithmetic: NaN there must not reach a gradient.
    log_ratio = zero_outside(batch.logprobs, batch.mask) - zero_outside(
        batch.old_logprobs, batch.mask
    )
    log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)  # exp overflows float32 at 88
    return log_ratio, zero_outside(batch.advantages, batch.mask)


class ValueLoss(NamedTuple):
    """Value loss per token, float32, in the shape of the inputs, 0 where mask is 0."""

    loss: Float[Array, " *shape"]  # to be summed with the weights of `loss_weights`
    # 1 where the clipped term was the larger loss, so that the token has no gradient.
    clipped: Float[Array, " *shape"]


def value_loss(
    values: Float[Array, " *shape"],
    old_values: Float[Array, " *shape"],
    returns: Float[Array, " *shape"],
    mask: Shaped[Array, " *shape"],
    clip: float | None,
) -> ValueLoss:
    """Compute the squared error of the critic per token, clipped as in OpenAI's baselines (ppo2).

        loss = max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2

    The clip is not in the paper. A value that has moved more than `clip` from V_old towards the
    return gets no gradient. With clip = None the loss is (V - G)^2 / 2, whatever old_values hold.

    Args:
      values: V, from the critic being trained, the only input meant to receive a gradient.
      old_values: V_old, from the critic at the start of the update.
      returns: G, raw advantages + V_old.
      mask: 1 on the tokens that the loss counts, in any pattern.
      clip: > 0, in units of reward, or None.
    """
    assert_one_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values = zero_outside(values, mask)
    old_values = zero_outside(old_values, mask)
    returns = zero_outside(returns, mask)
    unclipped_loss = 0.5 * jnp.square(values - returns)
    if clip is None:
        return ValueLoss(loss=unclipped_loss, clipped=jnp.zeros_like(unclipped_loss))
    # Not V_old + clip(V - V_old), whose rounding would flag tokens inside the range as clipped.
    clipped_values = jnp.clip(values, old_values - clip, old_values + clip)
    clipped_loss = 0.5 * jnp.square(clipped_values - returns)
    clipped = clipped_loss > unclipped_loss
    return ValueLoss(
        loss=jnp.maximum(unclipped_loss, clipped_loss), clipped=clipped.astype(jnp.float32)
    )


def loss_weights(
    action_counts_B: Integer[Array, " B"], divisors: Divisors, scale: Scale = None
) -> Float[Array, " B"]:
    """Return the weight of each token of each sample, float32 [B].

    sum_i sum_t w_i loss_it is then the loss of these B samples together. `divisors`, the function
    of an entry of `registries.AGGREGATIONS`, decides how; n is the number of samples of count > 0.

        token_mean               1 / sum_j count_j
                                 equal weight per token (DAPO, arXiv 2503.14476)
        seq_mean_token_sum       1 / n
                                 the policy gradient of the expected return
        seq_mean_token_mean      1 / (count_i n)
                                 equal weight per sample (GRPO)
        seq_mean_token_sum_norm  1 / (n scale)
                                 the policy gradient divided by a constant (Dr. GRPO, arXiv
                                 2503.20783)

    A sample of count 0 is absent: its weight is 0, and it does not reduce the weight of another.

    The on-policy gradient is that of a different objective with each:

        both sums            E[return], without bias
        seq_mean_token_mean  E[return / count]: biased against long good responses and towards
                             long bad ones
        token_mean           E[return n / (count + counts of the n - 1 others)]: the same bias in
                             a small mini-batch; in a large one E[return] up to a factor

    Args:
      action_counts_B: how many tokens of each sample the mask selects, >= 0; [B] is the whole
        mini-batch.
      divisors: returns what divides the losses of each sample's tokens.
      scale: > 0, in tokens, the same at every step, such as the longest response allowed; for
        seq_mean_token_sum_norm only.
    """
    assert action_counts_B.ndim == 1, f"counts of shape {action_counts_B.shape}, expected [B]"
    dtype = jnp.result_type(float)
    present_B = action_counts_B > 0
    # At least 1, so that nothing is divided by 0 if all samples are absent.
    samples = jnp.maximum(jnp.sum(present_B), 1).astype(dtype)
    return jnp.where(present_B, 1.0 / divisors(action_counts_B, samples, scale), 0.0)


def token_mean(counts_B: jax.Array, samples: jax.Array, scale: Scale) -> jax.Array:
    """Return the divisor of each sample's token losses: the number of all tokens."""
    return jnp.maximum(jnp.sum(counts_B), 1).astype(samples.dtype)


def seq_mean_token_sum(counts_B: jax.Array, samples: jax.Array, scale: Scale) -> jax.Array:
    """Return the divisor of each sample's token losses: the number of samples."""
    return samples


def seq_mean_token_mean(counts_B: jax.Array, samples: jax.Array, scale: Scale) -> jax.Array:
    """Return the divisors: the number of samples times the sample's number of tokens."""
    return jnp.maximum(counts_B, 1).astype(samples.dtype) * samples


def seq_mean_token_sum_norm(counts_B: jax.Array, samples: jax.Array, scale: Scale) -> jax.Array:
    """Return the divisor: the number of samples times the scale, in tokens."""
    assert scale is not None, "seq-mean-token-sum-norm divides by a scale, which is missing"
    return samples * scale


def padded_batch(
    logprobs: Float[Array, " *batch T"],
    old_logprobs: Float[Array, " *batch T"],
    advantages: Float[Array, " *batch T"],
    mask: Shaped[Array, " *batch T"],
) -> PolicyBatch:
    """Return the batch of arrays that hold one response per row; `row_sum` sums over responses."""
    return PolicyBatch(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        action_counts=row_sum(mask.astype(jnp.int32)),
    )


def row_sum(x: Shaped[Array, " *batch T"]) -> Shaped[Array, " *batch T"]:
    """Return at each token the sum over its row."""
    return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)


# The losses of reward models, which learn from preferences between two responses.


def bradley_terry(
    chosen: Float[Array, " *shape"], rejected: Float[Array, " *shape"]
) -> Float[Array, " *shape"]:
    """Return -log sigmoid(chosen - rejected), the negative log-likelihood of each preference.

    Bradley and Terry (1952): reward models are trained by its mean over pairs (Christiano et al.
    2017, arXiv 1706.03741; Ouyang et al. 2022, arXiv 2203.02155, eq. 1). It is log 2 for equal
    scores.
    """
    # log_sigmoid, since the sigmoid of a large negative difference underflows to 0.
    return -jax.nn.log_sigmoid(chosen - rejected)


def centering_penalty(
    chosen: Float[Array, " *shape"], rejected: Float[Array, " *shape"]
) -> Float[Array, " *shape"]:
    """Return (chosen + rejected)^2, which pulls the mean score of a pair to 0.

    Likelihoods leave the level of scores open (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).
    """
    return (chosen + rejected) ** 2
