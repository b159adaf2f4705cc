"""GDPO: normalizes each reward before they are added (Liu et al. 2026, arXiv 2601.05242).

    python -m jax_ppo.train --config=arithmetic --config.rollout.n=4 \
        --config.trainer.critic_warmup=0 --config.algorithm.whiten_advantages=True \
        --config.reward.terms='arithmetic:1.0,length[1:5]:0.1' \
        --config.algorithm.adv_estimator=examples/estimators/gdpo.py:gdpo

Use it when a response has several rewards of different scales, and none should drown another. The
parameters after `n` name the rewards: numbers that the reward function returns with each response;
of `reward.terms` they are NAME_term. Write your own in their place.
"""

import jax
import jax.numpy as jnp

from jax_ppo.kernels.advantages import equalize_groups, grpo

WEIGHTS = (1.0, 0.1)  # of the rewards, in the order of the parameters


def gdpo(
    rewards: jax.Array, mask: jax.Array, n: int, arithmetic_term: jax.Array, length_term: jax.Array
) -> jax.Array:
    """Return sum_k w_k A_bk, [B], where A_bk is `grpo` with `by_std` of the k-th reward.

    Group reward-decoupled normalization before whitening over the rollout, which
    `algorithm.whiten_advantages` adds. Summed before they are normalized, two rewards that differ
    in scale, or cancel, would look like one. A reward that is equal throughout a group adds
    nothing. Each part is biased like `grpo`. `rewards` are not read, nor is a KL in them.
    """
    parts = (equalize_groups(x, jnp.abs(x), n) for x in (arithmetic_term, length_term))
    first, second = (grpo(scores, n, by_std=True) for scores in parts)
    return WEIGHTS[0] * first + WEIGHTS[1] * second
