"""Policy losses, behind one protocol: `loss(batch: PolicyBatch, clip: Clip) -> PolicyLoss`.

A loss is per token. The weights of `losses.loss_weights` combine it into the loss of a mini-batch:
a function of this protocol takes no mean. It gets what its parameters name of `losses.LossInputs`:
what depends on the whole response asks for `sequence_sum`, which knows how the responses are
packed. Advantages and everything from the old policy are constants. `losses.PolicyLoss` states what
is returned, where mask is 0 too. A custom loss may start from any of these; jax_ppo/registries.py
has an entry for each:

    name        loss of a token, with rho = pi / pi_old of it             clip        dual clip
    vanilla     -min(rho A, clip(rho) A)                                  of rho      yes
    importance  -rho A                                                    none        no
    gspo        -min(s A, clip(s) A), s = (prod rho)^(1/count)            of s        yes
    gmpo        -g A, g = geometric mean of rho, each bounded             of log rho  no
                on the side that A rewards
    cispo       -[clip(rho)] A log pi                                     of [rho]    no
    reinforce   -A log pi                                                 none        no

where [x] has no gradient, clip(x) = clip(x, 1 - low, 1 + high), and products and counts cover the
tokens of the response that the mask selects. At the old policy all have the gradient
-A grad log pi, unbiased in a sum over tokens; they differ once the policy has moved.
examples/losses/ has more.

Log-ratios of tokens are first clamped to +-20, beyond which they have no gradient.
"""

import jax
import jax.numpy as jnp

from jax_ppo.kernels.losses import (
    Clip,
    PolicyBatch,
    PolicyLoss,
    SequenceSum,
    clipped_surrogate,
    log_ratios_and_advantages,
)
from jax_ppo.kernels.masked_statistics import zero_outside


def importance(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute -rho A, unclipped.

    The surrogate of Kakade & Langford 2002 that TRPO bounds (Schulman et al. 2015, arXiv
    1502.05477). Its expected gradient is that of the policy's actions in the states that the OLD
    policy visits: unbiased at the old policy and for responses of one token, biased otherwise,
    since the states are still the old policy's. The variance grows with rho, which is unbounded.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    ratio = jnp.exp(log_ratio)
    return unclipped_result(-advantages * ratio, ratio, log_ratio)


def gspo(batch: PolicyBatch, clip: Clip, sequence_sum: SequenceSum) -> PolicyLoss:
    """Compute the loss of group sequence policy optimization, as GSPO-token.

        s      = exp(mean over the response of log rho)
        s_t    = [s] pi / [pi]                         the value of s, the gradient of log pi
        loss_t = -min(s_t A_t, clip(s_t) A_t), with the dual clip of PPO's

    Zheng et al. 2025, arXiv 2507.18071, section 4.3. [x] has no gradient. Weighted with
    "seq-mean-token-mean" and one A per response, this is their GSPO: -min(s A, clip(s) A). The
    whole response is clipped or none of it. s moves far less than rho: their clip is 3e-4 below
    and 4e-4 above.

    Biased: the ratio that would make the gradient unbiased is s^count. The PolicyLoss has the ratio
    s, and the log_ratio of the token.
    """
    log_ratio, _ = log_ratios_and_advantages(batch)
    log_s = _mean_over_response(log_ratio, batch, sequence_sum)
    # Against old log-probs of 0, the ratio that is clipped is s.
    against_zeros = batch._replace(logprobs=log_s, old_logprobs=jnp.zeros_like(log_s))
    return clipped_surrogate(against_zeros, clip)._replace(log_ratio=log_ratio)


def gmpo(batch: PolicyBatch, clip: Clip, sequence_sum: SequenceSum) -> PolicyLoss:
    """Compute the loss of geometric-mean policy optimization.

        d_t    = min(log rho_t, high) where A_t > 0, max(log rho_t, -low) elsewhere
        loss_t = -g A_t,  g = exp(mean over the response of d_t)

    Zhao et al. 2025, arXiv 2507.20673. `low` and `high` bound LOG rho; both are 0.4 in the paper.
    A clipped token has no gradient; the other tokens of its response keep theirs. As in gspo, each
    token has the gradient of log rho_t: with "seq-mean-token-mean" and one A per response,
    the sum is the paper's.

    Biased like gspo, and by the clip. There is no dual clip: clip.dual is not read. The PolicyLoss
    has the ratio g, and the log_ratio of the token.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    cut = jnp.where(  # each log-ratio is bounded on the side where the token would gain from moving
        advantages > 0, jnp.minimum(log_ratio, clip.high), jnp.maximum(log_ratio, -clip.low)
    )
    ratio = jnp.exp(_mean_over_response(cut, batch, sequence_sum))
    return unclipped_result(-advantages * ratio, ratio, log_ratio)._replace(
        clipped=((cut != log_ratio) & (advantages != 0)).astype(jnp.float32)
    )


def cispo(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute REINFORCE weighted by a truncated rho (CISPO; MiniMax-M1, arXiv 2506.13585).

        loss = -[clip(rho)] A log pi

    [x] has no gradient: every token keeps one, even outside the clip, where PPO's would have none.
    The paper's experiments bound rho only from above (`low` near 1 here).

    Biased like `importance`, whose gradient this has where nothing is truncated. Truncation takes
    weight from tokens that became much more likely and gives it to those that became less likely.
    The value of the loss has no meaning. clip.dual is not read. `clipped` marks truncated weights.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high))
    loss = -weight * advantages * zero_outside(batch.logprobs, batch.mask)
    return unclipped_result(loss, ratio, log_ratio)._replace(
        clipped=(weight != ratio).astype(jnp.float32)
    )


def reinforce(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute -A log pi (Williams 1992; GPG, Chu et al. 2025, arXiv 2504.02546).

    Unbiased at the old policy. Elsewhere biased towards the sampled tokens: even a constant
    A = 1 then changes the policy: it descends KL(old || pi). Meant for one mini-batch per rollout.
    The loss depends on neither clip nor old_logprobs.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    return unclipped_result(
        -advantages * zero_outside(batch.logprobs, batch.mask), jnp.exp(log_ratio), log_ratio
    )


def _mean_over_response(
    log_ratio: jax.Array, batch: PolicyBatch, sequence_sum: SequenceSum
) -> jax.Array:
    """Return the mean over each token's response, with the gradient of the token's log-ratio."""
    mean = sequence_sum(jax.lax.stop_gradient(log_ratio)) / jnp.maximum(batch.action_counts, 1)
    # x - stop_gradient(x) is 0 in value, with the gradient of x.
    return zero_outside(mean, batch.mask) + (log_ratio - jax.lax.stop_gradient(log_ratio))


def unclipped_result(loss: jax.Array, ratio: jax.Array, log_ratio: jax.Array) -> PolicyLoss:
    """Return the result of a loss that clips no token."""
    no_flags = jnp.zeros(loss.shape, jnp.float32)
    return PolicyLoss(
        loss=loss, ratio=ratio, log_ratio=log_ratio, clipped=no_flags, dual_clipped=no_flags
    )
