"""Published bugs, put in one by one: each must make its test fail."""

import ast
import functools
import pathlib

import pytest

import edited_copies
import syntax_edit
from museum import EXHIBITS

ROOT = pathlib.Path(__file__).parents[1]


def test_names_are_unique_and_there_are_enough():
    assert len({exhibit.name for exhibit in EXHIBITS}) == len(EXHIBITS) >= 60


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_an_exhibit_is_whole(exhibit):
    assert exhibit.name.isidentifier() and exhibit.source
    assert exhibit.old != exhibit.new
    _, edited = syntax_edit.apply_edit(ROOT / "jax_ppo", exhibit.where, exhibit.old, exhibit.new)
    ast.parse(edited)
    file, _, name = exhibit.test.partition("::")
    assert name.partition("[")[0] in defined_in(file), exhibit.test


@functools.cache
def defined_in(file):
    """Names of tests: test_one, TestMany::test_another, ..."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + member.name for member in members if isinstance(member, ast.FunctionDef)}
    return names


@pytest.fixture(scope="module")
def runner():
    runner = edited_copies.Runner()
    yield runner
    runner.stop()


@pytest.mark.parametrize(
    "exhibit",
    # The slow suite re-injects every 32nd bug, the exhaustive suite the others.
    [
        pytest.param(exhibit, marks=pytest.mark.slow if index % 32 == 0 else pytest.mark.exhaustive)
        for index, exhibit in enumerate(EXHIBITS)
    ],
    ids=lambda exhibit: exhibit.name,
)
def test_the_bug_is_caught(exhibit, runner):
    file, edited = syntax_edit.apply_edit(ROOT / "jax_ppo", exhibit.where, exhibit.old, exhibit.new)
    # Plain asserts: rewriting the asserts of each copy takes longer than many of the tests.
    plain = "-x", "-q", "-p", "no:cacheprovider", "--assert=plain"
    arguments = [*plain, "-m", "slow or not slow", exhibit.test]
    with edited_copies.edited_copy(file.relative_to(ROOT).as_posix(), edited) as folder:
        code, output = runner.run(folder, arguments, timeout=600)
    assert code == 1, output[-5000:]
    assert f"FAILED {exhibit.test}" in output or f"ERROR {exhibit.test}" in output, output[-5000:]
