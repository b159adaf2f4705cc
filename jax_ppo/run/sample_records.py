"""Sampled responses as records: texts, scores, and what the update learned from each token."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_ppo.data.messages import join_contents
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.data.tokenizer import decode_continuation, decode_tokens
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.ppo.step import StepResult
from jax_ppo.runtime import placement
from jax_ppo.types import Rollout, with_nan


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
    n = len(rewards) // len(batch.examples)
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
                "address": address | {"sample": address.get("sample", 0) + row},
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
