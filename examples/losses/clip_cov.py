"""Clip-Cov: leaves out tokens of large covariance (Cui et al. 2025, arXiv 2505.22617).

    python -m jax_ppo.train --config=arithmetic \
        --config.actor.policy_loss=examples/losses/clip_cov.py:clip_cov

The entropy falls where probability and advantage vary together; leaving a few such tokens out
keeps it up. Use it when the entropy collapses early and an entropy bonus does not help.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ppo.kernels.losses import Clip, MiniBatchTokens, PolicyBatch, PolicyLoss, clipped_surrogate
from jax_ppo.kernels.masked_statistics import masked_mean, zero_outside

SHARE = 2e-4  # of a mini-batch's tokens that is left out, rounded down, but at least one token
LEAST, LARGEST = 1.0, 5.0  # covariance of the tokens that may be left out


def clip_cov(
    batch: PolicyBatch,
    clip: Clip,
    mini_batch: MiniBatchTokens,
    to_rows: Callable[[jax.Array], jax.Array],
) -> PolicyLoss:
    """Compute PPO's loss, 0 on the tokens that `select_tokens` selects from the whole mini-batch.

    As in the authors' code, the other tokens have PPO's clip. Biased on purpose, by what is left
    out and by the clip.
    """
    policy = clipped_surrogate(batch, clip)
    selected = to_rows(select_tokens(mini_batch)) > 0
    return policy._replace(
        loss=jnp.where(selected, 0.0, policy.loss),
        clipped=jnp.maximum(policy.clipped, selected.astype(jnp.float32)),
    )


def select_tokens(
    mini_batch: MiniBatchTokens,
    share: float = SHARE,
    least: float = LEAST,
    largest: float = LARGEST,
) -> jax.Array:
    """Return bool [B, T]: a share of the tokens, by chance among those of a covariance in range.

    The covariance of a token is (log pi - mean log pi)(A - mean A) over all tokens of the mask. pi
    is the old policy here, which is the paper's in the first optimizer step: the selection then
    depends neither on micro-batches nor on what was learned from others.
    """
    old_logprobs, advantages, mask = mini_batch
    logprobs, advantages = (zero_outside(x, mask) for x in (old_logprobs, advantages))
    covariance = (logprobs - masked_mean(logprobs, mask)) * (
        advantages - masked_mean(advantages, mask)
    )
    in_range = mask & (covariance >= least) & (covariance <= largest)
    # Each mini-batch has its own choice, which depends on its members alone.
    seed = jax.lax.bitcast_convert_type(jnp.float32(logprobs.sum()), jnp.uint32)
    draws = jax.random.uniform(jax.random.fold_in(jax.random.key(0), seed), mask.shape)
    count = jnp.maximum(jnp.floor(share * mask.sum()), 1)
    ranks = jnp.argsort(jnp.argsort(jnp.where(in_range, draws, jnp.inf).reshape(-1)))
    return in_range & (ranks.reshape(mask.shape) < count)
