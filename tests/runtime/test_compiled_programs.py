"""Programs on arrays and on shapes: what is compiled, when, in which thread, and what is kept."""

import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.runtime import compiled_programs, meshes, placement, sharding
from jax_ppo.runtime.compiled_programs import (
    CompiledProgram,
    compile_program,
    program,
    run_on_shapes,
)

MESH = meshes.make_mesh(meshes.MeshShape(), jax.devices()[:1])
ROWS = sharding.replicated(MESH)


def make_scale():
    """Return a program that no other test has compiled."""

    @program("scale", static_argnames=("factor",))
    def scale(x, factor):
        return factor * x

    return scale


def shape(*dimensions):
    return jax.ShapeDtypeStruct(dimensions, jnp.float32, sharding=ROWS)


def test_a_call_on_arrays_finds_what_a_call_on_shapes_has_compiled():
    scale = make_scale()
    with jax.set_mesh(MESH):
        x = placement.place(np.arange(3, dtype=np.float32), ROWS)
        with compiled_programs.count_compilations() as compiled:
            with run_on_shapes():
                result = scale(shape(3), factor=2)
                # Once for each kind of arguments.
                assert scale(shape(3), factor=2) is result
                assert scale(shape(3), factor=3) is not result
                assert scale(shape(4), factor=2).shape == (4,)
            assert compiled.programs == 3
            np.testing.assert_array_equal(scale(x, factor=2), [0, 2, 4])
            assert compiled.programs == 3
    assert (result.shape, result.dtype, result.sharding) == ((3,), jnp.float32, x.sharding)


def test_a_program_that_calls_another_is_one_program():
    scale = make_scale()
    both = CompiledProgram(lambda x: scale(scale(x, factor=2), factor=3), "both")
    names = []

    def record(name, *rest):
        names.append(name)
        return compile_program(name, *rest)

    with jax.set_mesh(MESH), run_on_shapes(record):
        both(shape(2))
    assert names == ["both"]


def test_host_arrays_become_shapes_and_shapes_ones():
    numbers = np.zeros((2, 3), np.int32)
    with run_on_shapes():
        placed = placement.place({"a": numbers}, ROWS)
    assert placed == {"a": jax.ShapeDtypeStruct((2, 3), np.int32, sharding=ROWS)}
    np.testing.assert_array_equal(placement.to_host(placed["a"]), np.ones((2, 3)))
    assert isinstance(placement.place(numbers, ROWS), jax.Array)


def test_other_threads_run_on_arrays_meanwhile():
    scale = make_scale()
    results = []
    thread = threading.Thread(target=lambda: results.append(scale(jnp.ones(2), factor=2)))
    with run_on_shapes():
        thread.start()
        thread.join()
    np.testing.assert_array_equal(results[0], [2, 2])


def test_a_compiler_that_raises_ends_the_run_on_shapes():
    def refuse(*program):
        raise ZeroDivisionError

    scale = make_scale()
    with pytest.raises(ZeroDivisionError), run_on_shapes(refuse):
        scale(shape(2), factor=2)
    assert scale(jnp.ones(1), factor=2) == 2


PROGRAM = """
import dataclasses, json, sys
import jax
from jax_ppo.runtime import compiled_programs
events = []
jax.monitoring.register_event_listener(lambda event, **kwargs: events.append(event))
compiled_programs.enable_cache(sys.argv[1], print)
with compiled_programs.count_compilations() as count:
    jax.jit(lambda x: x * 2 + 1)(1.0)
hits = events.count("/jax/compilation_cache/cache_hits")
jax.jit(lambda x: x * 3)(1.0)
print(json.dumps(dataclasses.asdict(count) | {"cache_hits": hits}))
"""


def compile_once(option="", **environment):
    """Return the output and the count of a process that compiles one program."""
    base = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
    }
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(option)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env=base | {name: str(value) for name, value in environment.items()},
    )
    *messages, count = process.stdout.splitlines()
    return messages, json.loads(count)


@pytest.mark.slow
def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    messages, first = compile_once(XDG_CACHE_HOME=tmp_path)
    _, second = compile_once(XDG_CACHE_HOME=tmp_path)
    assert messages == [] and list((tmp_path / "jax_ppo" / "compiled").iterdir())
    assert (first["programs"], first["cache_hits"]) == (1, 0)
    assert (second["programs"], second["cache_hits"]) == (1, 1)
    assert first["seconds"] > 0 < second["seconds"]


@pytest.mark.slow
def test_the_option_comes_before_jaxs_variable_and_that_before_the_home(tmp_path):
    option, variable, home = tmp_path / "option", tmp_path / "variable", tmp_path / "home"
    compile_once(option, JAX_COMPILATION_CACHE_DIR=variable, HOME=home)
    assert option.exists() and not variable.exists() and not home.exists()
    compile_once("", JAX_COMPILATION_CACHE_DIR=variable, HOME=home)
    assert variable.exists() and not home.exists()


@pytest.mark.parametrize("environment", [{}, {"JAX_COMPILATION_CACHE_DIR": "variable"}])
def test_off_keeps_nothing(tmp_path, environment):
    _, count = compile_once(
        "off", HOME=tmp_path, **{name: tmp_path / value for name, value in environment.items()}
    )
    assert count["programs"] == 1 and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told_once_and_done_without(tmp_path):
    (tmp_path / "file").touch()
    (message,), count = compile_once("~/file/folder", HOME=tmp_path)
    assert "config.trainer.compilation_cache" in message and "file" in message
    assert count["programs"] == 1
