"""The code of the recipes runs: Python in the slow suite, whole commands in the exhaustive one."""

import os
import runpy
import shlex
import shutil

import pytest

import doc_pages
from whole_run import read_evaluations, read_steps, run_python

# These pages train or sample a model, which takes longer.
RUNS_MODELS = ("python-api", "model-family", "rollout-engine")


def marks_of(recipe):
    """Return the marks of a recipe's test: one of them compares with torch."""
    parity = [pytest.mark.parity] if recipe == "model-family" else []
    return [*parity, pytest.mark.exhaustive if recipe in RUNS_MODELS else pytest.mark.slow]


each_recipe = pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks_of(page.stem)) for page in doc_pages.RECIPES],
    ids=lambda page: page.stem,
)

SHORTEST = {
    "data.val_files": "arithmetic:8:heldout",
    "data.train_batch_size": 8,
    "data.val_batch_size": 8,
    "actor.ppo_mini_batch_size": 8,
    "trainer.total_training_steps": 2,
    "trainer.critic_warmup": 0,
}


def save_files(page, folder) -> None:
    """Write the blocks that begin with a file's name to that file."""
    for block in doc_pages.blocks(page, "python"):
        if block.file_name:
            (folder / block.file_name).write_text(block.text)


def run(arguments, folder, package=doc_pages.ROOT, devices=1) -> None:
    """Run Python in a folder, with its modules and the package of another folder."""
    path = f"{package}{os.pathsep}{folder}"
    run_python(*arguments, devices=devices, cwd=folder, PYTHONPATH=path)


@each_recipe
def test_the_python_of_a_recipe_runs(page, tmp_path):
    """Blocks run as one program, in their order; each asserts what it shows."""
    save_files(page, tmp_path)
    blocks = [block for block in doc_pages.blocks(page, "python") if not block.file_name]
    assert blocks, "a recipe shows how to check what was written"
    program = "\n".join(block.text for block in blocks)
    assert "assert" in program
    (tmp_path / "program.py").write_text(program)
    run(["program.py"], tmp_path)


README = doc_pages.ROOT / "README.md"
DATA_AND_REWARDS = doc_pages.ROOT / "docs" / "data-and-rewards.md"


def test_the_python_of_every_page_is_run():
    pages = {page for page in doc_pages.PAGES if doc_pages.blocks(page, "python")}
    assert pages == {*doc_pages.RECIPES, README, DATA_AND_REWARDS}


def test_the_reward_function_of_the_guide_scores_and_logs_what_the_guide_says(tmp_path):
    (block,) = doc_pages.blocks(DATA_AND_REWARDS, "python")
    (tmp_path / "guide.py").write_text(block.text)
    defined = runpy.run_path(str(tmp_path / "guide.py"))
    right = {"score": 1.0, "acc": True, "characters": 9}
    assert defined["score"]("source", "It is 12\n", 12, {}) == right
    assert defined["score"]("source", "12 or 13", "12", {})["score"] == 0.0


@pytest.mark.exhaustive
def test_the_python_of_the_readme_trains_and_samples(tmp_path):
    (block,) = doc_pages.blocks(README, "python")
    assert block.text.count('load_config("arithmetic")') == 1
    changes = ", ".join(f"{name.replace('.', '__')}={value!r}" for name, value in SHORTEST.items())
    program = block.text.replace('"arithmetic")', f'"arithmetic", {changes})')
    (tmp_path / "program.py").write_text(f"{program}\nassert summary['steps'] == 2")
    run(["program.py"], tmp_path)


def edited_package(page, folder):
    """Copy the package, apply the page's edits and add its kernel; return the path of the copy."""
    copy = folder / "copy"
    for name in ("jax_ppo", "configs"):
        shutil.copytree(doc_pages.ROOT / name, copy / name)
    for name, old, new in doc_pages.edits(page):
        text = (copy / name).read_text()
        assert text.count(old) == 1, f"{name} has not exactly once:\n{old}"
        (copy / name).write_text(text.replace(old, new))
    kernels = copy / "jax_ppo" / "kernels" / "advantages.py"
    kernels.write_text(f"{kernels.read_text()}\n\n{(folder / 'my_advantages.py').read_text()}")
    return copy


@pytest.mark.parametrize(
    "page",
    [page for page in doc_pages.RECIPES if doc_pages.edits(page)],
    ids=lambda page: page.stem,
)
def test_the_edits_of_a_recipe_make_its_commands_valid(page, tmp_path):
    save_files(page, tmp_path)
    package = edited_package(page, tmp_path)
    for words in training_commands(page):
        program = "import sys\nfrom jax_ppo.config.command_line import read_command_line\n"
        program += "read_command_line(sys.argv)"
        run(["-c", program, *words[2:]], tmp_path, package)


def published_runs(page) -> list[list[str]]:
    """Return the words behind `python` of each command that trains the model in the package."""
    found = [shlex.split(command) for _, command in doc_pages.commands(page)]
    found = [
        words[words.index("python") + 1 :] for words in found if "--config=arithmetic" in words
    ]
    return [words for words in found if words[1] in ("jax_ppo.train", "jax_ppo.critic")]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=pytest.mark.slow if page.stem == "README" else pytest.mark.exhaustive
        )
        for page in filter(published_runs, doc_pages.PAGES)
    ],
    ids=lambda page: page.stem,
)
def test_no_published_command_lowers_what_it_trains_for(page, seed, tmp_path):
    save_files(page, tmp_path)
    package = edited_package(page, tmp_path) if doc_pages.edits(page) else doc_pages.ROOT
    for words in published_runs(page):
        rows = "--config.data.val_files=arithmetic:200:heldout"
        devices = 4 if "mesh." in " ".join(words) else 1
        run([*words, f"--config.seed={seed}", rows], tmp_path, package, devices)
        name = next((x for x in words if x.startswith("--workdir=")), "=output/arithmetic")
        if words[1] == "jax_ppo.train":
            workdir = tmp_path / name.partition("=")[2]
            first, *_, last = (x["reward_mean"] for x in read_evaluations(workdir))
            assert last >= first, words
            assert (workdir / "actor" / "model.safetensors").is_file()
            # A signal to learn from.
            for metric in ("reward/std", "advantages/std", "actor/grad_norm"):
                assert any(float(step[metric] or 0) > 0 for step in read_steps(workdir)), metric


def training_commands(page) -> list[list[str]]:
    """Return the words behind `python` of each training command of a page."""
    split = [shlex.split(command) for _, command in doc_pages.commands(page)]
    return [words[1:] for words in split if words[:3] == ["python", "-m", "jax_ppo.train"]]
