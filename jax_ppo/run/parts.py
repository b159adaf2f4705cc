"""The parts of a PPO run that stay the same from step to step; what changes is in `TrainState`."""

import dataclasses
from typing import Any

from jax_ppo.config.schema import Data
from jax_ppo.data.prompt_batches import PromptBatch, PromptBatches
from jax_ppo.data.sources import source_weights
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.ppo.forward_passes import ForwardOutputs, join_sequences, run_forward_passes
from jax_ppo.ppo.mini_batches import sample_lengths
from jax_ppo.ppo.step_parts import StepParts
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.training.networks import Folders
from jax_ppo.training.state import StateBuilder, TrainState
from jax_ppo.types import Rollout, Sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPORun(StepParts):
    """The parts of a run: the parts of a step, and what the run reads and writes around it."""

    states: StateBuilder  # makes the train state
    folders: Folders  # each role's checkpoint
    tokenizer: Any  # the actor's
    held_out: PromptDataset | None  # the prompts of evaluations; `None` without validation files
    held_out_sampling: SamplingOptions  # of evaluations (`rollout.val_kwargs`)

    def batches(self, position: int) -> PromptBatches:
        """Return the training batches that follow a position, in examples consumed."""
        return batches_in_order(self.config.data, self.config.seed, self.training, position)

    def run_forward_passes(
        self, state: TrainState, batch: PromptBatch, rollout: Rollout, **changes: Any
    ) -> tuple[Sequences, ForwardOutputs]:
        """Return the sequences of a batch and their outputs; `changes` replace `ForwardOptions`."""
        options = self.step_options
        sequences = join_sequences(rollout, options.config.sequence_length)
        forward = dataclasses.replace(options.forward, **changes)
        packed = self.packer.pack_rows(sample_lengths(batch, rollout))
        return sequences, run_forward_passes(forward, self.nets, state, sequences, packed)


def batches_in_order(
    data: Data, seed: int, training: PromptDataset, position: int = 0
) -> PromptBatches:
    """Return the batches that follow a position, in the order of the data or by its weights."""
    return PromptBatches(
        training,
        data.train_batch_size,
        data.shuffle,
        seed,
        position,
        weights=source_weights(data.train_files, "config.data.train_files"),
    )
