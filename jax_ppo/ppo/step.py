"""One PPO step, from prompts to new parameters (Schulman et al. 2017, arXiv 1707.06347).

    1. Sample responses                      response_sampling.py
    2. Compute log-probs and values          forward_passes.py
    3. Apply the rewards                     rewarding.py
    4. Estimate advantages                   experience.py, advantages.py
    5. Update actor and critic               update.py, its loops in training/learner.py,
                                             its losses in objectives.py and kernels/losses.py

The host must wait for the mesh once per step: packing needs the lengths of the sampled responses.
It also waits to time the forward passes, but only after the update has been dispatched, so that the
mesh does not idle.
"""

from typing import NamedTuple

import jax

from jax_ppo.data.response_rows import GivenResponses
from jax_ppo.ppo.exact_rollouts import draw_exactly
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.forward_passes import join_sequences, run_forward_passes
from jax_ppo.ppo.mini_batches import RolloutPacking, sample_lengths
from jax_ppo.ppo.partial_rollouts import sample_partial_batch
from jax_ppo.ppo.response_sampling import (
    observe_solve_rates,
    sample_batch,
    sample_beside_update,
    sample_selected_batch,
    take_given_batch,
)
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.ppo.step_parts import (
    CarriedOver,
    SampledBatch,
    StepObserver,
    StepParts,
    TrainingBatches,
    wait_for,
)
from jax_ppo.ppo.update import UpdateSetup, update_state
from jax_ppo.runtime.devices import release_freed_memory
from jax_ppo.sampler.other_mesh import SeparateEngine
from jax_ppo.training.state import TrainState
from jax_ppo.types import Experience


class StepResult(NamedTuple):
    """The results of a step besides the new state."""

    sampled: SampledBatch  # the samples that the step learned from
    # What the next step starts from: with `rollout.max_staleness` its samples, or unfinished
    # responses; `None` without.
    carried_over: CarriedOver | None
    packed: RolloutPacking  # the packed rows and mini-batches of the samples
    experience: Experience  # what the update learned from each token
    rule_rewards: RuleRewards
    rewards: jax.Array  # float32 [B], the rules' scores plus the weighted ones of the reward model
    metrics: dict[str, jax.Array]  # the metrics of experience and update, on the mesh


def take_ppo_step(
    parts: StepParts,
    state: TrainState,
    batches: TrainingBatches,
    step: int,
    carried_over: CarriedOver | None,
    observer: StepObserver,
) -> tuple[TrainState, StepResult]:
    """Take one step, numbered from 0; the train state is donated.

    `carried_over` is what the previous step left: samples (`SampledBatch`), unfinished responses
    (`ResponsePool`), or `None`.

    Returns:
      The new state and the other results. The mesh may still be computing both.
    """
    options, nets = parts.step_options, parts.nets

    # 1. Sample responses.
    sampled = sample_responses(parts, state, batches, step, observer, carried_over)
    if options.rollout.exact:
        sampled = draw_exactly(parts, state, sampled, step, observer)
    # Wait for the lengths of the responses, which the packing depends on.
    with observer.phase("rollout"):
        lengths = sample_lengths(sampled.batch, sampled.rollout)
        packed = parts.packer.pack(step, lengths)
    # With max_staleness = 1, the samples of the next step come from the weights before this step's
    # update; devices that only decode begin now. With more, unfinished responses continue.
    # Validation forbids selecting samples by reward in such runs.
    to_next_step: CarriedOver | None = sampled.pool
    samples_ahead = options.rollout.max_staleness == 1 and step + 1 < parts.total_steps
    is_separate = isinstance(parts.engine, SeparateEngine)
    if samples_ahead and is_separate:
        to_next_step = sample_beside_update(parts, state, batches, step, observer)

    # 2. Compute log-probs under policy and reference, and values, without waiting for them.
    sequences = join_sequences(sampled.rollout, options.sequence_length)
    with observer.phase("forward"):
        outputs = run_forward_passes(options.forward, nets, state, sequences, *packed.forward)
    if samples_ahead and not is_separate:
        ahead = sample_batch(parts, state, batches, step + 1, observer)
        to_next_step = ahead._replace(weights_step=step)
    observer.write_pending_report()  # nothing is pending if `sample_batch` has written it

    # 3. Apply the rules on the host while the mesh computes, then add a reward model's scores.
    with observer.phase("reward"):
        rule_rewards = apply_rules(parts, sampled, batches)
    rewards = parts.rules.add_model_scores(nets, state, rule_rewards, (sequences, *packed.forward))

    # 4. Estimate advantages and returns.
    experience, metrics = estimate_experience(
        options.experience,
        state.control,
        sequences,
        sampled.rollout.logprobs,
        outputs,
        rewards,
        rule_rewards.steps,
        rule_rewards.figures,
    )

    # 5. Update actor and critic. This donates the buffers of `state`.
    with observer.phase("update"):
        setup = UpdateSetup(options.update, nets, parts.total_steps)
        state, update_metrics = update_state(setup, state, experience, packed.mini_batches)
    # The update is already dispatched, so waiting for the forward passes does not idle the mesh.
    with observer.phase("forward"):
        jax.block_until_ready(outputs)
    # On CPUs: the update needs the memory that rollout and forward passes have freed.
    release_freed_memory(state)

    return state, StepResult(
        sampled=sampled,
        carried_over=to_next_step,
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
    carried_over: CarriedOver | None,
) -> SampledBatch:
    """Return the samples of a step: carried over, given, or sampled now and perhaps selected."""
    training, options = parts.training, parts.step_options
    with observer.phase("rollout"):
        carried_over = wait_for(carried_over)  # devices that only decode may still work on it
    if options.rollout.max_staleness > 1:
        assert not isinstance(carried_over, SampledBatch), "it is a pool"
        return sample_partial_batch(parts, state, batches, step, observer, carried_over)
    if carried_over is not None:
        assert isinstance(carried_over, SampledBatch), "it is a batch"
        return carried_over
    if isinstance(training, GivenResponses):
        return take_given_batch(parts, training, batches)
    sample = sample_selected_batch if options.selects_samples else sample_batch
    return sample(parts, state, batches, step, observer)._replace(weights_step=step)


def apply_rules(parts: StepParts, sampled: SampledBatch, batches: TrainingBatches) -> RuleRewards:
    """Return the rules' rewards of a batch, and update the solve rates of its prompts.

    Samples whose rewards are known (selected by reward, or read with them) are not scored again.
    """
    if sampled.rule_rewards is not None:
        return sampled.rule_rewards
    rule_rewards = parts.rules.score(sampled.batch, sampled.rollout)
    observe_solve_rates(batches, sampled.batch, rule_rewards)
    return rule_rewards
