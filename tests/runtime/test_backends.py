"""A run ends in one line without the platforms that it asks for, and needs no resolvable name."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from jax_ppo.errors import UserError
from jax_ppo.runtime import backends
from waiting import finish_all
from whole_run import run_command

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import sys
from jax_ppo.config import schema
from jax_ppo.runtime import backends, distributed, faults

def main():
    backends.start_backends()
    assert len(distributed.allgather_json(sys.argv[2])) == 2

address, number = sys.argv[1:]
distributed.initialize(schema.Distributed(address, 2, int(number)))
faults.run_or_abort(main)
"""


@pytest.mark.parametrize(
    "platform", ["cuda", pytest.param("nothing", marks=pytest.mark.exhaustive)]
)
def test_a_platform_that_is_not_there_is_one_line(tmp_path, platform):
    if platform == "cuda" and shutil.which("nvidia-smi"):
        pytest.skip("there may be a GPU")
    result = subprocess.run(
        [sys.executable, "-m", "jax_ppo.train", "--config=arithmetic", f"--workdir={tmp_path}/run"],
        env=os.environ | {"JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: JAX_PLATFORMS={platform}: ")
    assert "unset it, and JAX takes what this machine has" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting",
    [
        "jax_enable_x64=True",
        "jax_numpy_rank_promotion=raise",
        "jax_numpy_dtype_promotion=strict",
        "jax_disable_jit=True",
        "jax_transfer_guard=disallow",
        "jax_threefry_partitionable=False",
        "jax_default_prng_impl=rbg",
        "jax_random_seed_offset=1",
    ],
)
def test_settings_of_jax_that_change_types_or_samples_are_refused(setting, monkeypatch):
    name, _, value = setting.partition("=")
    backends.require_settings()
    monkeypatch.setattr(type(jax.config), name, value)
    with pytest.raises(UserError, match=f"^{name.upper()}={value}: .*; unset it"):
        backends.require_settings()


@pytest.mark.slow
@pytest.mark.parametrize("value", ["1", "maybe"])
def test_a_setting_in_the_environment_is_refused_in_one_line(tmp_path, value, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", value)
    arguments = ("--config=arithmetic", f"--workdir={tmp_path}/run")
    result = run_command("train", *arguments, check=False)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("error: JAX") and "jax_enable_x64" in result.stderr.lower()


def start_two_processes(address, *, prefix=(), platforms=("cpu", "cpu")):
    return [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", PROGRAM, address, str(number)],
            cwd=ROOT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": platform, "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number, platform in enumerate(platforms)
    ]


@pytest.mark.slow
def test_processes_connect_on_a_host_whose_name_does_not_resolve(coordinator_address):
    rename = "hostname no-such-host.invalid && exec"
    prefix = ("unshare", "--uts", "sh", "-c", f'{rename} "$@"', "sh")
    if (
        not shutil.which("unshare")
        or subprocess.run([*prefix, "true"], capture_output=True).returncode
    ):
        pytest.skip("renaming a host needs a namespace of names, which takes root")
    processes = start_two_processes(coordinator_address, prefix=prefix)
    outputs = finish_all(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs


@pytest.mark.slow
def test_a_process_without_its_platform_ends_both_with_one_line(coordinator_address):
    processes = start_two_processes(coordinator_address, platforms=("cpu", "nothing"))
    (_, errors), (_, other_errors) = finish_all(processes)
    assert [process.returncode for process in processes] == [1, 1], errors + other_errors
    line = "process 0 of 2 ends the run: process 1: UserError: JAX_PLATFORMS=nothing: "
    assert line in errors
    assert "Traceback" not in errors
