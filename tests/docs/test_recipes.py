"""The code of the recipes runs: Python always, whole commands in the slow suite."""

import os
import runpy
import shlex
import subprocess
import sys

import doc_pages
import pytest

each_recipe = pytest.mark.parametrize("page", doc_pages.RECIPES, ids=lambda page: page.stem)

# Appended to the commands of the recipes: the smallest run that goes through every phase.
TINY = (
    "model.create.hidden_size=16",
    "model.create.intermediate_size=32",
    "model.create.num_layers=1",
    "model.create.steps=2",
    "model.create.habit_steps=1",
    "data.train_files=arithmetic:64",
    "data.val_files=arithmetic:8:heldout",
    "data.train_batch_size=8",
    "data.val_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "trainer.total_training_steps=2",
    "trainer.critic_warmup=0",
)


def save_files(page, folder) -> None:
    """Write the blocks that begin with a file's name to that file."""
    for block in doc_pages.blocks(page, "python"):
        if block.file_name:
            (folder / block.file_name).write_text(block.text)


@each_recipe
def test_the_python_of_a_recipe_runs(page, tmp_path, monkeypatch):
    """Blocks run as one program, in their order; each asserts what it shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    save_files(page, tmp_path)
    blocks = [block for block in doc_pages.blocks(page, "python") if not block.file_name]
    assert blocks, "a recipe shows how to check what was written"
    program = tmp_path / f"{page.stem}.py"
    program.write_text("\n".join(block.text for block in blocks))
    before = set(sys.modules)
    try:
        runpy.run_path(str(program))
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("my_"):
                del sys.modules[name]


def training_commands(page) -> list[list[str]]:
    """Return the words behind `python` of each training command of a page."""
    split = [shlex.split(command) for _, command in doc_pages.commands(page)]
    return [words[1:] for words in split if words[:3] == ["python", "-m", "jax_ppo.train"]]


@pytest.mark.slow
@each_recipe
def test_the_commands_of_a_recipe_run(page, tmp_path):
    save_files(page, tmp_path)
    (tmp_path / "configs").symlink_to(doc_pages.ROOT / "configs")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environment["PYTHONPATH"] = str(doc_pages.ROOT)
    for number, words in enumerate(training_commands(page)):
        workdir = tmp_path / str(number)
        changes = [f"--config.{change}" for change in TINY]
        subprocess.run(
            [sys.executable, *words, *changes, f"--workdir={workdir}"],
            cwd=tmp_path,
            env=environment,
            check=True,
        )
        assert (workdir / "summary.json").is_file()
        assert (workdir / "actor" / "model.safetensors").is_file()
