"""SAPO: a sigmoid of the ratio in place of PPO's clip (Gao et al. 2025, arXiv 2511.20347).

    python -m jax_ppo.train --config=arithmetic \
        --config.actor.policy_loss=examples/losses/sapo.py:sapo \
        --config.actor.loss_agg_mode=seq-mean-token-mean

Use it when tokens that moved far should count less and less instead of not at all.
"""

import jax
import jax.numpy as jnp

from jax_ppo.kernels.losses import Clip, PolicyBatch, PolicyLoss, log_ratios_and_advantages
from jax_ppo.kernels.policy_losses import unclipped_result

# Steepness of the gate for tokens of positive advantage, and for the others. The paper takes a
# larger one for the others, since raising all other tokens in place of a bad one is noisier.
TAU_POSITIVE = 1.0
TAU_NEGATIVE = 1.05


def sapo(batch: PolicyBatch, clip: Clip) -> PolicyLoss:
    """Compute the loss of soft adaptive policy optimization.

        loss = -(4 / tau) sigmoid(tau (rho - 1)) A

    The gate's slope in rho is 1 at rho = 1 and falls like that of a sigmoid on both sides, faster
    with a larger tau. Biased like the clip on purpose, but no token is without a gradient. `clip`
    is not read.
    """
    log_ratio, advantages = log_ratios_and_advantages(batch)
    ratio = jnp.exp(log_ratio)
    tau = jnp.where(advantages > 0, TAU_POSITIVE, TAU_NEGATIVE)
    loss = -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))
    return unclipped_result(loss, ratio, log_ratio)
