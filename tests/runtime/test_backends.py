"""Backends: platforms that are not there, names that do not resolve, and flags of XLA."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

import jax_ppo
import quick_compilation
import tiny
from jax_ppo.errors import UserError
from jax_ppo.runtime import backends, compat
from waiting import finish_all
from whole_run import run_command

KNOWN = "--xla_backend_optimization_level=0"
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


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    monkeypatch.delenv("JAX_PPO_TRIED_XLA_FLAGS", raising=False)


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


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("--xla_nothing=true", marks=pytest.mark.slow),
        pytest.param("--xla_backend_optimization_level=high", marks=pytest.mark.exhaustive),
    ],
)
def test_a_command_ends_in_one_line_that_names_a_flag_that_xla_refuses(wrong, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{KNOWN} {wrong}")
    result = run_command("train", "--config=arithmetic", check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: XLA_FLAGS: ")
    assert wrong in result.stderr and KNOWN not in result.stderr


def test_the_python_api_refuses_a_flag_that_would_end_the_process(monkeypatch, tmp_path):
    """Regression: only commands asked, and a notebook's kernel died."""
    monkeypatch.setenv("XLA_FLAGS", f"{KNOWN} --xla_nothing=true")
    for call in (jax_ppo.load_policy, lambda folder: jax_ppo.train(tiny.config(), folder)):
        with pytest.raises(UserError, match="^XLA_FLAGS: .* --xla_nothing=true"):
            call(tmp_path)


def test_refused_flags_are_dropped_with_one_line_and_the_others_are_tried_once(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{KNOWN} --xla_nothing=true --xla_neither")
    lines = []
    quick_compilation.drop_unknown(lines.append)
    assert os.environ["XLA_FLAGS"] == KNOWN
    assert lines == [
        "XLA_FLAGS: without --xla_nothing=true --xla_neither, which the installed jaxlib refuses"
    ]
    monkeypatch.setattr(subprocess, "run", None)  # no child is started again
    quick_compilation.drop_unknown(lines.append)
    backends.require_settings()
    assert len(lines) == 1


def test_flags_are_left_to_jaxlib_where_a_child_cannot_try_them(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_nothing=true")
    with pytest.raises(UserError, match="--xla_nothing=true"):
        backends.require_settings()
    monkeypatch.setattr(compat, "PARSES_XLA_FLAGS", "raise SystemExit(1)")
    backends.require_settings()


def test_blanks_are_no_file_of_flags_and_an_open_quotation_is_refused_as_a_whole(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " ")
    backends.require_settings()
    assert "XLA_FLAGS" not in os.environ
    monkeypatch.setenv("XLA_FLAGS", "--xla_nothing='a b")
    assert backends.refused_flags() == ["--xla_nothing='a b"]


@pytest.mark.parametrize(
    ("given", "ours", "result", "line"),
    [
        ("", "--xla_gpu_autotune_level=1", "--xla_gpu_autotune_level=1", ""),
        (KNOWN, "--xla_gpu_ftz=true", f"{KNOWN} --xla_gpu_ftz=true", ""),
        ("--xla_gpu_ftz=false", "--xla_gpu_ftz=true", "--xla_gpu_ftz=false", "XLA_FLAGS sets it"),
        (KNOWN, "--xla_nothing=true", KNOWN, "the installed jaxlib refuses it"),
    ],
)
def test_flags_for_gpus_are_added_unless_the_user_or_jaxlib_has_others(
    monkeypatch, capsys, given, ours, result, line
):
    monkeypatch.setattr(backends, "GPU_FLAGS", {ours: "why"})
    monkeypatch.setenv("XLA_FLAGS", given)
    backends.add_gpu_flags()
    backends.add_gpu_flags()  # what is there is not added again
    assert os.environ["XLA_FLAGS"] == result
    expected = f"note: a run leaves out {ours}: {line}\n" if line else ""
    assert capsys.readouterr().err == 2 * expected
