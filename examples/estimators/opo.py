"""OPO: scores less a mean that is weighted by lengths (Hao et al. 2025, arXiv 2505.23585).

    python -m jax_ppo.train --config=arithmetic --config.rollout.n=4 \
        --config.trainer.critic_warmup=0 \
        --config.algorithm.adv_estimator=examples/estimators/opo.py:opo

Use it when responses to a prompt differ much in length, with one optimizer step per rollout.
"""

import jax
import jax.numpy as jnp


def opo(rewards: jax.Array, mask: jax.Array, n: int) -> jax.Array:
    """Return A_b = s_b - sum_j count_j s_j / sum_j count_j over the group, [B].

    On-policy RL with optimal reward baseline: the baseline of least variance,
    E[|grad log pi|^2 s] / E[|grad log pi|^2], where the squared gradient of a response is taken to
    be proportional to its count of tokens.

    Bias: the baseline includes the sample's own score. With equal counts the expected gradient is
    (n - 1) / n of the true one, as for `grpo` without the division; otherwise s_b - s_j of two
    samples counts with the share count_j / sum of the other, so that long responses are compared
    less.
    """
    scores = rewards.sum(1).reshape(-1, n)
    scores = scores - scores[:, :1]  # equal scores give exactly 0
    counts = mask.sum(1).reshape(-1, n).astype(scores.dtype)
    total = jnp.maximum(counts.sum(1, keepdims=True), 1.0)
    return (scores - (counts * scores).sum(1, keepdims=True) / total).reshape(-1)
