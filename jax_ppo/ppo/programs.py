"""The table of the programs of a step: what runs in each, for plans and counts of FLOPs."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from jax_ppo.ppo.objectives import roles_of_losses
from jax_ppo.ppo.step_parts import StepOptions, StepParts
from jax_ppo.training.networks import Networks

# What a program does, which decides how its memory and its work are counted.
Kind = Literal["resharding", "sampling", "forward pass", "elementwise", "update"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProgram:
    """A compiled program of a step, without the small ones that prepare its arguments."""

    name: str  # as its declaration and the JSON of a plan name it
    label: str  # as the tables of a plan show it
    kind: Kind
    # The role that is laid out, sampled from or trained, or whose rows a pass reads; empty if none
    # is.
    role: str = ""
    runs: Callable[[StepOptions, Networks], bool]  # returns whether a step runs it
    # Returns the roles whose models it runs forward, besides the one that it trains.
    forwards: Callable[[StepOptions], tuple[str, ...]] = lambda options: ()
    # Returns how often an update passes over the rollout.
    epochs: Callable[[StepOptions], int] = lambda options: 1


# All programs of a step, in their order. What plans or counts programs reads this table.
PROGRAMS: tuple[StepProgram, ...] = (
    StepProgram(
        name="prepare_weights",
        label="decoding weights",
        kind="resharding",
        role="actor",
        runs=lambda options, nets: not options.reads_responses,
    ),
    StepProgram(
        name="sample",
        label="sampling",
        kind="sampling",
        role="actor",
        runs=lambda options, nets: not options.reads_responses,
    ),
    StepProgram(
        name="draw_again",
        label="drawing again",
        kind="forward pass",
        role="actor",
        runs=lambda options, nets: options.rollout.exact,
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
        name="estimate",
        label="advantages",
        kind="elementwise",
        runs=lambda options, nets: True,
    ),
    StepProgram(
        name="update_actor",
        label="update, actor",
        kind="update",
        role="actor",
        runs=lambda options, nets: options.trains_actor,
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
    """Return the programs of a step whose shapes are known before it.

    Those of a reward model with its own tokenizer depend on the responses.
    """
    return tuple(
        program
        for program in PROGRAMS
        if program.runs(step.step_options, step.nets)
        and (step.reads_rollout or program.role != "reward")
    )


def find_step_program(name: str) -> StepProgram:
    """Return the program of this name."""
    return next(program for program in PROGRAMS if program.name == name)
