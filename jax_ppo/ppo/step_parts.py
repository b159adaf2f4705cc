"""What a PPO step computes with."""

import contextlib
import dataclasses
from typing import Protocol

from jax.sharding import Mesh

from jax_ppo.config.schema import Config, RolloutOptions
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.ppo.forward_passes import ForwardOptions
from jax_ppo.ppo.mini_batches import RolloutPacker
from jax_ppo.ppo.objectives import UpdateOptions
from jax_ppo.ppo.reward_shaping import ExperienceOptions
from jax_ppo.ppo.rewarding import RuleScorer
from jax_ppo.runtime import placement, sharding
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.training.networks import Networks
from jax_ppo.training.random_streams import SampleKeys
from jax_ppo.training.state import TrainState, policy_params
from jax_ppo.types import Params, Prompts


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a step."""

    forward: ForwardOptions
    experience: ExperienceOptions
    update: UpdateOptions
    prompts_per_step: int  # how many prompts a step takes
    sequence_length: int  # S, tokens of the longest prompt and response together
    rollout: RolloutOptions
    responses_per_prompt: int  # how many responses to each prompt the update learns from
    selects_samples: bool  # whether rewards decide which samples the update learns from
    has_step_rewards: bool  # rewards are also earned within responses
    reads_responses: bool  # responses are read from files, and none is sampled for training
    trains_actor: bool  # False trains the critic alone

    @classmethod
    def from_config(cls, config: Config) -> "StepOptions":
        """Collect the options from all sections."""
        return cls(
            forward=ForwardOptions.from_config(config),
            experience=ExperienceOptions.from_config(config),
            update=UpdateOptions.from_config(config),
            prompts_per_step=config.data.train_batch_size,
            sequence_length=config.sequence_length,
            rollout=config.rollout,
            responses_per_prompt=config.responses_per_prompt,
            selects_samples=config.selects_samples,
            has_step_rewards=config.has_step_rewards,
            reads_responses=config.learns_from_files,
            trains_actor=not config.trainer.critic_only,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a step that stay the same from step to step; what changes is in `TrainState`."""

    step_options: StepOptions
    mesh: Mesh
    nets: Networks  # each role's model
    engine: RolloutEngine  # generates responses, with the parameters that `policy_params` returns
    sampling: SamplingOptions  # how it samples for training (`rollout`)
    total_steps: int  # number of steps of the whole run; 0 where nothing is trained
    # Whether the reward model, if there is one, reads the sampled tokens; the shapes of its own
    # tokens depend on the texts.
    reads_rollout: bool

    training: PromptDataset  # the prompts that the actor is trained on
    sample_keys: SampleKeys  # the random keys of samples
    packer: RolloutPacker
    rules: RuleScorer

    @property
    def samples(self) -> int:
        """Return the number of samples that a step learns from."""
        return self.step_options.prompts_per_step * self.step_options.responses_per_prompt

    def place_prompts(self, prompts: Prompts) -> Prompts:
        """Return the prompts on the mesh, their rows split if the devices divide them."""
        return placement.place(prompts, sharding.batch_rows(self.mesh, len(prompts.lengths)))

    def policy_params(self, state: TrainState) -> Params:
        """Return the parameters that the policy samples with."""
        return policy_params(self.nets, state)


class StepObserver(Protocol):
    """Follows what the host does in a step."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a context whose time counts for a phase."""

    def write_pending_report(self) -> None:
        """Write what is pending; called where the mesh works and the host has time."""
