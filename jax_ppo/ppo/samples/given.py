"""Take the responses of a step from files."""

from jax_ppo.data.prompt_batches import PromptBatches
from jax_ppo.data.response_rows import GivenResponses
from jax_ppo.ppo.rewarding import given_rewards
from jax_ppo.ppo.samples.source import IndependentSource, SampledBatch
from jax_ppo.ppo.step_parts import StepObserver, StepParts
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.state import TrainState


class GivenSource(IndependentSource):
    """Takes the next rows of the responses in files; samples nothing."""

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Return the next rows. See `SampleSource.take`."""
        return take_given_batch(self._parts, self._batches)


def take_given_batch(parts: StepParts, batches: PromptBatches) -> SampledBatch:
    """Return the given responses of a step, with their rewards if these are given, too."""
    dataset = parts.training
    assert isinstance(dataset, GivenResponses), "the responses are given"
    batch = next(batches)
    rollout = placement.place(
        dataset.rollout(batch), sharding.batch_rows(parts.mesh, len(batch.examples))
    )
    rule_rewards = None
    if dataset.has_rewards:
        rule_rewards = given_rewards(parts.mesh, dataset, batch, rollout)
    return SampledBatch(batch, rollout, batches.position, rule_rewards)
