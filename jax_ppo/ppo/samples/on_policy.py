"""Sample the responses of a step from the newest weights, or take them from files."""

import contextlib
from collections.abc import Iterator

import jax

from jax_ppo.data.prompt_batches import PromptBatches
from jax_ppo.data.response_rows import GivenResponses
from jax_ppo.ppo.rewarding import given_rewards
from jax_ppo.ppo.samples.source import SampledBatch, SampleSource
from jax_ppo.ppo.step_parts import StepObserver, StepParts
from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.devices import release_freed_memory
from jax_ppo.sampler.engine import RolloutEngine
from jax_ppo.training.random_streams import training_stream
from jax_ppo.training.state import TrainState


class OnPolicySource(SampleSource):
    """Samples each step from the weights that it begins with."""

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Start sampling. See `SampleSource.take`."""
        return sample_batch(self._parts, state, self._batches, step, observer)


class GivenSource(SampleSource):
    """Takes the next rows of the responses in files; samples nothing."""

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Return the next rows, with their rewards if these are given, too."""
        mesh, dataset = self._parts.mesh, self._parts.training
        assert isinstance(dataset, GivenResponses), "the responses are given"
        batch = next(self._batches)
        layout = sharding.batch_rows(mesh, len(batch.examples))
        rollout = placement.place(dataset.rollout(batch), layout)
        rule_rewards = None
        if dataset.has_rewards:
            rule_rewards = given_rewards(mesh, dataset, batch, rollout)
        return SampledBatch(batch, rollout, self._batches.position, rule_rewards)


def sample_batch(
    parts: StepParts,
    state: TrainState,
    batches: PromptBatches,
    step: int,
    observer: StepObserver,
    draw: int = 0,
) -> SampledBatch:
    """Start sampling responses to the prompts of a step, without waiting for them.

    Then the observer writes the metrics of the last update that was dispatched: the actor is
    updated by the time that sampling starts. `draw` says which of the step's batches it is, from 0.
    """
    batch = next(batches)
    with newest_weights(parts, state, observer) as engine:
        prompts = parts.place_prompts(batch.prompts)
        key = parts.sample_keys(training_stream(draw), step)
        rollout = engine.generate(prompts, key, parts.sampling)
    return SampledBatch(batch, rollout, batches.position, weights_step=step)


@contextlib.contextmanager
def newest_weights(
    parts: StepParts, state: TrainState, observer: StepObserver
) -> Iterator[RolloutEngine]:
    """Return a context whose time counts for the rollout, with an engine that has the weights."""
    params = parts.policy_params(state)
    # GPUs and CPUs dispatch a loop by running it: the host waits for updates and samples anyway.
    if jax.default_backend() != "tpu":
        with observer.phase("update"):
            jax.block_until_ready((params, state))
    with observer.phase("rollout"):
        parts.engine.update_weights(params)
        del params  # with `actor.param_offload` a copy that only the engine reads
        yield parts.engine
    parts.engine.release_weights()  # the update needs the memory
    observer.write_pending_report()
    release_freed_memory(state)  # of the update before
