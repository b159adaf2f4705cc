"""The mesh changes no gradient and no optimizer step beyond rounding, and copies no batch."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import tiny

TESTS = Path(__file__).parents[1]


@pytest.mark.exhaustive
def test_meshes_of_eight_and_sixteen_devices_compute_what_one_does() -> None:
    """A part of them, in the order of a seed; the script alone runs all."""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    command = [sys.executable, TESTS / "harness/mesh_sweep.py", "--part", "24", "--seed", "0"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "equal: 29"


@pytest.mark.slow
def test_rows_are_looked_up_without_a_copy_of_the_batch_on_each_device(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The compiler writes a warning to standard error where it has no other way."""
    config = tiny.config()
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    with jax.set_mesh(mesh):
        state = tiny.make_state(config, mesh)
        rollout = tiny.make_rollout(mesh)
        experience = tiny.make_experience(config, mesh, state, rollout, rows=8)[0]
        batch = tiny.pack_batch(config, mesh, rollout, 8)

        def gradients(params, reference, experience, batch):
            learner = tiny.actor_learner(config, tiny.networks(config), experience, reference)
            return learner.gradients(params, batch)

        lowered = jax.jit(gradients).lower(state.actor, state.reference, experience, batch)
    # A program from the cache on disk would come without the warning. An option that changes
    # nothing makes this one another program, which is then not kept.
    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    try:
        capfd.readouterr()
        lowered.compile({"xla_embed_ir_in_executable": True})
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
    assert "rematerialization" not in capfd.readouterr().err
