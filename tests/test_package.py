"""The contents of the wheel; `.ci/wheel` runs it outside the checkout."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import jax_ppo
from jax_ppo.config import config_files

ROOT = Path(__file__).parents[1]
SOURCES = ("jax_ppo", "configs", "docs", "setup.py", "pyproject.toml", "README.md", "LICENSE")


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
        calls = re.findall(r"^(?: +- run: (?:sudo )?)?(\.ci/\w+)\b", text, re.MULTILINE)
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


@pytest.mark.slow
def test_the_wheel_has_the_configurations_and_the_type_marker(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {f"jax_ppo/configs/{name}.py" for name in config_files.shipped_names()}
    files = {
        "jax_ppo/py.typed",
        "jax_ppo/kernels/losses.py",
        "jax_ppo/config/peers/verl.toml",
        "jax_ppo/demonstration/model/model.safetensors",
        "jax_ppo/demonstration/model/tokenizer.json",
    }
    assert {*files, *shipped} <= set(names)
    assert len(shipped) >= 6
    assert not [name for name in names if name.startswith(("configs/", "tests/"))]
    assert [name for name in names if name.startswith("jax_ppo/docs/")] == [
        "jax_ppo/docs/metrics.md"
    ]
