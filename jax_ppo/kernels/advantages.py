"""Advantages and returns: of one sequence of tokens from a critic, of one group of samples from each other."""

import jax
import jax.numpy as jnp

from jax_ppo.kernels.masked import zero_outside


def gae(
    rewards_T: jax.Array,
    values_T: jax.Array,
    mask_T: jax.Array,
    gamma: float,
    lam: float,
    bootstrap_value: float | jax.Array = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) of one response.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}
        G_t     = A_t + V_t

    One sequence; `vmap` it over a batch. gamma and lam lie in [0, 1]. lam = 1 is the discounted return minus the value:
    no bias from the critic, and the most variance. lam = 0 is the one-step error: all of the critic's bias, and the
    least variance.

    Args:
      rewards_T: r_t, the reward for emitting token t.
      values_T: V_t, the value of the state in which token t is chosen, that is before it is emitted.
      mask_T: 1 on the tokens that the policy chose; 0 on padding and on tokens that others wrote, which may hold anything.
        t + 1 is the next token with mask 1: advantages pass over a hole, which costs no factor of gamma or lam. A reward
        under mask 0 is not read: put what a tool's output earned on the token before it.
      bootstrap_value: V after the last token with mask 1, wherever in the row that is. 0 for a response that ended.

    Returns:
      (advantages_T, returns_T), float32, 0 where mask is 0. Advantages are raw: whiten them afterwards, since returns
      made from whitened advantages would be no estimate of anything.
    """
    assert rewards_T.ndim == 1, (
        f"gae takes one sequence, not an array of shape {rewards_T.shape}: vmap it"
    )
    assert rewards_T.shape == values_T.shape == mask_T.shape, (
        rewards_T.shape,
        values_T.shape,
        mask_T.shape,
    )
    rewards_T, values_T = zero_outside(rewards_T, mask_T), zero_outside(values_T, mask_T)

    def step_back(after, now):
        advantage_after, value_after = after
        reward, value, kept = now
        delta = reward + gamma * value_after - value
        advantage = delta + gamma * lam * advantage_after
        # A masked position passes its carry on, so that a token sees the next token that the policy
        # chose, and the last one the bootstrap value.
        carry = (jnp.where(kept, advantage, advantage_after), jnp.where(kept, value, value_after))
        return carry, jnp.where(kept, advantage, 0.0)

    dtype = jnp.promote_types(rewards_T.dtype, values_T.dtype)
    end = (jnp.zeros((), dtype), jnp.asarray(bootstrap_value, dtype))
    _, advantages_T = jax.lax.scan(
        step_back, end, (rewards_T, values_T, mask_T.astype(bool)), reverse=True
    )
    return advantages_T, advantages_T + values_T


def length_adaptive_lam(action_counts: jax.Array, alpha: float) -> jax.Array:
    """lam = 1 - 1 / (alpha count), for the actor's advantages (VAPO, Yue et al. 2025, arXiv 2504.05118).

    A fixed lam forgets a score at the end of a response like lam^count, whatever the count of its tokens. With this lam the weights lam^k
    of the errors ahead sum to about alpha count, a share of the response that is the same for all. The authors take
    alpha = 0.05, where responses up to 20 tokens get 0: one-step errors, all of the critic's bias. Its returns are not the
    critic's targets: those come from a lam of their own, 1 in the paper (decoupled GAE).

    Args:
      action_counts: how many tokens of each response the mask selects, any shape. 0 counts as 1.
      alpha: > 0.

    Returns:
      float32 of the same shape, in [0, 1].
    """
    return jnp.clip(
        1.0 - 1.0 / (alpha * jnp.maximum(action_counts, 1).astype(jnp.float32)), 0.0, 1.0
    )


def reward_to_go(rewards_T: jax.Array, mask_T: jax.Array, gamma: float) -> jax.Array:
    """G_t = sum_k gamma^k r_{t+k} to the end of the response: what `gae` gives at lam = 1 where every value is 0.

    One sequence; `vmap` it over a batch. Unbiased, without a critic, and of the variance of all that is still to come.

    Args:
      rewards_T: the reward for emitting token t.
      mask_T: 1 on the tokens that the policy chose, as in `gae`.

    Returns:
      float32 [T], 0 where mask is 0.
    """
    return gae(rewards_T, jnp.zeros_like(rewards_T), mask_T, gamma, 1.0)[0]


# Advantages without a critic: the n samples b = prompt * n ... prompt * n + n - 1 of a prompt are each other's baseline.


def grpo(scores_B: jax.Array, n: int, by_std: bool) -> jax.Array:
    """Group-relative advantage (DeepSeekMath, Shao et al. 2024, arXiv 2402.03300, section 4.1.2).

        A_b = (s_b - mean of the group) / (std of the group + 1e-6)      by_std
        A_b =  s_b - mean of the group                                   Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)

    The standard deviation divides by n - 1 and the constant is verl's (TRL's is 1e-4).

    Bias: the mean holds the sample's own score, which shrinks the expected gradient to (n - 1) / n of the true one and does
    not turn it. Dividing by the group's standard deviation does turn it: prompts that are nearly always or nearly never
    solved weigh more than those in between, and within a group the divisor depends on the sample itself.

    Args:
      scores_B: the score of each sample, n samples of a prompt next to each other.
      n: samples of a prompt, at least 2; B is a multiple of it.

    Returns:
      float32 [B]; exactly 0 throughout a group of equal scores.
    """
    deviations = _deviations_from_group_mean(scores_B, n)
    if by_std:
        std = jnp.sqrt(jnp.sum(jnp.square(deviations), axis=1, keepdims=True) / (n - 1))
        deviations = deviations / (std + 1e-6)
    return deviations.reshape(-1)


def rloo(scores_B: jax.Array, n: int) -> jax.Array:
    """A_b = s_b - mean of the n - 1 others (REINFORCE leave-one-out; Kool et al. 2019, Ahmadian et al. 2024, arXiv 2402.14740).

    Unbiased: the baseline does not depend on the sample. Equal to (s_b - mean of all n) n / (n - 1). Arguments and result are
    those of `grpo`.
    """
    return (_deviations_from_group_mean(scores_B, n) * (n / (n - 1))).reshape(-1)


def group_mean_baseline(scores_B: jax.Array, n: int) -> jax.Array:
    """A_b = s_b - mean of the group, as REINFORCE++-baseline has it before it whitens (Hu et al. 2025, arXiv 2501.03262).

    Bias: the expected gradient is (n - 1) / n of the true one. Whitening over the whole rollout, which is the caller's, divides
    every prompt's by the same number and so, unlike `grpo`'s division, weighs none above another. Arguments and result are
    those of `grpo`, and so is the value without by_std.
    """
    return _deviations_from_group_mean(scores_B, n).reshape(-1)


def _deviations_from_group_mean(scores_B, n):
    """[B / n, n]. A group's first score is taken off first: the mean of equal scores is then 0 and not nearly so."""
    assert scores_B.ndim == 1, scores_B.shape
    assert n > 1 and scores_B.shape[0] % n == 0, (
        f"{scores_B.shape[0]} scores are no groups of {n} samples, 2 at least"
    )
    groups = scores_B.astype(jnp.promote_types(scores_B.dtype, jnp.float32)).reshape(-1, n)
    groups = groups - groups[:, :1]
    return groups - jnp.mean(groups, axis=1, keepdims=True)
