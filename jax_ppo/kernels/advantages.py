"""Advantages and returns, from a critic (per token or turn) or from a group (per sample)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Shaped

from jax_ppo.kernels.masked_statistics import ROUNDING, assert_one_shape, zero_outside


def gae(
    rewards_T: Shaped[Array, " T"],
    values_T: Shaped[Array, " T"],
    mask_T: Shaped[Array, " T"],
    gamma: float | Float[Array, ""] | Shaped[Array, " T"],
    lam: float | Float[Array, ""],
    bootstrap_value: float | Float[Array, ""] = 0.0,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Compute generalized advantage estimates and returns of one response; `vmap` it over a batch.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}
        G_t     = A_t + V_t

    Schulman et al. 2016, arXiv 1506.02438, eq. 16. With lam = 1 the critic adds no bias, and the
    variance is highest; with lam = 0 all of its bias remains, and the variance is lowest.

    Args:
      rewards_T: r_t, the reward for emitting token t.
      values_T: V_t, the value of the state before token t is emitted.
      mask_T: 1 on the tokens that the policy chose. Elsewhere, as on a tool's output, rewards and
        values may hold anything and are ignored; t + 1 means the next token with mask 1, at no
        factor of gamma or lam.
      gamma: discount per chosen token, in [0, 1]. An array holds the discount between each token
        and the next; a 0 ends an episode there.
      lam: in [0, 1].
      bootstrap_value: V after the last token with mask 1; 0 for a response that ended.

    Returns:
      (advantages_T, returns_T), float32, 0 where mask is 0. Whiten advantages only afterwards:
      returns computed from whitened ones would estimate nothing.
    """
    assert rewards_T.ndim == 1, (
        f"gae takes one sequence, not an array of shape {rewards_T.shape}: vmap it"
    )
    assert_one_shape(rewards_T=rewards_T, values_T=values_T, mask_T=mask_T)
    # Zeros where mask is 0 make the returns 0 there, too.
    rewards_T = zero_outside(rewards_T, mask_T)
    values_T = zero_outside(values_T, mask_T)

    dtype = jnp.promote_types(rewards_T.dtype, values_T.dtype)
    gamma_T = jnp.broadcast_to(jnp.asarray(gamma, dtype), rewards_T.shape)

    def step_back(
        carry: tuple[jax.Array, jax.Array], token: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        next_advantage, next_value = carry
        reward, value, discount, chosen = token
        delta = reward + discount * next_value - value
        advantage = delta + discount * lam * next_advantage
        # A masked position passes its carry on, so that each token sees the next token that the
        # policy chose, and the last of them the bootstrap value.
        carry = (jnp.where(chosen, advantage, next_advantage), jnp.where(chosen, value, next_value))
        return carry, jnp.where(chosen, advantage, 0.0)

    # After the last token there is no advantage, only the value of the final state.
    end = (jnp.zeros((), dtype), jnp.asarray(bootstrap_value, dtype))
    _, advantages_T = jax.lax.scan(
        step_back, end, (rewards_T, values_T, gamma_T, mask_T.astype(bool)), reverse=True
    )
    return advantages_T, advantages_T + values_T


def turn_gae(
    rewards_T: Shaped[Array, " T"],
    values_T: Shaped[Array, " T"],
    mask_T: Shaped[Array, " T"],
    starts_T: Shaped[Array, " T"],
    gamma: float | Float[Array, ""],
    lam: float | Float[Array, ""],
    bootstrap_value: float | Float[Array, ""] = 0.0,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Compute advantages and returns of the turns of one response: `gae` whose steps are turns k.

        delta_k = R_k + gamma V_{k+1} - V_k
        A_k     = delta_k + gamma lam A_{k+1}

    R_k is the sum of a turn's rewards, V_k the value of the state before its first token: only
    these values are read, so only these are the critic's to learn (VAGEN's `turn_level_gae`).
    Turn-PPO (Li et al. 2025, arXiv 2512.17008). Each token of a turn has its advantage: log pi of a
    turn is the sum over its tokens. Unbiased under the conditions of `gae`, however long the turns
    are.

    Arguments are as for `gae`, but gamma and lam count turns. `starts_T` is 1 on the first token of
    each turn: the tokens that the policy chose from one start to the next, even if nothing stands
    between two turns.

    Returns:
      (advantages_T, returns_T), as for `gae`; returns are 0 where `starts_T` is 0.
    """
    starts_T = starts_T.astype(bool) & mask_T.astype(bool)
    earned_T = reward_to_go(rewards_T, mask_T, ~_ends_of_turns(mask_T, starts_T))
    advantages_T, returns_T = gae(earned_T, values_T, starts_T, gamma, lam, bootstrap_value)
    return jnp.where(mask_T, _spread_over_turns(advantages_T, starts_T), 0.0), returns_T


def bi_level_gae(
    rewards_T: Shaped[Array, " T"],
    values_T: Shaped[Array, " T"],
    mask_T: Shaped[Array, " T"],
    starts_T: Shaped[Array, " T"],
    gamma: float | Float[Array, ""],
    lam: float | Float[Array, ""],
    turn_gamma: float | Float[Array, ""],
    turn_lam: float | Float[Array, ""],
    bootstrap_value: float | Float[Array, ""] = 0.0,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Compute advantages and returns of tokens by `gae` within turns, and over turns between them.

    Let A_k and V_k be as in `turn_gae`, with turn_gamma and turn_lam. Within turn k of tokens
    i = 0 .. n the recursion is `gae`'s, with gamma and lam, and it ends with what follows:

        delta_n = r_n + turn_gamma (V_{k+1} + turn_lam A_{k+1}) - V_{k,n},    A_{k,n} = delta_n

    VAGEN (Wang et al. 2025, arXiv 2510.16907, Bi-Level GAE). With all four at 1 this is `gae`;
    with gamma = lam = 1 the first token of a turn has the advantage of `turn_gae`. Credit from
    later turns decays by the turns between and by the tokens to the end of the token's turn.
    Unbiased under the conditions of `gae` if gamma is 1; otherwise turns and tokens are discounted
    differently.

    Arguments are as for `turn_gae`; gamma and lam count the tokens of a turn, the others turns.

    Returns:
      (advantages_T, returns_T), as for `gae`.
    """
    starts_T = starts_T.astype(bool) & mask_T.astype(bool)
    ends_T = _ends_of_turns(mask_T, starts_T)
    earned_T = reward_to_go(rewards_T, mask_T, ~ends_T)
    _, returns_T = gae(earned_T, values_T, starts_T, turn_gamma, turn_lam, bootstrap_value)
    # What a turn returns besides the rewards earned in it: turn_gamma (V_{k+1} + turn_lam A_{k+1}).
    later_T = _spread_over_turns(returns_T - jnp.where(starts_T, earned_T, 0.0), starts_T)
    rewards_T = zero_outside(rewards_T, mask_T) + jnp.where(ends_T, later_T, 0.0)
    return gae(rewards_T, values_T, mask_T, gamma * ~ends_T, lam)


def _ends_of_turns(mask_T: jax.Array, starts_T: jax.Array) -> jax.Array:
    """Return where the last chosen token of each turn is."""
    mask_T = mask_T.astype(bool)
    turns_T = jnp.cumsum(starts_T)
    # The turn of the next chosen token; after the last one there is none.
    following_T = jax.lax.cummin(jnp.where(mask_T, turns_T, len(turns_T) + 1), reverse=True)
    return mask_T & (turns_T < jnp.append(following_T[1:], len(turns_T) + 1))


def _spread_over_turns(x_T: jax.Array, starts_T: jax.Array) -> jax.Array:
    """Return at each token the value at the start of its turn; undefined before the first turn."""
    return x_T[jax.lax.cummax(jnp.where(starts_T, jnp.arange(len(x_T)), 0))]


def length_adaptive_lam(
    action_counts: Integer[Array, " *shape"], alpha: float
) -> Float[Array, " *shape"]:
    """Return lam = 1 - 1 / (alpha count), float32 in [0, 1], for the actor's advantages.

    VAPO (Yue et al. 2025, arXiv 2504.05118; alpha = 0.05). With a fixed lam, a score at the end of
    a response decays like lam^count; with this one the weights lam^k of the errors ahead sum to
    about alpha count, the same share of every response. Up to 1 / alpha tokens it is 0: one-step
    errors, all of the critic's bias. The critic's targets take another lam, 1 in the paper
    (decoupled GAE).

    `action_counts`: how many tokens of each response the mask selects; 0 counts as 1. `alpha` must
    be positive.
    """
    counts = jnp.maximum(action_counts, 1).astype(jnp.float32)
    return jnp.clip(1.0 - 1.0 / (alpha * counts), 0.0, 1.0)


def reward_to_go(
    rewards_T: Shaped[Array, " T"],
    mask_T: Shaped[Array, " T"],
    gamma: float | Float[Array, ""] | Shaped[Array, " T"],
) -> Float[Array, " T"]:
    """Return G_t = sum_k gamma^k r_{t+k} to the end of the response, float32, 0 where mask is 0.

    This is `gae`, with the same arguments, at lam = 1 with values 0: unbiased, with the variance of
    all rewards to come.
    """
    return gae(rewards_T, jnp.zeros_like(rewards_T), mask_T, gamma, 1.0)[0]


# Advantages without a critic. The n adjacent samples of a prompt are each other's baseline.


def equalize_groups(
    scores: Float[Array, "B ..."], sizes: Float[Array, "B ..."], n: int
) -> Float[Array, "B ..."]:
    """Return the scores; groups that differ by rounding alone get their first sample's throughout.

    `sizes`: the sum of the absolute rewards that each score was computed from.
    """
    groups, sizes = (x.reshape(-1, n, *x.shape[1:]) for x in (scores, sizes))
    spread = groups.max(1, keepdims=True) - groups.min(1, keepdims=True)
    is_equal = spread <= ROUNDING * sizes.max(1, keepdims=True)
    return jnp.where(is_equal, groups[:, :1], groups).reshape(scores.shape)


def grpo(scores_B: Shaped[Array, " B"], n: int, by_std: bool) -> Float[Array, " B"]:
    """Return the group-relative advantage of each sample.

        A_b = (s_b - mean of the group) / (std of the group + 1e-6)    by_std
        A_b =  s_b - mean of the group                                 Dr. GRPO

    DeepSeekMath (Shao et al. 2024, arXiv 2402.03300, section 4.1.2); Dr. GRPO (Liu et al. 2025,
    arXiv 2503.20783). The standard deviation divides by n - 1, and the constant is verl's.

    Bias: the mean includes the sample's score, which scales the expected gradient by (n - 1) / n.
    Dividing by the group's standard deviation changes its direction: prompts that are nearly always
    or nearly never solved weigh more, and within a group the divisor depends on the sample itself.

    Args:
      scores_B: the score of each sample; the n samples of a prompt are adjacent.
      n: samples per prompt, at least 2; B is a multiple of it.
      by_std: divide by the group's standard deviation.

    Returns:
      float32 [B]; exactly 0 throughout a group of equal scores.
    """
    deviations = group_mean_baseline(scores_B, n).reshape(-1, n)
    if by_std:
        # The mean of the deviations is 0, so the mean of their squares is the variance.
        std = jnp.sqrt(jnp.sum(jnp.square(deviations), axis=1, keepdims=True) / (n - 1))
        deviations = deviations / (std + 1e-6)
    return deviations.reshape(-1)


def rloo(scores_B: Shaped[Array, " B"], n: int) -> Float[Array, " B"]:
    """Return A_b = s_b - mean of the n - 1 other samples of the prompt.

    REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740). Unbiased:
    the baseline does not depend on the sample. Takes and returns the same as `grpo`.
    """
    return group_mean_baseline(scores_B, n) * (n / (n - 1))


def group_mean_baseline(scores_B: Shaped[Array, " B"], n: int) -> Float[Array, " B"]:
    """Return A_b = s_b - mean of the group, as `grpo` without `by_std`.

    REINFORCE++-baseline before whitening (Hu et al. 2025, arXiv 2501.03262). Bias: the expected
    gradient is (n - 1) / n of the true one. Whitening over the whole rollout, left to the caller,
    divides the advantages of all prompts by one number, and weighs none above another.
    """
    assert scores_B.ndim == 1, scores_B.shape
    assert n > 1 and scores_B.shape[0] % n == 0, (
        f"{scores_B.shape[0]} scores cannot be divided into groups of {n} samples, at least 2"
    )
    groups = scores_B.astype(jnp.promote_types(scores_B.dtype, jnp.float32)).reshape(-1, n)
    groups = groups - groups[:, :1]  # first less one of them: equal scores are exactly 0
    return (groups - jnp.mean(groups, axis=1, keepdims=True)).reshape(-1)
