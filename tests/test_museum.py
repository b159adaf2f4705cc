"""Published bugs, put in one by one: each must make its test fail."""

import ast
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import syntax_edit
from museum import EXHIBITS

ROOT = pathlib.Path(__file__).parents[1]
# pytest in a process that first makes sure whose package it imports; 9 is none of pytest's exit codes.
RUN = """
import pathlib, sys
import jax_ppo
import pytest
if pathlib.Path(jax_ppo.__file__).parents[1] != pathlib.Path.cwd():
    sys.exit(9)
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_names_are_unique_and_there_are_enough():
    assert len({exhibit.name for exhibit in EXHIBITS}) == len(EXHIBITS) >= 60


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_an_exhibit_is_whole(exhibit):
    assert exhibit.name.isidentifier() and exhibit.source and exhibit.holds
    assert exhibit.old != exhibit.new
    _, edited = syntax_edit.apply_edit(ROOT / "jax_ppo", exhibit.where, exhibit.old, exhibit.new)
    ast.parse(edited)
    file, _, name = exhibit.test.partition("::")
    assert name.partition("[")[0] in defined_in(file), exhibit.test


def defined_in(file):
    """Names of tests: test_one, TestMany::test_another, ..."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + member.name for member in members if isinstance(member, ast.FunctionDef)}
    return names


@pytest.mark.slow
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_the_bug_is_caught(exhibit, tmp_path):
    for folder in ("jax_ppo", "tests", "configs"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    file, edited = syntax_edit.apply_edit(
        tmp_path / "jax_ppo", exhibit.where, exhibit.old, exhibit.new
    )
    file.write_text(edited)
    # conftest.py asks for programs that compile fast where XLA_FLAGS is not set.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "PYTHONPATH": str(tmp_path)
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN,
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "slow or not slow",
            exhibit.test,
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"FAILED {exhibit.test}" in done.stdout or f"ERROR {exhibit.test}" in done.stdout, (
        done.stdout[-5000:]
    )
