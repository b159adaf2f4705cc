"""SkyPilot's task: its `run` block, with a stand-in for Python."""

import pathlib
import shlex
import shutil
import sys
from types import ModuleType

import pytest
import yaml

from jax_ppo.config import command_line
from stand_ins import LAUNCH, TRICKY, capture, script

TASK = yaml.safe_load((LAUNCH / "sky.yaml").read_text())


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a block of the task and returns the words of the commands."""
    for path in (tmp_path / "jax_ppo/bin/python", tmp_path / "python3", tmp_path / "nvidia-smi"):
        path.parent.mkdir(parents=True, exist_ok=True)
        script(path, 'printf "%s\\0" "$@"; printf "%s\\0" "${HF_TOKEN-unset} ${HF_HOME-unset}" >&2')

    def call(block, path=(), **variables):
        workdir = {"WORKDIR": "gs://mine/seed 1"}
        environment = TASK["envs"] | TASK["secrets"] | workdir | variables
        environment |= {"HOME": str(tmp_path), "PATH": ":".join([*path, "/usr/bin:/bin"])}
        finished = capture("bash", "-c", TASK[block], env=environment)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout.split("\0")[:-1], finished.stderr.strip("\0")

    return call


def test_the_command_and_its_options_exist(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", ModuleType("gcsfs"))  # buckets need it, tests do not
    (option, module, *arguments), _ = run("run")
    assert (option, module) == ("-m", "jax_ppo.train")
    config, workdir = command_line.read_command_line(["train", *arguments])
    assert (config.experiment_name, workdir) == ("gsm8k", "gs://mine/seed 1")
    assert TASK["envs"]["WORKDIR"] is None, "SkyPilot asks for it: no part of the machine"


def test_arguments_are_read_as_by_a_shell(run):
    words, _ = run("run", COMMAND="sft", ARGUMENTS=shlex.join(TRICKY))
    assert words[:2] == ["-m", "jax_ppo.sft"]
    assert words[3:] == TRICKY


@pytest.mark.parametrize(("value", "seen"), [("", "unset"), ("abc", "abc")])
def test_a_secret_or_a_folder_that_is_not_passed_is_not_set(run, value, seen):
    assert run("run", HF_TOKEN=value)[1] == f"{seen} unset"
    assert run("run", HF_HOME=value)[1] == f"unset {seen}"


@pytest.mark.parametrize(("gpu", "extra"), [(True, "cuda"), (False, "tpu")])
def test_setup_installs_what_the_machine_needs(run, tmp_path, gpu, extra):
    if not gpu:
        (tmp_path / "nvidia-smi").unlink()
    words, _ = run("setup", path=[str(tmp_path)])
    assert words[-1] == f".[{extra},gcs,wandb]"


def test_only_signals_hangs_and_lost_machines_are_recovered_from():
    recovery = TASK["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [75, 130, 143]
    assert recovery["max_restarts_on_errors"] == 0
    assert TASK["resources"]["use_spot"]


@pytest.mark.parametrize("block", ["setup", "run"])
def test_shellcheck_has_nothing_to_report(block):
    shellcheck = shutil.which("shellcheck", path=str(pathlib.Path(sys.executable).parent))
    if not shellcheck:
        pytest.skip("needs the extra `dev`")
    # SC2154: the variables of the task are set in the environment.
    report = capture(shellcheck, "--shell=bash", "--exclude=SC2154", "-", input=TASK[block])
    assert report.returncode == 0, report.stdout
