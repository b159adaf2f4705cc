"""One PPO step, from prompts to new parameters (Schulman et al. 2017, arXiv 1707.06347).

    1. Sample responses                      samples/, one file for each way
    2. Compute log-probs and values          forward_passes.py
    3. Apply the rewards                     rewarding.py
    4. Estimate advantages                   experience.py, advantages.py
    5. Update actor and critic               update.py; its loops: training/learner.py;
                                             its losses: objectives.py, kernels/losses.py

The host must wait for the mesh once per step: packing needs the lengths of the sampled responses.
It also waits to time the forward passes, but only after the update has been dispatched, so that the
mesh does not idle.
"""

from typing import NamedTuple

import jax

from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.forward_passes import ForwardOutputs, join_sequences, run_forward_passes
from jax_ppo.ppo.mini_batches import RolloutPacking, sample_lengths
from jax_ppo.ppo.reward_inputs import ModelInputs
from jax_ppo.ppo.reward_shaping import EarnedRewards
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.ppo.samples.source import SampledBatch, SampleSource
from jax_ppo.ppo.step_parts import StepObserver, StepParts
from jax_ppo.ppo.update import UpdateSetup, update_state
from jax_ppo.runtime.devices import release_freed_memory
from jax_ppo.training.state import TrainState
from jax_ppo.types import Experience


class StepResult(NamedTuple):
    """The results of a step besides the new state."""

    sampled: SampledBatch  # the samples that the step learned from
    packed: RolloutPacking  # the packed rows and mini-batches of the samples
    experience: Experience  # the update's data about each token
    rule_rewards: RuleRewards
    rewards: jax.Array  # float32 [B], the rules' scores plus the weighted ones of the reward model
    metrics: dict[str, jax.Array]  # the metrics of experience and update, on the mesh


def take_ppo_step(
    parts: StepParts, state: TrainState, samples: SampleSource, step: int, observer: StepObserver
) -> tuple[TrainState, StepResult]:
    """Take one step, numbered from 0, donating the state; the mesh may still be computing."""
    # 1. Sample responses, wait for their lengths, and pack them into rows.
    sampled = samples.take(state, step, observer)
    with observer.phase("rollout"):
        packed = parts.packer.pack(step, sample_lengths(sampled.batch, sampled.rollout))

    # 2. Start computing values, and log-probs under policy and reference; do not wait for them.
    sequences = join_sequences(sampled.rollout, parts.config.sequence_length)
    with observer.phase("forward"):
        outputs = run_forward_passes(
            parts.step_options.forward, parts.nets, state, sequences, packed.forward
        )

    # A source that samples one step ahead starts on the next step's samples here.
    samples.begin_next(state, step, observer)

    # 3. Apply the rules on the host while the mesh computes, then add a reward model's scores.
    inputs = (sequences, packed.forward)
    rule_rewards, rewards = apply_rewards(parts, state, sampled, inputs, observer)

    # 4. Estimate advantages and returns.
    experience, metrics = estimate_experience(
        parts.step_options.experience,
        state.control,
        sequences,
        sampled.rollout.logprobs,
        outputs,
        EarnedRewards(rewards, rule_rewards.steps, rule_rewards.figures),
    )

    # 5. Update actor and critic. This donates the buffers of `state`.
    state, update_metrics = update_models(parts, state, experience, packed, outputs, observer)

    metrics |= update_metrics
    return state, StepResult(sampled, packed, experience, rule_rewards, rewards, metrics)


def apply_rewards(
    parts: StepParts,
    state: TrainState,
    sampled: SampledBatch,
    inputs: ModelInputs,
    observer: StepObserver,
) -> tuple[RuleRewards, jax.Array]:
    """Return the rules' rewards, and each sample's total: rules plus the weighted reward model.

    Rules do not score samples again that come with rewards (selected by reward, or from files).
    """
    observer.write_pending_report()  # usually the last step's, while the mesh is busy
    with observer.phase("reward"):
        rule_rewards = sampled.rule_rewards
        if rule_rewards is None:
            rule_rewards = parts.rules.score(sampled.batch, sampled.rollout)
    return rule_rewards, parts.rules.add_model_scores(parts.nets, state, rule_rewards, inputs)


def update_models(
    parts: StepParts,
    state: TrainState,
    experience: Experience,
    packed: RolloutPacking,
    outputs: ForwardOutputs,
    observer: StepObserver,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Dispatch the update, then wait for the outputs of the forward passes."""
    with observer.phase("update"):
        setup = UpdateSetup(parts.step_options.update, parts.nets, parts.total_steps)
        state, metrics = update_state(setup, state, experience, packed.mini_batches)
    # The update is already dispatched, so waiting for the forward passes does not idle the mesh.
    with observer.phase("forward"):
        jax.block_until_ready(outputs)
    # CPUs only: the update needs the memory that the rollout and the forward passes have freed.
    release_freed_memory(state)
    return state, metrics
