"""Divergence PPO: bounds the change of a token's probability (Qi et al. 2026, arXiv 2602.04879).

    python -m jax_ppo.train --config=arithmetic \
        --config.actor.policy_loss=examples/losses/dppo.py:dppo_tv \
        --config.actor.clip_ratio_low=0.15 --config.actor.clip_ratio_high=0.15

Use it when the clip stops rare tokens, whose ratio is large though hardly any probability moved.
`dppo_kl`, with bounds of 0.05, holds likely tokens back sooner.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ppo.kernels.losses import Clip, PolicyBatch, PolicyLoss, log_ratios_and_advantages
from jax_ppo.kernels.masked_statistics import zero_outside
from jax_ppo.kernels.policy_losses import unclipped_result


def dppo_tv(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute the loss with the total variation of the token against the rest (Binary-TV).

        loss = -rho A, but constant where the token has moved too far in the direction of A:
            A > 0, rho > 1 and |pi - pi_old| > clip.high, or A < 0, rho < 1 and ... > clip.low

    |pi - pi_old| is the total variation between the distributions over {the token, any other}, a
    lower bound of that over the vocabulary. Unlike the clip, which bounds the relative change, it
    leaves rare tokens free and stops likely ones.

    Biased like `importance`, and by what is left out. There is no dual clip: clip.dual is not read.
    """
    return _divergence_ppo(batch, clip, lambda pi, old: jnp.abs(pi - old))


def dppo_kl(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute `dppo_tv` with a KL for the total variation (Binary-KL).

    KL = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))
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
    result = unclipped_result(loss, ratio, log_ratio)
    return result._replace(clipped=is_stopped.astype(jnp.float32))
