"""Sample the next step's responses before the update of this one (`rollout.max_staleness=1`)."""

from typing import Any

import jax
import numpy as np

from jax_ppo.ppo.samples.on_policy import sample_batch
from jax_ppo.ppo.samples.source import (
    ROLLOUT,
    SampledBatch,
    SampleSource,
    are_rows,
    lay_out,
    read_rollout,
    rollout_arrays,
)
from jax_ppo.ppo.step_parts import StepObserver
from jax_ppo.sampler.other_mesh import SeparateEngine
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.random_streams import training_stream
from jax_ppo.training.state import TrainState


class OneStepAheadSource(SampleSource):
    """Samples each step but the first from the weights before the last update.

    A checkpoint holds the batch: its weights are one update newer than those that sampled it.
    """

    tree_name = ROLLOUT

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Return what the step before has begun. See `SampleSource.take`."""
        if self._await_left is None:
            return sample_batch(self._parts, state, self._batches, step, observer)
        with observer.phase("rollout"):
            sampled = self._await_left()
        self._await_left = None
        return sampled

    def begin_next(self, state: TrainState, step: int, observer: StepObserver) -> None:
        """Sample the next step, unless this is the last one."""
        if step + 1 < self._parts.total_steps:
            ahead = sample_batch(self._parts, state, self._batches, step + 1, observer)
            ahead = ahead._replace(weights_step=step)
            self._await_left = lambda: ahead

    def as_tree(self, left: SampledBatch) -> dict[str, Any]:
        """Return the rollout of the next step; its prompts are the next ones of the data."""
        return rollout_arrays(left.rollout)

    def read_tree(
        self, saved: dict[str, Any], checkpoints: Checkpointer, step: int
    ) -> SampledBatch | None:
        """Return the batch that a run had sampled ahead. See `SampleSource.read_tree`."""
        parts, batches, options = self._parts, self._batches, self._parts.sampling
        position, n = batches.position, parts.config.rollout.n
        samples = parts.config.data.train_batch_size * n
        has_turns = options.environment is not None
        optional = {
            "routed_experts": options.returns_routed_experts,
            "turn_rewards": has_turns,
            "turn_starts": has_turns,
        }
        fits = saved["responses"].shape == (samples, options.max_response_length)
        if not fits or optional != {name: name in saved for name in optional}:
            return None
        # `slot_steps` has one number per queue of the decoder, and this mesh may have others.
        shapes = lay_out(saved, parts.mesh, samples, replicated="slot_steps")
        arrays = checkpoints.restore(step, {ROLLOUT: shapes}).arrays[ROLLOUT]
        rollout = read_rollout(arrays, step)
        batch = next(batches)
        if not are_rows(rollout.prompts, np.repeat(batch.indices, n), parts.training):
            batches.position = position
            return None
        # Sampled during the last completed step.
        return SampledBatch(batch, rollout, batches.position, weights_step=step - 1)


class BesideUpdateSource(OneStepAheadSource):
    """Samples the next step on devices that only decode, while the others take this one."""

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Return what the step before has begun, and begin the next samples at once."""
        sampled = super().take(state, step, observer)
        parts, engine = self._parts, self._parts.engine
        if step + 1 >= parts.total_steps:
            return sampled
        assert isinstance(engine, SeparateEngine), "the options say so"
        with observer.phase("rollout"):
            jax.block_until_ready(sampled.rollout.lengths)
        # As `sample_batch` would with the same state.
        batch = next(self._batches)
        position = self._batches.position
        prompts = parts.place_prompts(batch.prompts)
        key = parts.sample_keys(training_stream(0), step + 1)
        params = parts.policy_params(state)
        with observer.phase("update"):
            jax.block_until_ready(params)
        with observer.phase("rollout"):
            engine.update_weights(params)
            prompts, key = engine.send(prompts, key)

        def sample() -> SampledBatch:
            rollout = engine.generate(prompts, key, parts.sampling)
            return SampledBatch(batch, rollout, position, weights_step=step)

        self._await_left = engine.decode_ahead(sample).result
        return sampled

    def begin_next(self, state: TrainState, step: int, observer: StepObserver) -> None:
        """Do nothing: the devices that decode have begun already."""
