"""The contract between a PPO step and what gives it samples."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from jax_ppo.data.prompt_batches import PromptBatch, PromptBatches
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.ppo.samples.checkpointing import describe_skipped_samples
from jax_ppo.ppo.step_parts import StepObserver, StepParts
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress
from jax_ppo.training.state import TrainState
from jax_ppo.types import Rollout


class SampledBatch(NamedTuple):
    """Prompts with their responses, which may still be being sampled."""

    batch: PromptBatch
    rollout: Rollout
    position: int  # training examples consumed with this batch
    rule_rewards: RuleRewards | None = None  # the rewards of the rules, if they are known already
    metrics: Mapping[str, float] = {}  # how the samples were drawn
    # int [B] each, what identifies the samples' random numbers by name, such as the "draw" of the
    # step and the "sample" in it; `None` if the step has a single draw.
    addresses: Mapping[str, np.ndarray] | None = None
    # The step that began with the weights that sampled the responses; `None` if these are given, or
    # if `rollout.versions` says it.
    weights_step: int | None = None
    note: str = ""  # a line for the user


class SampleSource(Protocol):
    """Gives each step its samples, and knows what it leaves to the next one."""

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Return the samples of a step, numbered from 0, without waiting for them if possible."""

    def begin_next(self, state: TrainState, step: int, observer: StepObserver) -> None:
        """Begin the samples of the next step; called in `step` where devices would idle."""

    def checkpoint_trees(self) -> dict[str, Any]:
        """Return what the next step starts from as trees of arrays, by their names."""

    def restore(self, checkpoints: Checkpointer, progress: Progress) -> list[str]:
        """Take over what a checkpoint holds for the next step; return lines for the user."""


class IndependentSource:
    """A source that leaves nothing to the next step."""

    def __init__(self, parts: StepParts, batches: PromptBatches) -> None:
        """Take the parts of a step, and the prompts of the next steps."""
        self._parts = parts
        self._batches = batches

    def begin_next(self, state: TrainState, step: int, observer: StepObserver) -> None:
        """Do nothing."""

    def checkpoint_trees(self) -> dict[str, Any]:
        """Return no tree."""
        return {}

    def restore(self, checkpoints: Checkpointer, progress: Progress) -> list[str]:
        """Return lines about the samples of the checkpoint, which are not used."""
        return describe_skipped_samples(checkpoints, progress.step)
