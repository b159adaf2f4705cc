"""Reports of sampled responses: metrics of all, and records of some.

A record has texts, scores, and what the update learned from each token.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.data.messages import join_contents
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.data.tokenizer import decode_continuation, decode_tokens
from jax_ppo.kernels.masked_statistics import ROUNDING, masked_mean, starts_of_turns
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.ppo.step import StepResult
from jax_ppo.runtime import placement
from jax_ppo.types import NOTHING, Rollout, with_nan

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
    hashes_B = _hash_responses(rollout.responses, rollout.lengths)
    sorted_B = jnp.sort(hashes_B)
    copies_B = jnp.searchsorted(sorted_B, sorted_B, side="right") - jnp.searchsorted(
        sorted_B, sorted_B, side="left"
    )
    metrics = {
        "reward/accuracy": jnp.where(is_known_B.any(), masked_mean(correct_B, is_known_B), NOTHING),
        "response_length/truncated_share": rollout.truncated.mean(dtype=jnp.float32),
        "rollout/most_common": copies_B.max() / len(copies_B),
    }
    if rollout.slot_steps is not None:
        metrics["rollout/slot_use"] = rollout.action_mask.sum() / rollout.slot_steps.sum()
    if rollout.turn_rewards is not None:
        starts_BxT = rollout.turn_starts
        if starts_BxT is None:
            starts_BxT = starts_of_turns(rollout.action_mask)
        metrics |= {
            "rollout/turns": starts_BxT.sum(1).mean(),
            "rollout/observed_share": 1 - rollout.action_mask.sum() / rollout.lengths.sum(),
            "reward/turns": rollout.turn_rewards.sum(1).mean(),
        }
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
        hashes_Gxn = jnp.sort(hashes_B.reshape(-1, responses_per_prompt), axis=1)
        repeats = (hashes_Gxn[:, 1:] == hashes_Gxn[:, :-1]).sum()
        rewards_Gxn = rewards_B.reshape(-1, responses_per_prompt)
        spread_G = rewards_Gxn.max(1) - rewards_Gxn.min(1)
        is_uniform_G = spread_G <= ROUNDING * jnp.abs(rewards_Gxn).max(1)
        metrics |= {
            "rollout/duplicates": repeats / hashes_Gxn.size,
            "reward/uniform_groups": is_uniform_G.mean(dtype=jnp.float32),
        }
    return metrics


def _hash_responses(responses_BxT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Return a number [B] for each response; different ones have the same once in 2^32 pairs."""
    length = responses_BxT.shape[1]
    weights_T = jnp.cumprod(jnp.full(length, _HASH_BASE, jnp.uint32))
    is_sampled_BxT = jnp.arange(length) < lengths_B[:, None]
    tokens_BxT = responses_BxT.astype(jnp.uint32) + 1
    return jnp.where(is_sampled_BxT, tokens_BxT * weights_T, 0).sum(1, dtype=jnp.uint32)


def describe_step(
    samples: StepResult, count: int, tokenizer: Any, address: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return records of some samples of a step, with figures of each of their tokens.

    Every process must call it: arrays are exchanged. `address` is what identifies the rollout's
    random numbers, without the sample.
    """
    experience = samples.experience
    rollout = samples.sampled.rollout
    addresses = samples.sampled.addresses
    # Spread evenly, so that prompts differ.
    total = len(samples.rewards)
    rows = np.unique(np.linspace(0, total, min(count, total), endpoint=False, dtype=int))
    arrays = {
        "logprobs": experience.old_logprobs,
        "sampled_logprobs": rollout.logprobs,
        "rewards": experience.rewards,
        "advantages": experience.advantages,
        "values": experience.values,
        "returns": experience.returns,
        "reference": experience.ref_logprobs,
        "steps": samples.rule_rewards.steps,
        "turn_rewards": rollout.turn_rewards,
    }
    # On the host, where a difference compiles no program.
    figures = {
        name: placement.to_host(values) for name, values in arrays.items() if values is not None
    }
    if "reference" in figures:
        figures["kl"] = figures["logprobs"] - figures.pop("reference")
    rewards = placement.to_host(samples.rewards)
    if "steps" in figures:
        rewards = rewards + figures.pop("steps").sum(1)
    batch, rule_rewards = samples.sampled.batch, samples.rule_rewards
    records = describe_samples(rows, batch, rollout, rewards, rule_rewards, tokenizer, address)
    for row, record in zip(rows, records, strict=True):
        length = len(record["response_ids"])
        for name, values in figures.items():
            if not np.isnan(values[row, :length]).all():  # log-probs of a given response
                record[name] = _rounded(values[row, :length])
        if addresses is not None:
            record["address"] |= {name: int(values[row]) for name, values in addresses.items()}
    return records


def describe_samples(
    rows: Iterable[int],
    batch: PromptBatch,
    rollout: Rollout,
    rewards: np.ndarray,
    rule_rewards: RuleRewards,
    tokenizer: Any,
    address: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return records of samples: texts, ids, scores and where to draw them again.

    Every process must call it: arrays are exchanged. `rewards` [B] are of whole responses, with
    those within them. `address` is what identifies the rollout's random numbers: `seed`, `stream`
    and `step`, and with `sample` the index of the first sample.
    """
    correct = with_nan(placement.to_host(rule_rewards.correct))
    responses = placement.to_host(rollout.responses)
    lengths = placement.to_host(rollout.lengths)
    truncated = placement.to_host(rollout.truncated)
    # Of a dialogue: 0 at the tokens of observations, and 1 at the first token of each turn.
    found = {
        "action_mask": None if rollout.turn_rewards is None else rollout.action_mask,
        "turn_starts": rollout.turn_starts,
    }
    masks = {name: placement.to_host(mask) for name, mask in found.items() if mask is not None}
    n, first = len(rewards) // len(batch.examples), address.get("sample", 0)
    records = []
    for row in map(int, rows):
        example = batch.examples[row // n]
        prompt_ids = batch.prompts.tokens[row // n, : batch.prompts.lengths[row // n]]
        last_id = int(prompt_ids[-1])
        response_ids = responses[row, : lengths[row]].tolist()
        records.append(
            {
                "data_source": example.data_source,
                "prompt": join_contents(example.prompt),
                "response": decode_continuation(tokenizer, last_id, response_ids),
                "ground_truth": example.ground_truth,
                "score": _rounded(rewards[row]),
                "answer": rule_rewards.answers.get(row),
                "correct": None if np.isnan(correct[row]) else bool(correct[row]),
                "truncated": bool(truncated[row]),
                "address": address | {"sample": first + row},
                "prompt_index": (first + row) // n,
                "sample_index": row % n,
                "prompt_ids": np.asarray(prompt_ids).tolist(),
                "response_ids": response_ids,
                "tokens": decode_tokens(tokenizer, last_id, response_ids),
            }
        )
        for name, mask in masks.items():
            records[-1][name] = mask[row, : lengths[row]].astype(int).tolist()
    return records


def _rounded(values: np.ndarray) -> Any:
    """Return float32 values as numbers with six significant digits, a float's precision."""
    rounded = [float(f"{value:.6g}") for value in np.ravel(values).tolist()]
    return rounded if np.ndim(values) else rounded[0]
