"""Metrics of the sampled responses themselves, and of their rewards within each prompt's group."""

import functools

import jax
import jax.numpy as jnp

from jax_ppo.kernels.masked_statistics import ROUNDING, masked_mean, starts_of_turns
from jax_ppo.types import NOTHING, Rollout

_HASH_BASE = 2654435761  # odd, so that no power of it vanishes modulo 2^32


@functools.partial(jax.jit, static_argnames=("responses_per_prompt",))
def measure_sampling(
    rollout: Rollout,
    correct_B: jax.Array,
    rewards_B: jax.Array,
    steps_BxT: jax.Array | None,
    *,
    responses_per_prompt: int,
    step: int,
) -> dict[str, jax.Array]:
    """Return metrics of the sampled responses, scalars on the mesh (docs/metrics.md).

    Responses to a prompt are adjacent. `correct_B` is `NOTHING` where correctness is undefined;
    `rewards_B` are rewards of whole responses, `steps_BxT` rewards within them, if there are any.
    """
    is_known_B = correct_B >= 0
    hashes_B = jnp.sort(_hash_responses(rollout.responses, rollout.lengths))
    copies_B = jnp.searchsorted(hashes_B, hashes_B, side="right") - jnp.searchsorted(
        hashes_B, hashes_B, side="left"
    )
    metrics = {
        "reward/accuracy": jnp.where(is_known_B.any(), masked_mean(correct_B, is_known_B), NOTHING),
        "response_length/truncated_share": rollout.truncated.mean(dtype=jnp.float32),
        "rollout/most_common": copies_B.max() / len(copies_B),
    }
    if rollout.slot_steps is not None:
        slot_steps = rollout.slot_steps.sum()
        drawn = rollout.action_mask.sum()
        metrics["rollout/slot_use"] = drawn / slot_steps
    if rollout.turn_rewards is not None:
        metrics |= _measure_turns(rollout, rollout.turn_rewards)
    if rollout.versions is not None:
        # In steps, of the tokens that the policy chose.
        ages_BxT = jnp.where(rollout.action_mask, step - rollout.versions, 0)
        metrics |= {
            "rollout/staleness": ages_BxT.sum() / rollout.action_mask.sum(),
            "rollout/staleness_max": ages_BxT.max(),
            "rollout/continued_share": (ages_BxT > 0).any(1).mean(dtype=jnp.float32),
        }
    if responses_per_prompt > 1:
        if steps_BxT is not None:
            rewards_B = rewards_B + steps_BxT.sum(1)
        metrics |= _measure_groups(rollout, rewards_B, responses_per_prompt)
    return metrics


def _measure_turns(rollout: Rollout, turn_rewards_BxT: jax.Array) -> dict[str, jax.Array]:
    """Return the metrics of dialogues."""
    actions_BxT = rollout.action_mask
    starts_BxT = rollout.turn_starts
    if starts_BxT is None:
        starts_BxT = starts_of_turns(actions_BxT)
    return {
        "rollout/turns": starts_BxT.sum(1).mean(),
        "rollout/observed_share": 1 - actions_BxT.sum() / rollout.lengths.sum(),
        "reward/turns": turn_rewards_BxT.sum(1).mean(),
    }


def _measure_groups(rollout: Rollout, rewards_B: jax.Array, n: int) -> dict[str, jax.Array]:
    """Return the metrics of the groups of n responses to a prompt."""
    hashes_B = _hash_responses(rollout.responses, rollout.lengths)
    hashes_Gxn = jnp.sort(hashes_B.reshape(-1, n), axis=1)
    repeats = (hashes_Gxn[:, 1:] == hashes_Gxn[:, :-1]).sum()
    rewards_Gxn = rewards_B.reshape(-1, n)
    spread_G = rewards_Gxn.max(1) - rewards_Gxn.min(1)
    is_uniform_G = spread_G <= ROUNDING * jnp.abs(rewards_Gxn).max(1)
    return {
        "rollout/duplicates": repeats / hashes_Gxn.size,
        "reward/uniform_groups": is_uniform_G.mean(dtype=jnp.float32),
    }


def _hash_responses(responses_BxT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Return a number [B] for each response; different ones have the same once in 2^32 pairs."""
    length = responses_BxT.shape[1]
    weights_T = jnp.cumprod(jnp.full(length, _HASH_BASE, jnp.uint32))
    is_sampled_BxT = jnp.arange(length) < lengths_B[:, None]
    tokens_BxT = responses_BxT.astype(jnp.uint32) + 1
    return jnp.where(is_sampled_BxT, tokens_BxT * weights_T, 0).sum(1, dtype=jnp.uint32)
