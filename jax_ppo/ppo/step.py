"""One PPO step, from prompts to new parameters (Schulman et al. 2017, arXiv 1707.06347).

Sample responses, compute log-probs and values, apply the rewards, estimate advantages, update actor
and critic. The host must wait for the mesh once per step, for the sampled tokens that the rules
score. Where it also waits to time a phase, the mesh already has its next work.
"""

import dataclasses
from typing import NamedTuple

import jax

from jax_ppo.data.response_rows import GivenResponses
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.forward_passes import join_sequences, run_forward_passes
from jax_ppo.ppo.mini_batches import RolloutPacking, sample_lengths
from jax_ppo.ppo.response_sampling import (
    observe_solve_rates,
    sample_batch,
    sample_selected_batch,
    take_given_batch,
)
from jax_ppo.ppo.rewarding import RuleRewards, add_reward_model_scores
from jax_ppo.ppo.step_parts import SampledBatch, StepObserver, StepParts, TrainingBatches
from jax_ppo.ppo.update import update_state
from jax_ppo.runtime.devices import release_freed_memory
from jax_ppo.training.state import TrainState
from jax_ppo.types import Experience


class StepResult(NamedTuple):
    """The results of a step besides the new state.

    Attributes:
      sampled: the samples that the step learned from.
      next_sampled: the samples of the next step in a run one step off; `None` otherwise.
      packed: how the samples are packed.
      experience: what the update learned from each token.
      rule_rewards: the rewards of the rules.
      rewards: float32 [B], the rules' scores plus the reward model's.
      metrics: the metrics of experience and update, on the mesh.
    """

    sampled: SampledBatch
    next_sampled: SampledBatch | None
    packed: RolloutPacking
    experience: Experience
    rule_rewards: RuleRewards
    rewards: jax.Array
    metrics: dict[str, jax.Array]


def take_step(
    parts: StepParts,
    state: TrainState,
    batches: TrainingBatches,
    step: int,
    sampled: SampledBatch | None,
    observer: StepObserver,
) -> tuple[TrainState, StepResult]:
    """Take one step.

    Args:
      parts: what the step computes with.
      state: the train state; donated.
      batches: yields the prompts.
      step: the step, from 0.
      sampled: its samples, if the step before has sampled them already.
      observer: follows what the host does.

    Returns:
      The new state, and what else the step leaves. Both may still be being computed.
    """
    options = parts.step_options
    nets = parts.nets

    # 1. Sample responses.
    if sampled is None:
        sampled = sample_responses(parts, state, batches, step, observer)
    # The lengths of the responses decide how they are packed: the one wait of a step.
    with observer.phase("rollout"):
        lengths = sample_lengths(sampled.batch, sampled.rollout)
        packed = parts.packer.pack(step, lengths)

    # 2. Compute log-probs under policy and reference, and values; nothing is waited for.
    sequences = join_sequences(sampled.rollout, options.sequence_length)
    with observer.phase("score"):
        outputs = run_forward_passes(options.forward, nets, state, sequences, *packed.forward)
    # One step off: sample with the weights from before this step's update. The options
    # exclude that samples are then selected by their rewards.
    next_sampled = None
    if options.one_step_off and step + 1 < parts.total_steps:
        next_sampled = sample_batch(parts, state, batches, step + 1, observer)
    observer.flush()  # has nothing left to write if sampling ahead has just flushed

    # 3. Apply the rules on the host while the mesh computes; add a reward model's scores.
    with observer.phase("reward"):
        rule_rewards = apply_rules(parts, sampled, batches)
    rewards = add_reward_model_scores(
        nets,
        state,
        rule_rewards.scores,
        rule_rewards.model_inputs or (sequences, *packed.forward),
        options.score_position,
        parts.rules.model_weight,
    )

    # 4. Estimate advantages and returns.
    experience, metrics = estimate_experience(
        options.experience,
        state.control,
        sequences,
        sampled.rollout.logprobs,
        outputs,
        rewards,
        rule_rewards.steps,
        rule_rewards.extra_scores,
    )

    # 5. Update actor and critic, which takes over the buffers of `state`.
    with observer.phase("update"):
        state, update_metrics = update_state(
            options.update,
            nets,
            parts.total_steps,
            state,
            experience,
            packed.actor,
            packed.critic,
        )
    # The mesh has the update to do next: timing the forward passes leaves no gap.
    with observer.phase("score"):
        jax.block_until_ready(outputs)
    # On CPUs: the update needs the memory that rollout and forward passes have freed.
    release_freed_memory(state)

    return state, StepResult(
        sampled=sampled,
        next_sampled=next_sampled,
        packed=packed,
        experience=experience,
        rule_rewards=rule_rewards,
        rewards=rewards,
        metrics=metrics | update_metrics,
    )


def sample_responses(
    parts: StepParts,
    state: TrainState,
    batches: TrainingBatches,
    step: int,
    observer: StepObserver,
) -> SampledBatch:
    """Return the samples of a step: given ones, or selected by their rewards if so configured."""
    training, options = parts.training, parts.step_options
    if isinstance(training, GivenResponses) and not options.samples_in(step):
        return take_given_batch(parts, training, batches)
    if options.selects_samples:
        return sample_selected_batch(parts, state, batches, step, observer)
    return sample_batch(parts, state, batches, step, observer)


def apply_rules(parts: StepParts, sampled: SampledBatch, batches: TrainingBatches) -> RuleRewards:
    """Return the rules' rewards of a batch, and update the solve rates of its prompts.

    Samples that were selected by their rewards are scored already, and their prompts observed.
    """
    if sampled.rule_rewards is not None:
        return sampled.rule_rewards
    rule_rewards = parts.rules.score(sampled.batch, sampled.rollout)
    observe_solve_rates(batches, sampled.batch, rule_rewards)
    if sampled.greedy is not None:
        baselines = parts.rules.score(sampled.batch, sampled.greedy).scores
        rule_rewards = dataclasses.replace(rule_rewards, extra_scores=baselines)
    return rule_rewards
