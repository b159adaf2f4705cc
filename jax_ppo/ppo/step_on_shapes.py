"""A PPO step that takes shapes: it compiles its programs, and computes nothing.

`take_ppo_step` itself runs, inside `run_on_shapes`. The host's part has stand-ins: responses have
one token (`placement.to_host`), no rule is applied, and an engine that is not the built-in one
returns the shapes of its responses.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo.data.prompt_batches import PromptBatch, PromptBatches
from jax_ppo.ppo.reward_inputs import ModelInputs
from jax_ppo.ppo.rewarding import RuleRewards, RuleScorer
from jax_ppo.ppo.samples import choose_source
from jax_ppo.ppo.step import take_ppo_step
from jax_ppo.ppo.step_parts import StepParts
from jax_ppo.runtime import sharding
from jax_ppo.sampler.other_mesh import engine_on_shapes
from jax_ppo.training.networks import Networks
from jax_ppo.training.state import TrainState
from jax_ppo.types import Rollout


def take_step_on_shapes(
    parts: StepParts, state: TrainState, batches: PromptBatches, step: int = 0
) -> None:
    """Take a step and, if there is one, the next; call it inside `run_on_shapes`.

    `state` has shapes, those of both steps. `batches` are for these steps alone: their position and
    solve rates change. The second step compiles only what reads something that the first one left.
    """
    rules = _RewardShapes(**vars(parts.rules), reads_rollout=parts.reads_rollout)
    parts = dataclasses.replace(
        parts, engine=engine_on_shapes(parts.engine, parts.mesh), rules=rules
    )
    source = choose_source(parts, batches)
    for number in range(step, min(step + 2, parts.total_steps)):
        take_ppo_step(parts, state, source, number, _Unobserved())


class _Unobserved:
    """A `StepObserver` that follows nothing."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def write_pending_report(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class _RewardShapes(RuleScorer):
    """Rules that apply nothing: the shapes of the rewards of a rollout."""

    # Whether a reward model reads the sampled tokens: the shapes of others depend on the texts.
    reads_rollout: bool = True

    def score(self, batch: PromptBatch, rollout: Rollout) -> RuleRewards:
        samples, length = rollout.responses.shape
        rows = sharding.batch_rows(self.mesh, samples)

        def shape(*rest: int) -> Any:
            return jax.ShapeDtypeStruct((samples, *rest), jnp.float32, sharding=rows)

        return RuleRewards(
            scores=shape(),
            steps=shape(length) if self.options.process_rewards else rollout.turn_rewards,
            correct=shape(),
            failures=0,
            scored=samples,
            extra={},
            figures={name: shape() for name in self.figures},
        )

    def add_model_scores(
        self, nets: Networks, state: TrainState, rewards: RuleRewards, rows: ModelInputs
    ) -> jax.Array:
        if not self.reads_rollout:
            return rewards.scores
        return super().add_model_scores(nets, state, rewards, rows)
