"""The contents of the wheel, and a run from it outside the checkout."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import jax_ppo
from jax_ppo.config import config_files

ROOT = Path(__file__).parents[1]
SOURCES = ("jax_ppo", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE")
ONE_SMALL_STEP = (
    "--config=arithmetic",
    "--config.model.create.steps=2",
    "--config.model.create.habit_steps=1",
    "--config.data.val_files=",
    "--config.data.train_batch_size=8",
    "--config.data.val_batch_size=8",
    "--config.actor.ppo_mini_batch_size=8",
    "--config.trainer.critic_warmup=0",
    "--config.trainer.total_training_steps=1",
    "--config.trainer.compilation_cache=off",
)


def test_the_version_is_the_same_everywhere():
    version = jax_ppo.__version__
    assert importlib.metadata.version("jax_ppo") == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == version


def test_the_console_script_and_its_extras_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jax-ppo": "jax_ppo.__main__:main"}
    assert {"cuda", "tpu", "wandb", "dev", "docs", "test"} <= set(project["optional-dependencies"])


def test_the_workflow_and_the_local_run_call_the_same_scripts():
    scripts = {f".ci/{path.name}" for path in (ROOT / ".ci").iterdir()} - {".ci/run"}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
    for caller in (".ci/run", ".github/workflows/ci.yml"):
        text = (ROOT / caller).read_text()
        calls = re.findall(r"^(?: +- run: )?(\.ci/\w+)$", text, re.MULTILINE)
        assert set(calls) == scripts, caller


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, so that no build folder is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", "dist", "."]
    subprocess.run(command, cwd=folder, check=True)
    (path,) = (folder / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Return an environment with the wheel and this environment's dependencies.

    The dependencies are added by a path file. Path files inside that folder are not read, so an
    editable installation of the checkout in this environment is not visible in the new one.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["install", "--quiet", "--no-deps", "--ignore-installed", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    return folder


def run_outside_the_checkout(command, folder):
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_wheel_has_the_configurations_and_the_type_marker(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {f"jax_ppo/configs/{name}.py" for name in config_files.shipped_names()}
    assert {"jax_ppo/py.typed", "jax_ppo/kernels/losses.py", *shipped} <= set(names)
    assert len(shipped) >= 6
    assert not [name for name in names if name.startswith(("configs/", "tests/"))]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["jax-ppo", "python"])
def test_a_run_from_the_wheel_outside_the_checkout(command, environment, tmp_path):
    start = {"jax-ppo": ["jax-ppo", "train"], "python": ["python", "-m", "jax_ppo.train"]}[command]
    program = [environment / "bin" / start[0], *start[1:]]
    output = run_outside_the_checkout([*program, *ONE_SMALL_STEP], tmp_path)
    assert "step 1/1" in output
    assert json.loads((tmp_path / "output/arithmetic/summary.json").read_text())
    where = "import jax_ppo; print(jax_ppo.__file__)"
    path = run_outside_the_checkout([environment / "bin" / "python", "-c", where], tmp_path)
    assert path.startswith(str(environment))


READ_SHIPPED_BUILDER = """
import functools, http.server, json, os, pathlib, threading
from tensorflow_datasets.text.gsm8k import gsm8k
from jax_ppo.data.sources import load_examples

folder = pathlib.Path("served")
folder.mkdir()
for name in gsm8k._URLS:
    row = {"question": name, "answer": "2+2=4 #### 4"}
    (folder / f"{name}.jsonl").write_text(json.dumps(row))
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
for name in gsm8k._URLS:
    gsm8k._URLS[name] = f"http://127.0.0.1:{server.server_port}/{name}.jsonl"
os.environ["TFDS_DATA_DIR"] = "tfds"
(example,) = load_examples("tfds:gsm8k/train")
print(example.prompt[0]["content"], example.ground_truth)
"""


@pytest.mark.slow
def test_tfds_needs_nothing_that_the_wheel_does_not_declare(wheel, tmp_path):
    """Install the wheel with its dependencies alone, and prepare a data set that TFDS ships."""
    venv.create(tmp_path / "fresh", with_pip=False, symlinks=True)
    python = tmp_path / "fresh" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", str(wheel)]
    run_outside_the_checkout(install, tmp_path)
    output = run_outside_the_checkout([python, "-c", READ_SHIPPED_BUILDER], tmp_path)
    assert output.splitlines()[-1] == "train 4"
