"""The responses to the prompts of a step."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.types import Rollout


class SampledBatch(NamedTuple):
    """Prompts with their responses, which may still be being sampled.

    Attributes:
      batch: the prompts.
      rollout: the responses.
      position: training examples consumed with this batch.
      rule_rewards: the rewards of the rules, if they are known already.
      metrics: how the samples were selected.
      addresses: int [B, 2], the draw of each sample within its step and its row in that draw;
        `None`: all samples are those of the first draw.
    """

    batch: PromptBatch
    rollout: Rollout
    position: int
    rule_rewards: RuleRewards | None = None
    metrics: Mapping[str, float] = {}
    addresses: np.ndarray | None = None
