"""The table of the compiled programs of a step, which are compiled from shapes alone."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp

from jax_ppo.ppo import forward_passes, update
from jax_ppo.ppo.advantages import figures_read
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.mini_batches import RolloutPacking
from jax_ppo.ppo.objectives import roles_of_losses
from jax_ppo.ppo.samples.continued import compile_partial_sampling
from jax_ppo.ppo.samples.exact import compile_exact_sampling
from jax_ppo.ppo.samples.selected import compile_selection
from jax_ppo.ppo.step_parts import ProgramInputs, StepOptions
from jax_ppo.runtime import sharding
from jax_ppo.runtime.compilation import compile_ahead
from jax_ppo.training.networks import Networks
from jax_ppo.training.state import TrainState, policy_params
from jax_ppo.types import Experience, Prompts, Rollout, Sequences


@dataclasses.dataclass
class StepShapes:
    """Shapes with shardings (or arrays) of what passes from program to program in a step.

    Each program's results are the arguments of later ones; those that are `None` or empty come from
    programs that have not been compiled yet.
    """

    state: TrainState  # the train state
    packed: RolloutPacking  # the packing of a rollout
    rollout: Rollout | None = None  # what the engine returns, then what is selected of it
    sequences: Sequences | None = None  # prompts and responses, joined
    # The results of the forward passes.
    outputs: list[forward_passes.ForwardOutputs] = dataclasses.field(default_factory=list)
    experience: Experience | None = None  # what the update learns from


# What a program does, which decides the formulas for its memory and its work.
Kind = Literal["resharding", "sampling", "forward pass", "elementwise", "update"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProgram:
    """A compiled program of a step."""

    name: str  # as `compile_programs` yields it and the JSON of a plan names it
    # As the tables of a plan show it; empty for a program that is too small to be planned.
    label: str = ""
    kind: Kind  # which formulas estimate its memory and its work
    role: str = ""  # the role whose model runs, or is laid out; empty if none does
    # Returns its forward passes, the epochs of an update, how often weights are laid out, or how
    # many responses to a prompt are sampled; 0 if a step does not run the program.
    passes: Callable[[StepOptions, Networks], int]
    # Compiles its function for shapes, and records the shapes of its results; `None` for the
    # programs that the engine compiles.
    compile: Callable[[ProgramInputs, StepShapes], None] | None = None
    # Returns the other roles whose parameters it reads.
    reads: Callable[[StepOptions], tuple[str, ...]] = lambda options: ()


def compile_programs(
    step: ProgramInputs,
    state: TrainState,
    prompts: Prompts,
    key: jax.Array,
    packed: RolloutPacking,
    rollout: Rollout | None = None,
) -> Iterator[str]:
    """Compile one program at a time, in the order of the loop, and yield its name.

    The shapes that one program returns are the arguments of the next. Everything but `step` may be
    arrays or shapes with shardings.

    `rollout` holds given responses to the prompts; `None` if they are sampled.
    """
    shapes = StepShapes(state, packed, rollout)
    params = policy_params(step.nets, state)
    options, engine = step.step_options, step.engine
    if rollout is None and options.rollout.max_staleness > 1:
        shapes.rollout = yield from compile_partial_sampling(step, params, key)
    elif rollout is None:
        # The engine yields the names of its programs itself.
        shapes.rollout = yield from engine.precompile(params, prompts, key, step.sampling)
        if options.rollout.exact:
            shapes.rollout = compile_exact_sampling(
                step, state, params, shapes.rollout, packed.forward, key
            )
            yield "draw_again"
    for program in PROGRAMS:
        if program.compile is not None and _runs(step, program):
            program.compile(step, shapes)
            yield program.name


def _compile_selection(step: ProgramInputs, shapes: StepShapes) -> None:
    assert shapes.rollout is not None, "sampling comes first"
    shapes.rollout = compile_selection(step, shapes.rollout)


def _compile_forward(part: forward_passes.Part, step: ProgramInputs, shapes: StepShapes) -> None:
    outputs = compile_ahead(
        forward_passes.forward_part,
        step.step_options.forward,
        step.nets,
        part,
        shapes.state,
        _join_sequences(step, shapes),
        *shapes.packed.forward,
    )
    shapes.outputs.append(outputs)


def _compile_reward_model(step: ProgramInputs, shapes: StepShapes) -> None:
    net = step.nets.reward
    assert net is not None, "there is no reward model"
    compile_ahead(
        forward_passes.reward_model_scores,
        net,
        shapes.state.role_params("reward", step.nets),
        _join_sequences(step, shapes),
        *shapes.packed.forward,
        step.step_options.experience.reward.score_position,
    )


def _compile_experience(step: ProgramInputs, shapes: StepShapes) -> None:
    """Compile the estimation of advantages."""
    assert shapes.rollout is not None, "sampling comes first"
    # Rewards arrive from the host, so no program's result has their shape.
    rows = sharding.batch_rows(step.mesh, step.samples)
    rewards = jax.ShapeDtypeStruct((step.samples,), jnp.float32, sharding=rows)
    step_rewards = None
    logprobs = shapes.rollout.logprobs
    if step.step_options.has_step_rewards or shapes.rollout.turn_rewards is not None:
        step_rewards = jax.ShapeDtypeStruct(logprobs.shape, jnp.float32, sharding=rows)
    options = step.step_options.experience
    figures = {
        name: jax.ShapeDtypeStruct((step.samples,), jnp.float32, sharding=rows)
        for name in figures_read(options.algorithm.adv_estimator)
    }
    shapes.experience, _ = compile_ahead(
        estimate_experience,
        options,
        shapes.state.control,
        _join_sequences(step, shapes),
        logprobs,
        forward_passes.join_outputs(shapes.outputs),
        rewards,
        step_rewards,
        figures,
    )


def _join_sequences(step: ProgramInputs, shapes: StepShapes) -> Sequences:
    """Return the shapes of the sequences; the first program that reads them compiles the join."""
    if shapes.sequences is None:
        length = step.step_options.sequence_length
        shapes.sequences = compile_ahead(forward_passes.join_sequences, shapes.rollout, length)
    assert shapes.sequences is not None
    return shapes.sequences


def _compile_update(role: str, step: ProgramInputs, shapes: StepShapes) -> None:
    """Compile the update of the actor, or of a separate critic."""
    assert shapes.experience is not None, "advantages come first"
    actor_program = update.actor_program(step.step_options.update)
    function = {"actor": actor_program, "critic": update.update_critic}[role]
    setup = update.UpdateSetup(step.step_options.update, step.nets, step.total_steps)
    arguments = update.update_arguments(
        setup, shapes.state, shapes.experience, shapes.packed.mini_batches
    )
    compile_ahead(function, *arguments[role])


# All programs of a step, in their order. What compiles, plans or checks programs reads this table.
PROGRAMS: tuple[StepProgram, ...] = (
    StepProgram(
        name="prepare_weights",
        label="decoding weights",
        kind="resharding",
        role="actor",
        passes=lambda options, nets: int(not options.reads_responses),
    ),
    StepProgram(
        name="sample",
        label="sampling",
        kind="sampling",
        role="actor",
        passes=lambda options, nets: 0 if options.reads_responses else options.rollout.n,
    ),
    StepProgram(
        name="draw_again",
        label="drawing again",
        kind="forward pass",
        role="actor",
        passes=lambda options, nets: int(options.rollout.exact),
    ),
    StepProgram(
        name="select",
        kind="elementwise",
        passes=lambda options, nets: int(options.selects_samples),
        compile=_compile_selection,
    ),
    StepProgram(
        name="forward_policy",
        label="forward, policy",
        kind="forward pass",
        role="actor",
        passes=lambda options, nets: options.forward.policy_passes,
        compile=functools.partial(_compile_forward, "policy"),
        reads=lambda options: ("reference",),
    ),
    StepProgram(
        name="forward_critic",
        label="forward, critic",
        kind="forward pass",
        role="critic",
        passes=lambda options, nets: int("critic" in options.forward.parts),
        compile=functools.partial(_compile_forward, "critic"),
    ),
    StepProgram(
        name="forward_teacher",
        label="forward, teacher",
        kind="forward pass",
        role="teacher",
        passes=lambda options, nets: int("teacher" in options.forward.parts),
        compile=functools.partial(_compile_forward, "teacher"),
    ),
    StepProgram(
        name="forward_reward",
        label="forward, reward",
        kind="forward pass",
        role="reward",
        passes=lambda options, nets: int("reward" in nets),
        compile=_compile_reward_model,
    ),
    StepProgram(
        name="estimate",
        label="advantages",
        kind="elementwise",
        passes=lambda options, nets: 1,
        compile=_compile_experience,
    ),
    StepProgram(
        name="update_actor",
        label="update, actor",
        kind="update",
        role="actor",
        passes=lambda options, nets: options.trains_actor * options.update.actor.ppo_epochs,
        compile=functools.partial(_compile_update, "actor"),
        reads=lambda options: roles_of_losses(options.update.actor, options.experience.teacher),
    ),
    StepProgram(
        name="update_critic",
        label="update, critic",
        kind="update",
        role="critic",
        passes=lambda options, nets: (
            (options.update.critic.ppo_epochs or options.update.actor.ppo_epochs)
            if "critic" in nets
            else 0
        ),
        compile=functools.partial(_compile_update, "critic"),
    ),
)


def _runs(step: ProgramInputs, program: StepProgram) -> bool:
    """Return whether a step runs a program whose shapes are known before it."""
    is_known = step.reads_rollout or program.role != "reward"
    return is_known and program.passes(step.step_options, step.nets) > 0


def planned_programs(step: ProgramInputs) -> tuple[StepProgram, ...]:
    """Return the programs of a step that a plan shows."""
    return tuple(x for x in PROGRAMS if x.label and _runs(step, x))


def find_step_program(name: str) -> StepProgram:
    """Return the program of this name."""
    return next(program for program in PROGRAMS if program.name == name)
