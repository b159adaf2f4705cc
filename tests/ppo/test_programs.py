"""One entry of the table of programs is all that a further program of a step needs."""

import json

import jax
import pytest

import tiny
from jax_ppo.memory import step_plan
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.ppo import forward_passes, programs
from jax_ppo.ppo.programs import PROGRAMS, StepProgram, compile_programs
from jax_ppo.ppo.step_parts import ProgramInputs, StepOptions
from jax_ppo.runtime.compilation import compile_ahead
from jax_ppo.runtime.topologies import parse_topology


def compile_second_reading(step, shapes):
    compile_ahead(forward_passes.join_sequences, shapes.rollout, step.step_options.sequence_length)


SECOND_READING = StepProgram(
    name="forward_reference",
    label="forward, reference",
    kind="forward pass",
    role="reference",
    passes=lambda config, nets: 2,
    compile=compile_second_reading,
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


def test_one_entry_puts_a_program_into_the_plan(plan):
    names = [program.name for program in plan().programs]
    planned = plan(SECOND_READING)
    assert [program.name for program in planned.programs] == [*names, "forward_reference"]
    found = {program.name: program for program in planned.programs}
    # Policy and reference are read in one program; here the reference is read twice, alone.
    assert found["forward_reference"].flops == found["forward_policy"].flops
    assert found["forward_reference"].memory.temporaries > 0
    assert step_plan.format_plan(planned).count("forward, reference ") == 2  # memory and time


def test_one_entry_has_a_program_compiled(monkeypatch):
    config, mesh = tiny.config(), tiny.make_mesh()

    class Engine:
        def precompile(self, params, prompts, key, options):
            yield "sample"
            return tiny.make_rollout(mesh)

    monkeypatch.setattr(programs, "PROGRAMS", (SECOND_READING,))
    step = ProgramInputs(
        step_options=StepOptions.from_config(config),
        mesh=mesh,
        nets=tiny.networks(config),
        engine=Engine(),
        sampling=None,
        total_steps=1,
        reads_rollout=True,
    )
    with jax.set_mesh(mesh):
        names = list(compile_programs(step, tiny.make_state(config, mesh), None, None, None))
    assert names == ["sample", "forward_reference"]


def test_names_are_unique():
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names)
