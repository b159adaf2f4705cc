"""Compiled programs are stored in the right folder, reused by the next process, and counted."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import dataclasses, json, sys
import jax
from jax_ppo.runtime import compilation
compilation.enable_cache(sys.argv[1], print)
with compilation.count_compilations() as count:
    jax.jit(lambda x: x * 2 + 1)(1.0)
jax.jit(lambda x: x * 3)(1.0)
print(json.dumps(dataclasses.asdict(count)))
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
    messages, count = compile_once(tmp_path / "file" / "folder")
    assert (
        len(messages) == 1
        and "config.trainer.compilation_cache" in messages[0]
        and "file" in messages[0]
    )
    assert count["programs"] == 1
