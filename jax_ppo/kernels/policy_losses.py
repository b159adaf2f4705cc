"""Policy losses, behind one protocol: `loss(batch: PolicyBatch, clip: Clip) -> PolicyLoss`.

A loss is per token. The weights of `losses.loss_weights` combine it into the loss of a mini-batch:
a function of this protocol takes no mean. What depends on the whole response uses
`batch.sequence_sum`, which knows how the responses are packed. Advantages and everything from the
old policy are constants. `losses.PolicyLoss` states what is returned, where mask is 0 too. A custom
loss may start from any of these; jax_ppo/registries.py has an entry for each:

    name        loss of a token, with rho = pi / pi_old of it             clip        dual clip
    vanilla     -min(rho A, clip(rho) A)                                  of rho      yes
    importance  -rho A                                                    none        no
    gspo        -min(s A, clip(s) A), s = (prod rho)^(1/count)            of s        yes
    gmpo        -g A, g = geometric mean of rho, each bounded             of log rho  no
                on the side that A rewards
    cispo       -[clip(rho)] A log pi                                     of [rho]    no
    reinforce   -A log pi                                                 none        no
    sapo        -sigmoid(tau (rho - 1)) 4 / tau A                         soft        no
    dppo_tv     -rho A, or a constant where |pi - pi_old| is large        of pi       no
    dppo_kl     -rho A, or a constant where the binary KL is large        of pi       no
    clip_cov    vanilla's, or 0 on selected tokens                        of rho      yes
    kl_cov      -rho A, + beta |log rho| on selected tokens               none        no

where [x] has no gradient, clip(x) = clip(x, 1 - low, 1 + high), and products and counts cover the
tokens of the response that the mask selects. At the old policy, on tokens that are not selected,
all have the gradient -A grad log pi, unbiased in a sum over tokens; they differ once the policy has
moved.

Log-ratios of tokens are first clamped to +-20, beyond which they have no gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_ppo.kernels.kl import absolute
from jax_ppo.kernels.losses import (
    Clip,
    PolicyBatch,
    PolicyLoss,
    clipped_surrogate,
    log_ratios_and_advantages,
)
from jax_ppo.kernels.masked import masked_mean, zero_outside


def importance(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute -rho A, unclipped.

    The surrogate of Kakade & Langford 2002 that TRPO bounds (Schulman et al. 2015, arXiv
    1502.05477). Its expected gradient is that of the policy's actions in the states that the OLD
    policy visits: unbiased at the old policy and for responses of one token, biased otherwise,
    since the states are still the old policy's. The variance grows with rho, which is unbounded.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    ratio = jnp.exp(log_ratio)
    return _unclipped_result(-advantages * ratio, ratio, log_ratio)


def gspo(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute the loss of group sequence policy optimization, as GSPO-token.

        s      = exp(mean over the response of log rho)
        s_t    = [s] pi / [pi]                         the value of s, the gradient of its own token
        loss_t = -min(s_t A_t, clip(s_t) A_t), with the dual clip of PPO's

    Zheng et al. 2025, arXiv 2507.18071, section 4.3. [x] has no gradient. Weighted with
    "seq-mean-token-mean" and one A per response, this is their GSPO: -min(s A, clip(s) A). The
    whole response is clipped or none of it. s moves far less than rho: their clip is 3e-4 below
    and 4e-4 above.

    Biased: the ratio that would make the gradient unbiased is s^count. The PolicyLoss has the ratio
    s, and the log_ratio of the token.
    """
    log_ratio, _ = log_ratios_and_advantages(batch)
    # The value of the whole response at each token, with the gradient of the token's own ratio.
    log_s = _mean_over_response(log_ratio, batch)
    # Against old log-probs of 0, the ratio that is clipped is s.
    against_zeros = batch._replace(logprobs=log_s, old_logprobs=jnp.zeros_like(log_s))
    return clipped_surrogate(against_zeros, clip)._replace(log_ratio=log_ratio)


def gmpo(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute the loss of geometric-mean policy optimization.

        d_t    = min(log rho_t, high) where A_t > 0, max(log rho_t, -low) elsewhere
        loss_t = -g A_t,  g = exp(mean over the response of d_t)

    Zhao et al. 2025, arXiv 2507.20673. `low` and `high` bound LOG rho; both are 0.4 in the paper.
    A clipped token has no gradient; the other tokens of its response keep theirs. As in gspo, each
    token has the gradient of its own log rho: with "seq-mean-token-mean" and one A per response,
    the sum is the paper's.

    Biased like gspo, and by the clip. There is no dual clip: clip.dual is not read. The PolicyLoss
    has the ratio g, and the log_ratio of the token.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    # Each log-ratio is bounded on the side where the token would gain from moving.
    cut = jnp.where(
        advantages > 0, jnp.minimum(log_ratio, clip.high), jnp.maximum(log_ratio, -clip.low)
    )
    # A mean of logs: the geometric mean of the ratios.
    ratio = jnp.exp(_mean_over_response(cut, batch))
    return _unclipped_result(-advantages * ratio, ratio, log_ratio)._replace(
        clipped=_as_flags(cut != log_ratio)
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
    # The truncated ratio only weighs: the gradient is that of log pi.
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high))
    loss = -weight * advantages * zero_outside(batch.logprobs, batch.mask)
    return _unclipped_result(loss, ratio, log_ratio)._replace(clipped=_as_flags(weight != ratio))


def reinforce(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute -A log pi (Williams 1992; GPG, Chu et al. 2025, arXiv 2504.02546).

    Unbiased at the old policy. Elsewhere biased towards the sampled tokens: even a constant
    A = 1 then changes the policy: it descends KL(old || pi). Meant for one mini-batch per rollout.
    The loss depends on neither clip nor old_logprobs.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    return _unclipped_result(
        -advantages * zero_outside(batch.logprobs, batch.mask), jnp.exp(log_ratio), log_ratio
    )


def sapo(batch: PolicyBatch, clip: Clip, tau_pos: float = 1.0, tau_neg: float = 1.05) -> PolicyLoss:
    """Compute the loss of soft adaptive policy optimization.

        loss = -(4 / tau) sigmoid(tau (rho - 1)) A,  tau = tau_pos where A > 0, tau_neg elsewhere

    Gao et al. 2025, arXiv 2511.20347. In place of the clip, a gate: its slope in rho is 1 at
    rho = 1 and falls like that of a sigmoid on both sides, faster with a larger tau. The paper
    takes tau_neg > tau_pos, since raising all other tokens in place of a bad one is noisier.

    Biased like the clip on purpose, but no token is without a gradient. `clip` is not read.

    Both temperatures are > 0.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    ratio = jnp.exp(log_ratio)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    loss = -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))
    return _unclipped_result(loss, ratio, log_ratio)


def dppo_tv(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute the loss of divergence PPO with the total variation of the token against the rest.

        loss = -rho A, but constant where the token has moved too far in the direction of A:
            A > 0, rho > 1 and |pi - pi_old| > clip.high, or A < 0, rho < 1 and ... > clip.low

    Qi et al. 2026, arXiv 2602.04879, Binary-TV. |pi - pi_old| is the total variation between the
    distributions over {the token, any other}, a lower bound of that over the vocabulary. Unlike
    the clip, which bounds the relative change, it leaves rare tokens free and stops likely ones.

    Biased like `importance`, and by what is left out. There is no dual clip: clip.dual is not read.
    """
    return _divergence_ppo(batch, clip, lambda pi, old: jnp.abs(pi - old))


def dppo_kl(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute `dppo_tv` with a KL for the total variation.

        KL = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

    Qi et al. 2026, arXiv 2602.04879, Binary-KL.
    """

    def binary_kl(pi: jax.Array, old: jax.Array) -> jax.Array:
        # The floor keeps the logarithm of 0 out, whose factor is 0.
        tiny = jnp.finfo(pi.dtype).tiny
        logs = [jnp.log(jnp.maximum(x, tiny)) for x in (old, pi, 1 - old, 1 - pi)]
        return old * (logs[0] - logs[1]) + (1 - old) * (logs[2] - logs[3])

    return _divergence_ppo(batch, clip, binary_kl)


def _divergence_ppo(
    batch: PolicyBatch, clip: Clip, divergence: Callable[[jax.Array, jax.Array], jax.Array]
) -> PolicyLoss:
    """Compute -rho A, without a gradient where a token has moved too far and would move on."""
    log_ratio, advantages = log_ratios_and_advantages(batch)
    ratio = jnp.exp(log_ratio)
    old = jnp.exp(zero_outside(batch.old_logprobs, batch.mask))
    pi = jnp.exp(zero_outside(jax.lax.stop_gradient(batch.logprobs), batch.mask))
    moved = divergence(pi, old)
    is_stopped = jnp.where(
        advantages > 0, (pi > old) & (moved > clip.high), (pi < old) & (moved > clip.low)
    )
    loss = -advantages * jnp.where(is_stopped, jax.lax.stop_gradient(ratio), ratio)
    return _unclipped_result(loss, ratio, log_ratio)._replace(clipped=_as_flags(is_stopped))


def clip_cov(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute PPO's loss without the tokens that `clip_cov_tokens` selects.

    The entropy mechanism (Cui et al. 2025, arXiv 2505.22617). The entropy falls where probability
    and advantage vary together; leaving a few such tokens out keeps it up. As in the authors' code,
    the other tokens have PPO's clip.

    Biased on purpose, by what is left out and by the clip.
    """
    policy = clipped_surrogate(batch, clip)
    if batch.selected is None:
        return policy
    return policy._replace(
        loss=jnp.where(batch.selected, 0.0, policy.loss),
        clipped=jnp.maximum(policy.clipped, _as_flags(batch.selected)),
    )


def kl_cov(batch: PolicyBatch, clip: Clip, beta: float = 1.0) -> PolicyLoss:
    """Compute -rho A, plus beta |log rho| on the tokens that `kl_cov_tokens` selects.

    The entropy mechanism (Cui et al. 2025, arXiv 2505.22617): the tokens of the largest covariance
    are held at the old policy. Where the paper writes a KL, the authors' code has |log rho|, as
    here. There is no clip: `clip` is not read.

    Biased like `importance`, and by the penalty, which has no gradient at the old policy.
    """
    policy = importance(batch, clip)
    if batch.selected is None:
        return policy
    penalty = beta * jnp.where(batch.selected, absolute(policy.log_ratio), 0.0)
    return policy._replace(loss=policy.loss + penalty)


def clip_cov_tokens(
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    key: jax.Array,
    fraction: float,
    low: float,
    high: float,
) -> Bool[Array, "B T"]:
    """Select a fraction of the tokens, by chance among those whose covariance is in [low, high].

    The covariance of a token is (log pi - mean log pi)(A - mean A) over all tokens of the mask. pi
    is the old policy here, which is the paper's in the first optimizer step: the selection then
    depends neither on micro-batches nor on what was learned from others. At least one token is
    selected if any is in the range.

    Args:
      old_logprobs: log-probabilities under the policy that sampled.
      advantages: per token.
      mask: the tokens of the mini-batch that the policy chose.
      key: decides among the tokens in the range.
      fraction: of the tokens of the mask, in (0, 1).
      low: 1 in the paper.
      high: 5 in the paper.
    """
    covariance = _covariance(old_logprobs, advantages, mask)
    is_in_range = mask & (covariance >= low) & (covariance <= high)
    return _first_tokens(jax.random.uniform(key, mask.shape), is_in_range, mask, fraction)


def kl_cov_tokens(
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    key: jax.Array,
    fraction: float,
) -> Bool[Array, "B T"]:
    """Select the fraction of the tokens that has the largest covariance, as `clip_cov_tokens`."""
    covariance = _covariance(old_logprobs, advantages, mask)
    return _first_tokens(-covariance, mask, mask, fraction)


def _covariance(old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
    """Return each token's share of Cov[log pi, A], times the number of tokens."""
    centred = [zero_outside(x, mask) - masked_mean(x, mask) for x in (old_logprobs, advantages)]
    return centred[0] * centred[1]


def _first_tokens(
    order: jax.Array, eligible: jax.Array, mask: jax.Array, fraction: float
) -> jax.Array:
    """Return the eligible tokens of smallest `order`.

    Up to `fraction` of the mask's tokens are returned, rounded down, but at least one.
    """
    count = jnp.maximum(jnp.floor(fraction * jnp.sum(mask)), 1)
    # The rank of each token; of equal ones, the first in the array comes first.
    ranks = jnp.argsort(jnp.argsort(jnp.where(eligible, order, jnp.inf).reshape(-1)))
    return eligible & (ranks.reshape(mask.shape) < count)


def _mean_over_response(log_ratio: jax.Array, batch: PolicyBatch) -> jax.Array:
    """Return the mean over each token's response, 0 where mask is 0.

    Its gradient is that of the token's own log-ratio.
    """
    mean = batch.sequence_sum(jax.lax.stop_gradient(log_ratio)) / jnp.maximum(
        batch.action_counts, 1
    )
    # x - stop_gradient(x) is 0 in value, with the gradient of x.
    return zero_outside(mean, batch.mask) + (log_ratio - jax.lax.stop_gradient(log_ratio))


def _as_flags(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.float32)


def _unclipped_result(loss: jax.Array, ratio: jax.Array, log_ratio: jax.Array) -> PolicyLoss:
    no_flags = jnp.zeros(loss.shape, jnp.float32)
    return PolicyLoss(
        loss=loss, ratio=ratio, log_ratio=log_ratio, clipped=no_flags, dual_clipped=no_flags
    )
