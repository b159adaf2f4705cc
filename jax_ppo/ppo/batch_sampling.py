"""Sample responses to the prompts of a step."""

import jax

from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.ppo.algorithm import Algorithm, SampledBatch, StepObserver, TrainingBatches
from jax_ppo.ppo.curriculum import CurriculumBatches
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.ppo.sample_keys import training_stream
from jax_ppo.runtime import placement
from jax_ppo.runtime.device_memory import release_freed_memory
from jax_ppo.training.state import TrainState


def sample_batch(
    algorithm: Algorithm,
    state: TrainState,
    batches: TrainingBatches,
    step: int,
    observer: StepObserver,
    draw: int = 0,
) -> SampledBatch:
    """Start sampling responses to the prompts of a step, without waiting for them.

    Then let the observer write the metrics of the last update that was dispatched: the actor is
    updated by the time that sampling starts. (On one CPU device the critic may still be learning
    beside it.) When sampling one step ahead, that is the update of the step before the current one,
    and its row includes what the host waited for in between.

    Args:
      algorithm: what the step computes with.
      state: holds the policy.
      batches: yields the prompts.
      step: the step, from 0.
      observer: follows what the host does.
      draw: which of the step's batches, from 0.
    """
    batch = next(batches)
    params = algorithm.policy_params(state)
    # GPUs and CPUs dispatch a loop by running it: the host waits here in any case, first for the
    # actor's update and then for the samples.
    if jax.default_backend() != "tpu":
        with observer.phase("update"):
            jax.block_until_ready(params)
    with observer.phase("rollout"):
        algorithm.engine.update_weights(params)
        rollout = algorithm.engine.generate(
            algorithm.place_prompts(batch.prompts),
            algorithm.sample_keys(training_stream(draw), step),
            algorithm.sampling,
        )
    algorithm.engine.release_weights()  # the update needs the memory
    observer.flush()
    release_freed_memory(state)  # of the update before
    return SampledBatch(batch=batch, rollout=rollout, position=batches.position)


def observe_solve_rates(batches: TrainingBatches, batch: PromptBatch, rewards: RuleRewards) -> None:
    """Update the solve rates of the prompts, if the batches are drawn by them.

    Raises:
      UserError: the rule does not define correctness.
    """
    # A step without any score says nothing of the rule; the run counts such steps.
    all_failed = rewards.failures == rewards.scored
    if isinstance(batches, CurriculumBatches) and not all_failed:
        batches.observe(batch.indices, placement.to_host(rewards.correct))
