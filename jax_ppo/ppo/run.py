"""The parts of a PPO run that stay the same from step to step; what changes is in `TrainState`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.data import prompt_batches
from jax_ppo.data.prompt_batches import PromptBatch, PromptBatches
from jax_ppo.data.prompts import PromptDataset
from jax_ppo.data.sources import source_weights
from jax_ppo.ppo.curriculum import CurriculumBatches, SolveRates
from jax_ppo.ppo.plans import RolloutPlanner
from jax_ppo.ppo.random_keys import SampleKeys
from jax_ppo.ppo.rewarding import RuleScorer
from jax_ppo.runtime import placement, sharding
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.training.networks import Folders, Networks
from jax_ppo.training.state import TrainState, policy_params
from jax_ppo.types import Params, Prompts


@dataclasses.dataclass(frozen=True)
class PPORun:
    """The parts of a run.

    Attributes:
      config: all options.
      mesh: the run's mesh.
      folders: each role's checkpoint.
      nets: each role's model.
      tokenizer: the actor's.
      training: the prompts that the actor is trained on.
      held_out: the prompts of evaluations; `None` without validation files.
      total_steps: number of steps of the whole run; 0 where nothing is trained.
      engine: generates responses, with the parameters that `policy_params` returns.
      sampling: how it samples for training (`rollout`).
      held_out_sampling: how it samples in evaluations (`rollout.val_kwargs`).
      sample_keys: the random keys of samples.
      planner: plans how rollouts are packed.
      rules: scores responses.
    """

    config: Config
    mesh: Mesh
    folders: Folders
    nets: Networks
    tokenizer: Any
    training: PromptDataset
    held_out: PromptDataset | None
    total_steps: int
    engine: RolloutEngine
    sampling: SamplingOptions
    held_out_sampling: SamplingOptions
    sample_keys: SampleKeys
    planner: RolloutPlanner
    rules: RuleScorer

    def batches(
        self, position: int, solve_rates: SolveRates | None = None
    ) -> PromptBatches | CurriculumBatches:
        """Return the training batches that follow a position.

        Args:
          position: examples consumed.
          solve_rates: those at that position, for `data.curriculum`, which updates them in place.
            `None` follows the order of the data.
        """
        data = self.config.data
        if data.curriculum == "none" or solve_rates is None:
            return batches_in_order(self.config, self.training, position)
        return CurriculumBatches(
            dataset=self.training,
            batch_size=data.train_batch_size,
            seed=self.config.seed,
            position=position,
            solve_rates=solve_rates,
        )

    def held_out_batches(self) -> Iterator[PromptBatch]:
        """Return the batches of an evaluation."""
        assert self.held_out is not None, "there are no validation files"
        return prompt_batches.evaluation_batches(self.held_out, self.config.data.val_batch_size)

    def place_prompts(self, prompts: Prompts) -> Prompts:
        """Return the prompts on the mesh, their rows split if the devices divide them."""
        return placement.place(prompts, sharding.batch_rows(self.mesh, len(prompts.lengths)))

    def policy_params(self, state: TrainState) -> Params:
        """Return the parameters that the policy samples with."""
        return policy_params(self.nets, state)


def batches_in_order(config: Config, training: PromptDataset, position: int) -> PromptBatches:
    """Return the batches that follow a position, in the order of the data or by its weights."""
    data = config.data
    return PromptBatches(
        training,
        data.train_batch_size,
        data.shuffle,
        config.seed,
        position,
        weights=source_weights(data.train_files, "config.data.train_files"),
    )
