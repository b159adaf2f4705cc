"""The programs of a step: their table, for plans and counts of FLOPs, and a step on shapes.

That step compiles the programs and computes nothing: `take_ppo_step` itself runs, inside
`run_on_shapes`. The host's part has stand-ins: responses have one token (`placement.to_host`), no
rule is applied, and an engine that is not the built-in one returns the shapes of its responses.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ppo.data.prompt_batches import PromptBatch, PromptBatches
from jax_ppo.ppo.objectives import roles_of_losses
from jax_ppo.ppo.reward_inputs import ModelInputs
from jax_ppo.ppo.rewarding import RuleRewards, RuleScorer
from jax_ppo.ppo.samples import choose_source
from jax_ppo.ppo.step import take_ppo_step
from jax_ppo.ppo.step_parts import StepOptions, StepParts
from jax_ppo.runtime import sharding
from jax_ppo.sampler.other_mesh import engine_on_shapes
from jax_ppo.training.networks import Networks
from jax_ppo.training.state import TrainState
from jax_ppo.types import Rollout

# What a program does, which decides how its memory and its work are counted.
Kind = Literal["resharding", "sampling", "forward pass", "elementwise", "update"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProgram:
    """A compiled program of a step, without the small ones that prepare its arguments."""

    name: str  # as its declaration and the JSON of a plan name it
    label: str  # as the tables of a plan show it
    kind: Kind
    # The role that is laid out, sampled from or trained, or whose rows a pass reads, if any.
    role: str = ""
    runs: Callable[[StepOptions, Networks], bool]  # returns whether a step runs it
    # Returns the roles whose models it runs forward, besides the one that it trains.
    forwards: Callable[[StepOptions], tuple[str, ...]] = lambda options: ()
    # Returns how often an update passes over the rollout.
    epochs: Callable[[StepOptions], int] = lambda options: 1


# All programs of a step, in their order, for plans and counts.
PROGRAMS: tuple[StepProgram, ...] = (
    StepProgram(
        name="prepare_weights",
        label="decoding weights",
        kind="resharding",
        role="actor",
        runs=lambda options, nets: not options.config.learns_from_files,
    ),
    StepProgram(
        name="sample",
        label="sampling",
        kind="sampling",
        role="actor",
        runs=lambda options, nets: not options.config.learns_from_files,
    ),
    StepProgram(
        name="draw_again",
        label="drawing again",
        kind="forward pass",
        role="actor",
        runs=lambda options, nets: options.config.rollout.exact,
        forwards=lambda options: ("actor",),
    ),
    StepProgram(
        name="forward_policy",
        label="forward, policy",
        kind="forward pass",
        role="actor",
        runs=lambda options, nets: "policy" in options.forward.parts,
        forwards=lambda options: (
            ("actor",) * options.forward.runs_policy + ("reference",) * options.forward.reference
        ),
    ),
    StepProgram(
        name="forward_critic",
        label="forward, critic",
        kind="forward pass",
        role="critic",
        runs=lambda options, nets: "critic" in options.forward.parts,
        forwards=lambda options: ("critic",),
    ),
    StepProgram(
        name="forward_teacher",
        label="forward, teacher",
        kind="forward pass",
        role="teacher",
        runs=lambda options, nets: "teacher" in options.forward.parts,
        forwards=lambda options: ("teacher",),
    ),
    StepProgram(
        name="forward_reward",
        label="forward, reward",
        kind="forward pass",
        role="reward",
        runs=lambda options, nets: "reward" in nets,
        forwards=lambda options: ("reward",),
    ),
    StepProgram(
        name="estimate", label="advantages", kind="elementwise", runs=lambda options, nets: True
    ),
    StepProgram(
        name="update_actor",
        label="update, actor",
        kind="update",
        role="actor",
        runs=lambda options, nets: not options.config.trainer.critic_only,
        forwards=lambda options: roles_of_losses(options.update.actor, options.experience.teacher),
        epochs=lambda options: options.update.actor.ppo_epochs,
    ),
    StepProgram(
        name="update_critic",
        label="update, critic",
        kind="update",
        role="critic",
        runs=lambda options, nets: "critic" in nets,
        epochs=lambda options: options.update.critic.ppo_epochs or options.update.actor.ppo_epochs,
    ),
)


def planned_programs(step: StepParts) -> tuple[StepProgram, ...]:
    """Return a step's programs of known shapes: all but a reward model's with another tokenizer."""
    return tuple(
        program
        for program in PROGRAMS
        if program.runs(step.step_options, step.nets)
        and (step.reads_rollout or program.role != "reward")
    )


def find_step_program(name: str) -> StepProgram:
    """Return the program of this name."""
    return next(program for program in PROGRAMS if program.name == name)


def take_step_on_shapes(
    parts: StepParts, state: TrainState, batches: PromptBatches, step: int = 0
) -> None:
    """Take a step and, if there is one, the next; call it inside `run_on_shapes`.

    `state` holds shapes, which both steps share. `batches` are for these steps alone: their
    position changes. The second step compiles only what reads something that the first one left.
    """
    rules = _RewardShapes(**vars(parts.rules), reads_rollout=parts.reads_rollout)
    parts = dataclasses.replace(
        parts, engine=engine_on_shapes(parts.engine, parts.mesh), rules=rules
    )
    source = choose_source(parts, batches)
    for number in range(step, min(step + 2, parts.total_steps)):
        take_ppo_step(parts, state, source, number, _Unobserved())


class _Unobserved:
    def phase(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def write_pending_report(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class _RewardShapes(RuleScorer):
    """Stands in for rules: returns the shapes of a rollout's rewards, and applies none."""

    # Whether a reward model reads the sampled tokens: other inputs have unknown shapes.
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
            scored=samples,
            figures={name: shape() for name in self.figures},
        )

    def add_model_scores(
        self, nets: Networks, state: TrainState, rewards: RuleRewards, rows: ModelInputs
    ) -> jax.Array:
        if not self.reads_rollout:
            return rewards.scores
        return super().add_model_scores(nets, state, rewards, rows)
