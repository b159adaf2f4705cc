"""Sample the responses of the next step before the update of this one (`rollout.max_staleness=1`).

The devices sample while the host applies the rewards, or devices that only decode do so beside
forward passes and update.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_ppo.data.prompt_batches import PromptBatches
from jax_ppo.ppo.samples.checkpointing import (
    ROLLOUT,
    are_rows,
    describe_skipped_pool,
    describe_skipped_rollout,
    lay_out,
    read_rollout,
    rollout_arrays,
)
from jax_ppo.ppo.samples.on_policy import sample_batch
from jax_ppo.ppo.samples.source import SampledBatch
from jax_ppo.ppo.step_parts import StepObserver, StepParts
from jax_ppo.sampler.other_mesh import SeparateEngine
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress
from jax_ppo.training.random_streams import training_stream
from jax_ppo.training.state import TrainState


class OneStepAheadSource:
    """Samples each step but the first from the weights before the last update."""

    def __init__(self, parts: StepParts, batches: PromptBatches) -> None:
        """Take the parts of a step, and the prompts of the next steps."""
        self._parts = parts
        self._batches = batches
        # Waits for the samples of the next step, and returns them.
        self._await_next: Callable[[], SampledBatch] | None = None

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Return what the step before has begun. See `SampleSource.take`."""
        if self._await_next is None:
            return sample_batch(self._parts, state, self._batches, step, observer)
        with observer.phase("rollout"):
            sampled = self._await_next()
        self._await_next = None
        return sampled

    def begin_next(self, state: TrainState, step: int, observer: StepObserver) -> None:
        """Sample the next step, unless this is the last one."""
        if step + 1 < self._parts.total_steps:
            ahead = sample_batch(self._parts, state, self._batches, step + 1, observer)
            ahead = ahead._replace(weights_step=step)
            self._await_next = lambda: ahead

    def checkpoint_trees(self) -> dict[str, Any]:
        """Return the rollout of the next step; its prompts are the next ones of the data."""
        if self._await_next is None:
            return {}
        return {ROLLOUT: rollout_arrays(self._await_next().rollout)}

    def restore(self, checkpoints: Checkpointer, progress: Progress) -> list[str]:
        """Take over the batch that a run had sampled ahead. See `SampleSource.restore`.

        The resumed run could not sample it again: the checkpoint's weights are one update newer.
        """
        lines = describe_skipped_pool(checkpoints, progress.step)
        saved = checkpoints.saved_tree(progress.step, ROLLOUT) if progress.step else None
        if saved is None:
            return lines
        sampled = self._restore_batch(saved, checkpoints, progress)
        if sampled is None:
            return lines + describe_skipped_rollout(checkpoints, progress.step)
        self._await_next = lambda: sampled
        return lines

    def _restore_batch(
        self, saved: dict[str, Any], checkpoints: Checkpointer, progress: Progress
    ) -> SampledBatch | None:
        """Return the batch of the saved tree; `None` if it does not fit this run."""
        parts, batches, options = self._parts, self._batches, self._parts.sampling
        step, position, n = progress.step, batches.position, parts.step_options.rollout.n
        samples = parts.step_options.prompts_per_step * n
        has_turns = options.environment is not None
        optional = {
            "routed_experts": options.returns_routed_experts,
            "turn_rewards": has_turns,
            "turn_starts": has_turns,
        }
        # Position 0: the data have changed, and the rollout's prompts are gone.
        fits = progress.position > 0
        fits &= saved["responses"].shape == (samples, options.max_response_length)
        fits &= optional == {name: name in saved for name in optional}
        if not fits:
            return None
        # `slot_steps` has one number per queue of the decoder, and this mesh may have others.
        shapes = lay_out(saved, parts.mesh, samples, replicated="slot_steps")
        rollout = read_rollout(checkpoints.restore_item(step, ROLLOUT, shapes), step)
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
        if step + 1 < self._parts.total_steps:
            with observer.phase("rollout"):
                jax.block_until_ready(sampled.rollout.lengths)
            self._begin_beside(state, step, observer)
        return sampled

    def begin_next(self, state: TrainState, step: int, observer: StepObserver) -> None:
        """Do nothing: the devices that decode have begun already."""

    def _begin_beside(self, state: TrainState, step: int, observer: StepObserver) -> None:
        """Start sampling what `sample_batch` would with the same state."""
        parts, engine = self._parts, self._parts.engine
        assert isinstance(engine, SeparateEngine), "the options say so"
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

        self._await_next = engine.decode_ahead(sample).result
