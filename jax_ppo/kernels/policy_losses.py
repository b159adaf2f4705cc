"""Policy losses by name, behind one protocol: `loss(batch: PolicyBatch, clip: Clip) -> losses.PolicyLoss`.

A loss is per token, and becomes that of a mini-batch by the weights of `losses.loss_weights`: a function of this protocol
takes no mean. What needs the whole response takes it through `batch.sequence_sum`, which knows how the responses are packed.
Advantages and everything of the old policy are constants. PolicyLoss says what comes back, under the mask too; a loss of your
own may start from any of those below.

    name        loss of a token, with rho = pi / pi_old of it                 clip             dual clip
    vanilla     -min(rho A, clip(rho) A)                                      of rho           yes
    importance  -rho A                                                        none             no
    gspo        -min(s A, clip(s) A), s = (prod rho)^(1/length)               of s             yes
    gmpo        -g A, g = (prod rho, each cut where A gains)^(1/length)       of log rho       no
    cispo       -[clip(rho)] A log pi                                         of [rho]         no
    reinforce   -A log pi                                                     none             no

where [x] has no gradient and clip(x) = clip(x, 1 - low, 1 + high). At the old policy all six have the gradient
-A grad log pi, unbiased in a sum over tokens; they differ once the policy has moved.

Log-ratios of tokens are clamped to +-20, where they lose their gradient, before anything is made of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.kernels import losses
from jax_ppo.kernels.losses import MAX_LOG_RATIO, PolicyLoss
from jax_ppo.kernels.masked import zero_outside


class PolicyBatch(NamedTuple):
    """Tokens of whole responses. All arrays have one shape, any rank."""

    logprobs: (
        jax.Array
    )  # <= 0, under the policy being trained: the one input a gradient is meant to flow to
    old_logprobs: jax.Array  # <= 0, under the policy at the start of the update
    advantages: jax.Array
    # 1 on the tokens that the policy chose, which need not be contiguous; elsewhere the three above
    # may hold anything, NaN included.
    mask: jax.Array
    # int32: how many tokens of its response the mask selects, at each token; anything under the mask.
    action_counts: jax.Array
    sequence_sum: Callable[
        [jax.Array], jax.Array
    ]  # of x that is 0 under the mask: at each token, x summed over its response


class Clip(NamedTuple):
    """How far the ratio may go: low and high > 0, low < 1 but for gmpo; dual > 1, or None for no dual clip."""

    low: float
    high: float
    dual: float | None = None


def padded_batch(
    logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array
) -> PolicyBatch:
    """Of arrays [..., T] with one response in each row."""

    def sequence_sum(x):
        return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)

    return PolicyBatch(
        logprobs, old_logprobs, advantages, mask, sequence_sum(mask.astype(jnp.int32)), sequence_sum
    )


def vanilla(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """PPO's clipped surrogate: `losses.policy_loss`."""
    return losses.policy_loss(
        batch.logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.mask,
        clip.low,
        clip.high,
        clip.dual,
    )


def importance(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """-rho A, unclipped: the surrogate of Kakade & Langford 2002 that TRPO bounds (Schulman et al. 2015, arXiv 1502.05477).

    Its expected gradient is that of the policy's actions in the states that the OLD policy visits: unbiased at the old
    policy and for responses of one token; beyond that biased, as the states are still the old policy's. Variance grows with
    rho, which nothing bounds.
    """
    log_ratio, advantages = _log_ratios_and_advantages(batch)
    ratio = jnp.exp(log_ratio)
    return _unclipped_result(-advantages * ratio, ratio, log_ratio)


def gspo(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071), as GSPO-token (their section 4.3).

        s      = exp(mean over the response of log rho)
        s_t    = [s] pi / [pi]                         the value of s, the gradient of its own token
        loss_t = -min(s_t A_t, clip(s_t) A_t), with the dual clip of `losses.policy_loss`

    [x] has no gradient. Weighted "seq-mean-token-mean", with one A for the response, this is their GSPO: -min(s A, clip(s) A).
    The whole response is clipped or none of it. s moves far less than rho: their clip is 3e-4 and 4e-4.

    Biased: the ratio that would make the gradient unbiased is s^length.

    Returns: a PolicyLoss whose ratio is s; its log_ratio is the token's.
    """
    log_ratio, advantages = _log_ratios_and_advantages(batch)
    log_s = _mean_over_response(log_ratio, batch)
    loss = losses.policy_loss(
        log_s, jnp.zeros_like(log_s), advantages, batch.mask, clip.low, clip.high, clip.dual
    )
    return loss._replace(log_ratio=log_ratio)


def gmpo(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Geometric-mean policy optimization (Zhao et al. 2025, arXiv 2507.20673).

        d_t    = min(log rho_t, high) where A_t > 0, max(log rho_t, -low) elsewhere
        loss_t = -g A_t,  g = exp(mean over the response of d_t)

    `low` and `high` bound LOG rho; theirs are 0.4 both. A token that is clipped has no gradient; the others of its response
    keep theirs. As in gspo each token has the gradient of its own log rho: with "seq-mean-token-mean" and one A for the
    response the sum is theirs.

    Biased as gspo is, and by the clip. There is no dual clip: clip.dual is not read.

    Returns: a PolicyLoss whose ratio is g; its log_ratio is the token's.
    """
    log_ratio, advantages = _log_ratios_and_advantages(batch)
    cut = jnp.where(
        advantages > 0, jnp.minimum(log_ratio, clip.high), jnp.maximum(log_ratio, -clip.low)
    )
    ratio = jnp.exp(_mean_over_response(cut, batch))
    return _unclipped_result(-advantages * ratio, ratio, log_ratio)._replace(
        clipped=_as_flags(cut != log_ratio)
    )


def cispo(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Clipped importance weights (MiniMax-M1, arXiv 2506.13585): REINFORCE, weighted by a rho that is cut off.

        loss = -[clip(rho)] A log pi

    [x] has no gradient: every token keeps one, those outside the clip too, where PPO's would have none. Their experiments
    bound rho from above alone (`low` near 1 here).

    Biased as `importance` is, whose gradient this has where nothing is cut; a cut weight takes from tokens that became much
    likelier, and gives to those that became less likely. The loss's value means nothing. clip.dual is not read.

    Returns: a PolicyLoss whose `clipped` says that the weight was cut.
    """
    log_ratio, advantages = _log_ratios_and_advantages(batch)
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high))
    loss = -weight * advantages * zero_outside(batch.logprobs, batch.mask)
    return _unclipped_result(loss, ratio, log_ratio)._replace(clipped=_as_flags(weight != ratio))


def reinforce(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """-A log pi (Williams 1992; GPG, Chu et al. 2025, arXiv 2504.02546).

    Unbiased at the old policy. Off it, biased towards what was sampled: an A of 1 everywhere is no longer without effect, but
    descends KL(old || pi). Meant for one mini-batch a rollout. Neither clip nor old_logprobs touch the loss.
    """
    log_ratio, advantages = _log_ratios_and_advantages(batch)
    return _unclipped_result(
        -advantages * zero_outside(batch.logprobs, batch.mask), jnp.exp(log_ratio), log_ratio
    )


LOSSES: dict[str, Callable[[PolicyBatch, Clip], PolicyLoss]] = {
    "vanilla": vanilla,
    "importance": importance,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "reinforce": reinforce,
}


def _log_ratios_and_advantages(batch):
    """The tokens' clamped log-ratios, and their advantages; both 0 under the mask."""
    shapes = tuple(x.shape for x in batch[:5])
    assert len(set(shapes)) == 1, (
        f"logprobs, old_logprobs, advantages, mask, action_counts differ in shape: {shapes}"
    )
    log_ratio = zero_outside(batch.logprobs, batch.mask) - zero_outside(
        batch.old_logprobs, batch.mask
    )
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO), zero_outside(
        batch.advantages, batch.mask
    )


def _mean_over_response(log_ratio, batch):
    """The mean over each token's response, with the gradient of the token's own; 0 under the mask."""
    mean = batch.sequence_sum(jax.lax.stop_gradient(log_ratio)) / jnp.maximum(
        batch.action_counts, 1
    )
    return zero_outside(mean, batch.mask) + (log_ratio - jax.lax.stop_gradient(log_ratio))


def _as_flags(condition):
    return condition.astype(jnp.float32)


def _unclipped_result(loss, ratio, log_ratio):
    none = jnp.zeros(loss.shape, jnp.float32)
    return PolicyLoss(loss, ratio, log_ratio, none, none)
