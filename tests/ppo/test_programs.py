"""One entry of the table of programs puts a further program of a step into a plan."""

import dataclasses
import json

import jax
import pytest

import tiny
from jax_ppo import plan as plan_command
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory import step_plan
from jax_ppo.memory.abstract_step import build_abstract_step
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.ppo import programs
from jax_ppo.ppo.programs import PROGRAMS, StepProgram, planned_programs, take_step_on_shapes
from jax_ppo.runtime import meshes, sharding
from jax_ppo.runtime.compiled_programs import CompiledProgram, run_on_shapes
from jax_ppo.runtime.topologies import parse_topology

SECOND_READING = StepProgram(
    name="forward_reference",
    label="forward, reference",
    kind="forward pass",
    role="reference",
    runs=lambda options, nets: True,
    forwards=lambda options: ("reference", "reference"),
)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Return a function that plans a step with these entries after the others."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(tiny.ARCHITECTURE)))
    # Reference and critic are of one size.
    config = tiny.config(model__path=str(tmp_path))

    def plan_with(*entries):
        monkeypatch.setattr(programs, "PROGRAMS", (*PROGRAMS, *entries))
        return step_plan.plan_step(config, parse_topology("v5e:1x1"), compiles=False)

    return plan_with


def lower_step(folder, mesh, architecture=tiny.ARCHITECTURE, **options):
    """Take a step on shapes; return it, and the names and lowered texts of its programs."""
    (folder / "config.json").write_text(json.dumps(to_hf_config(architecture)))
    place, found = sharding.replicated(mesh), []

    def record(name, lowered, arguments):
        found.append((name, lowered.as_text()))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), lowered.out_info
        )

    with jax.set_mesh(mesh):
        step = build_abstract_step(tiny.config(model__path=str(folder), **options), mesh)
        with run_on_shapes(record):
            take_step_on_shapes(step, step.state, step.batches())
    return step, found


def test_one_entry_puts_a_program_into_the_plan(plan):
    names = [program.name for program in plan().programs]
    planned = plan(SECOND_READING)
    assert [program.name for program in planned.programs] == [*names, "forward_reference"]
    found = {program.name: program for program in planned.programs}
    # Policy and reference are read in one program; here the reference is read twice, alone.
    assert found["forward_reference"].flops == found["forward_policy"].flops
    assert found["forward_reference"].memory.temporaries > 0
    assert plan_command.format_plan(planned).count("forward, reference ") == 2  # memory and time


def test_a_tpus_programs_are_lowered_where_there_is_none(tmp_path, monkeypatch):
    """They use a TPU's choice of attention; `python -m jax_ppo.plan` compiles them."""

    def lower(program, *arguments, **named):
        return program.jitted.trace(*arguments, **named).lower(lowering_platforms=("tpu",))

    monkeypatch.setattr(CompiledProgram, "lower", lower)
    architecture = dataclasses.replace(tiny.ARCHITECTURE, head_dim=64)
    sizes = {"data__max_prompt_length": 64, "data__max_response_length": 64}
    mesh = meshes.make_mesh(tiny.config().mesh, jax.devices()[:1])
    with assume_platform("tpu"):
        step, found = lower_step(tmp_path, mesh, architecture, model__dtype="bfloat16", **sizes)
    assert step.nets.actor.attention == "splash"
    assert {name for name, text in found if "tpu_custom_call" in text} == {
        *("forward_policy", "forward_critic", "update_actor", "update_critic")
    }


SOURCES = {
    "on policy": {},
    "selected": {
        "rollout__n": 4,
        "rollout__keep": 2,
        "algorithm__filter_groups__enable": True,
        "algorithm__filter_groups__max_num_gen_batches": 2,
    },
    "one step ahead": {"rollout__max_staleness": 1, "algorithm__rollout_is": "token"},
    "continued": {
        "rollout__max_staleness": 2,
        "rollout__partial_length": 4,
        "algorithm__rollout_is": "token",
    },
    "exact": {"rollout__exact": True, "rollout__reuse_logprobs": "auto"},
}


@pytest.mark.parametrize("options", SOURCES.values(), ids=SOURCES)
def test_a_step_on_shapes_runs_the_programs_of_the_table(options, tmp_path):
    """In the table's order, wherever samples come from; one small model is read for all roles."""
    step, found = lower_step(tmp_path, tiny.make_mesh(), **options)
    names = [name for name, _ in found]
    planned = [program.name for program in planned_programs(step)]
    assert list(dict.fromkeys(name for name in names if name)) == planned
    # One program makes all layers' weights for decoding, another one the rest.
    assert names.count("prepare_weights") == 2
