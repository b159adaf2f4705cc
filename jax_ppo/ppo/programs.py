"""The compiled programs of a step, compiled one at a time from shapes alone."""

import dataclasses
from collections.abc import Generator, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.ppo import forward_passes, update
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.experience_types import ExperienceOptions
from jax_ppo.ppo.rollout_packing import Plans, ScoringPlan
from jax_ppo.ppo.sample_selection import compile_selection
from jax_ppo.runtime import sharding
from jax_ppo.runtime.compilation import compile_ahead
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.training.networks import Networks, full_parameters
from jax_ppo.training.state import TrainState, policy_params
from jax_ppo.types import Experience, Prompts, Rollout, Sequences

# The programs of a step in their order, and the titles that the user sees.
TITLES = {
    "prepare_weights": "decoding weights",
    "sample": "sampling",
    "score_policy": "scoring, policy",
    "score_critic": "scoring, critic",
    "score_reward": "scoring, reward",
    "estimate": "advantages",
    "update_actor": "update, actor",
    "update_critic": "update, critic",
}

# Those that a step dispatches together: a single CPU runs them at the same time.
TOGETHER = (("score_policy", "score_critic"), ("update_actor", "update_critic"))


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """The inputs that determine the programs of a step: no data, tokenizer or weights.

    Attributes:
      config: all options.
      mesh: the mesh to compile for.
      nets: each role's model.
      engine: generates responses.
      sampling: how it samples for training.
      total_steps: number of steps of the whole run.
      reads_rollout: whether the reward model, if there is one, reads the sampled tokens; the shapes
        of its own tokens depend on the texts.
    """

    config: Config
    mesh: Mesh
    nets: Networks
    engine: RolloutEngine
    sampling: SamplingOptions
    total_steps: int
    reads_rollout: bool

    @property
    def samples(self) -> int:
        """Return the number of samples that a step learns from."""
        return self.config.data.train_batch_size * self.config.responses_per_prompt


def compile_programs(
    step: StepPrograms, state: TrainState, prompts: Prompts, key: jax.Array, plans: Plans
) -> Iterator[str]:
    """Compile one program at a time, in the order of the loop, and yield its name.

    The shapes that one program returns are the arguments of the next. Everything but `step` may be
    arrays or shapes with shardings.

    Args:
      step: what the programs depend on.
      state: the train state.
      prompts: the prompts of a step.
      key: the base key of a step's samples.
      plans: the packing of a rollout.
    """
    config = step.config
    nets = step.nets
    params = policy_params(nets, state)
    rollout = yield from step.engine.precompile(params, prompts, key, step.sampling)
    if config.selects_samples:
        rollout = compile_selection(step.mesh, config, rollout)
        yield "select"
    sequences = compile_ahead(forward_passes.join_sequences, rollout, config.sequence_length)
    scores = yield from _compile_scoring(step, state, sequences, plans.scoring)
    experience = _compile_experience(step, state, sequences, rollout, scores)
    yield "estimate"
    updates = update.update_programs(
        update.UpdateOptions.from_config(config),
        nets,
        step.total_steps,
        state,
        experience,
        plans.actor,
        plans.critic,
    )
    # The second, if there is one, is that of a separate critic.
    for role, (function, arguments) in zip(("actor", "critic"), updates, strict=False):
        compile_ahead(function, *arguments)
        yield f"update_{role}"


def _compile_scoring(
    step: StepPrograms, state: TrainState, sequences: Sequences, plan: ScoringPlan
) -> Generator[str, None, forward_passes.Scores]:
    """Compile the scoring passes, yield their names, and return the shapes of the scores."""
    nets = step.nets
    options = forward_passes.ScoringOptions.from_config(step.config)
    programs = forward_passes.scoring_programs(options, nets, state, sequences, *plan)
    scores = []
    for part, (function, arguments) in zip(options.parts, programs, strict=True):
        scores.append(compile_ahead(function, *arguments))
        yield f"score_{part}"
    if nets.reward is not None and step.reads_rollout:
        reward_params = full_parameters(nets.reward, state.reward, state.reference)
        compile_ahead(
            forward_passes.reward_model_scores,
            nets.reward,
            reward_params,
            sequences,
            *plan,
            step.config.reward.score_position,
        )
        yield "score_reward"
    return forward_passes.join_scores(scores)


def _compile_experience(
    step: StepPrograms,
    state: TrainState,
    sequences: Sequences,
    rollout: Rollout,
    scores: forward_passes.Scores,
) -> Experience:
    """Compile the estimation of advantages, and return the shapes of the experience."""
    # Rewards arrive from the host, so no program's result has their shape.
    rows = sharding.batch_rows(step.mesh, step.samples)
    rewards = jax.ShapeDtypeStruct((step.samples,), jnp.float32, sharding=rows)
    step_rewards = None
    if step.config.has_step_rewards:
        step_rewards = jax.ShapeDtypeStruct(rollout.logprobs.shape, jnp.float32, sharding=rows)
    experience: Experience = compile_ahead(
        estimate_experience,
        ExperienceOptions.from_config(step.config),
        state.control,
        sequences,
        rollout.logprobs,
        scores,
        rewards,
        step_rewards,
    )[0]
    return experience
