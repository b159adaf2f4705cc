"""Whole runs of commands as processes, and the figures that they write."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_ppo.reporting.files import read_samples
from waiting import RUN_SECONDS, finish_all

ROOT = Path(__file__).parents[2]


def machine(devices: int) -> dict[str, str]:
    """Return the environment of a process with a number of virtual devices."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}


def run_python(
    *arguments: Any, devices: int = 1, check: bool = True, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and variables; with `check`, it must succeed."""
    command = [sys.executable, *map(str, arguments)]
    return _run(command, machine(devices) | variables, check, cwd)


def _run(
    command: Sequence[Any], environment: dict[str, str], check: bool, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(
        command, env=environment, cwd=cwd, text=True, capture_output=True, timeout=RUN_SECONDS
    )
    assert not check or process.returncode == 0, process.stdout + process.stderr
    return process


def start_processes(
    *arguments: Any, own: Sequence[Any] = ((), ()), address: str = "", devices: int = 1
) -> list[subprocess.Popen[str]]:
    """Start Python with these arguments and each process's own ones after them.

    Processes of the package connect at `address` by their environment.
    """
    environment = machine(devices)
    if address:
        environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(len(own))}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, (*arguments, *words))],
            env=environment | ({"JAX_PROCESS_ID": str(number)} if address else {}),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number, words in enumerate(own)
    ]


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait for processes, which must succeed, and return the output of each."""
    outputs = finish_all(processes)
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [output for output, _ in outputs]


def run_command(command: str, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of the package; takes the options of `run_python`."""
    return run_python("-m", f"jax_ppo.{command}", *arguments, **options)


def run_two_processes(
    *arguments: Any, logs: Path, devices: int = 1, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Train in two processes, each with this number of devices; with `check`, they must succeed."""
    command = ["bash", ROOT / "launch" / "local_processes.sh", "2", "--", *map(str, arguments)]
    environment = machine(devices) | {"PYTHON": sys.executable, "LOG_DIR": str(logs)}
    return _run(command, environment, check)


def read_rows(workdir: Path) -> list[dict[str, str]]:
    """Return the rows of training_metrics.csv."""
    with open(workdir / "training_metrics.csv") as file:
        return list(csv.DictReader(file))


def read_metrics(workdir: Path) -> list[dict[str, str]]:
    """Return the rows of training_metrics.csv without the columns that depend on time."""
    return [
        {name: x for name, x in row.items() if "second" not in name and "perf/" not in name}
        for row in read_rows(workdir)
    ]


def read_steps(workdir: Path) -> list[dict[str, str]]:
    """Return the rows of `read_metrics` that belong to steps of PPO, not to evaluations."""
    return [row for row in read_metrics(workdir) if row["reward/mean"]]


def read_evaluations(workdir: Path) -> list[dict[str, Any]]:
    """Return the figures of the evaluations of a run."""
    return json.loads((workdir / "summary.json").read_text())["evaluations"]


def read_lines(path: Path) -> list[Any]:
    """Return the values of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_equal_runs(workdir: Path, other: Path) -> None:
    """Assert equal metrics (except timings), evaluations, samples and weights, bit for bit."""
    assert list(read_samples(workdir)) == list(read_samples(other))
    assert read_metrics(workdir) == read_metrics(other)
    assert read_evaluations(workdir) == read_evaluations(other)
    weights = [path.relative_to(other) for path in other.rglob("*model.safetensors")]
    assert weights
    for path in weights:
        assert (workdir / path).read_bytes() == (other / path).read_bytes(), path
