"""KL-Cov: holds tokens of large covariance at the old policy (Cui et al. 2025, arXiv 2505.22617).

    python -m jax_ppo.train --config=arithmetic \
        --config.actor.policy_loss=examples/losses/kl_cov.py:kl_cov

The entropy falls where probability and advantage vary together. Use it when the entropy collapses
early and Clip-Cov (clip_cov.py) is not stable enough.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ppo.kernels.kl import absolute
from jax_ppo.kernels.losses import Clip, MiniBatchTokens, PolicyBatch, PolicyLoss
from jax_ppo.kernels.masked_statistics import masked_mean, zero_outside
from jax_ppo.kernels.policy_losses import importance

SHARE = 2e-4  # of a mini-batch's tokens that is penalized, rounded down, but at least one token
BETA = 1.0  # weight of the penalty


def kl_cov(
    batch: PolicyBatch,
    clip: Clip,
    mini_batch: MiniBatchTokens,
    to_rows: Callable[[jax.Array], jax.Array],
) -> PolicyLoss:
    """Compute -rho A, plus beta |log rho| on the tokens that `select_tokens` selects.

    Where the paper writes a KL, the authors' code has |log rho|, as here. There is no clip: `clip`
    is not read. Biased like `importance`, and by the penalty, which has no gradient at the old
    policy.
    """
    policy = importance(batch, clip)
    selected = to_rows(select_tokens(mini_batch)) > 0
    penalty = BETA * jnp.where(selected, absolute(policy.log_ratio), 0.0)
    return policy._replace(loss=policy.loss + penalty)


def select_tokens(mini_batch: MiniBatchTokens, share: float = SHARE) -> jax.Array:
    """Return bool [B, T]: the share of the mini-batch's tokens that has the largest covariance.

    The covariance of a token is (log pi - mean log pi)(A - mean A) over all tokens of the mask. pi
    is the old policy here, which is the paper's in the first optimizer step: the selection then
    depends neither on micro-batches nor on what was learned from others.
    """
    old_logprobs, advantages, mask = mini_batch
    logprobs, advantages = (zero_outside(x, mask) for x in (old_logprobs, advantages))
    covariance = (logprobs - masked_mean(logprobs, mask)) * (
        advantages - masked_mean(advantages, mask)
    )
    count = jnp.maximum(jnp.floor(share * mask.sum()), 1)
    # Of equal covariances, the first in the array comes first.
    ranks = jnp.argsort(jnp.argsort(jnp.where(mask, -covariance, jnp.inf).reshape(-1)))
    return mask & (ranks.reshape(mask.shape) < count)
