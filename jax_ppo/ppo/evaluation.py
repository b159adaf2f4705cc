"""Held-out evaluation: sample, score with the rules, average."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from jax_ppo.runtime import sharding
from jax_ppo.types import Rollout


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Averages over all held-out prompts and their responses.

    Attributes:
      accuracy: share of right answers, 0..1; None where the rules have no notion of right.
      reward_mean: the mean reward, of rules and reward model.
      length_mean: tokens a response.
      samples: the first responses, as dicts of prompt, response, score, correct.
    """

    accuracy: float | None
    reward_mean: float
    length_mean: float
    samples: list[dict]


def evaluate(
    sample: Callable, reward: Callable, batches: Iterable, mesh, key, keep: int = 0
) -> Evaluation:
    """Samples every batch and averages over its real rows.

    Args:
      sample: (prompts on the mesh, key, index of the first sample) -> Rollout.
      reward: (batch, rollout, keep) -> (scores [B], correct [B] with NaN for "no notion", samples), for all processes' rows.
      batches: PromptBatches of one size, of which the first `count` prompts are real.
      key: the same for every batch; samples are told apart by their index.
      keep: how many responses to return.
    """
    scores, correct, lengths, samples, first = [], [], [], [], 0
    for batch in batches:
        rollout: Rollout = sample(sharding.place(batch.prompts, sharding.rows(mesh)), key, first)
        batch_scores, batch_correct, batch_samples = reward(batch, rollout, keep - len(samples))
        real = len(batch_scores) // len(batch.examples) * batch.count
        scores.append(batch_scores[:real])
        correct.append(batch_correct[:real])
        lengths.append(sharding.to_host(rollout.lengths)[:real])
        samples += batch_samples[:real]
        first += len(batch_scores)
    correct = np.concatenate(correct)
    known = correct[~np.isnan(correct)]
    return Evaluation(
        float(known.mean()) if len(known) else None,
        float(np.concatenate(scores).mean()),
        float(np.concatenate(lengths).mean()),
        samples,
    )
