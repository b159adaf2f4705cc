"""Time two or more worker processes in alternating turns, so that machine noise hits them equally.

A worker is a program that calls `serve(turn)`. It builds and compiles, reports that it is ready,
and then waits: while one worker takes its turn, the others leave the cores idle. Workers may run in
different Python environments, which allows each peer library its own; they need only this file,
which imports nothing but the standard library.
"""

import argparse
import csv
import importlib.metadata
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DATA = Path(os.environ.get("JAX_PPO_DATA", Path(__file__).parents[2] / "shared" / "data"))
THREADS = 2
SPLIT_TOLERANCE = 0.1  # by which a step's phases may miss the step's time


def serve(
    turn: Callable[[], dict],
    packages: tuple[str, ...] = (),
    split_turn: Callable[[], dict] | None = None,
) -> None:
    """Run a turn on every request until standard input ends (the worker's side).

    Args:
      turn: Does the work once and returns figures (numbers, or dicts of numbers). `seconds`, its
        wall-clock time, `cpu_seconds`, the processor time of all threads, and `peak_gib`, the
        process's largest memory so far, are added if absent.
      packages: Packages whose versions are reported.
      split_turn: Like `turn`, but waits after each phase and returns the `phases`; `turn` by
        default, for workers that compute synchronously.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # library output goes to stderr, not in between the answers
    versions = {name: importlib.metadata.version(name) for name in packages}

    def send(answer: dict) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    send({"versions": {"python": platform.python_version()} | versions})
    for request in sys.stdin:
        work = split_turn if split_turn and request.strip() == "split" else turn
        start = time.perf_counter()
        cpu_start = cpu_seconds()
        figures = work()
        times = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": cpu_seconds() - cpu_start,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        send(times | figures)


def cpu_seconds() -> float:
    """Return the processor time of this process's threads and of the children it waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def end_with_this_process(command: list[str]) -> list[str]:
    """Return the command that runs `command` and is killed when this process ends."""
    launcher = str(Path(__file__).with_name("end_with_parent.py"))
    return [sys.executable, launcher, str(os.getpid()), *command]


def run_command(
    command: str, config: str, workdir: Path, options: dict
) -> list[dict[str, str | float]]:
    """Run a command of jax_ppo; exit with its output if it fails.

    Returns:
      The rows of its training_metrics.csv, each with `cpu_seconds`: the processor seconds of all
      threads from the row before, or from the start of the process, to this one.
    """
    words = [f"--config.{name}={value}" for name, value in options.items()]
    program = [sys.executable, "-m", f"jax_ppo.{command}", f"--config={config}"]
    words = [*program, f"--workdir={workdir}", *words]
    file, log, ends = workdir / "training_metrics.csv", workdir.with_suffix(".log"), [0.0]
    with log.open("w") as output:
        process = subprocess.Popen(
            end_with_this_process(words), cwd=ROOT, stdout=output, stderr=output
        )
        while process.poll() is None:
            time.sleep(0.05)
            rows = len(file.read_text().splitlines()) - 1 if file.exists() else 0
            status = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks = int(status[11]) + int(status[12])
            ends += [ticks / os.sysconf("SC_CLK_TCK")] * (rows + 1 - len(ends))
    if process.returncode:
        sys.exit(f"{' '.join(words)}\n{log.read_text()[-3000:]}")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return [row | {"cpu_seconds": own} for row, own in zip(rows, seconds, strict=True)]


class Worker:
    """A worker process that runs one turn per request."""

    def __init__(
        self,
        name: str,
        program: str,
        settings: dict,
        python: str | None = None,
        platform: str = "cpu",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start workers/PROGRAM with the settings as JSON.

        Args:
          name: Name of the worker in results and messages.
          program: File name in the workers/ folder.
          settings: JSON-serialisable settings passed on the command line.
          python: Interpreter of the worker's environment; `None` for the current one.
          platform: "cpu" or "cuda".
          variables: further environment variables of the worker.
        """
        self.name, here = name, Path(__file__).parent
        environment = {
            "OMP_NUM_THREADS": str(THREADS),
            "MKL_NUM_THREADS": str(THREADS),
            "JAX_PLATFORMS": platform,
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3",  # the workers share a GPU
            "PYTHONPATH": os.pathsep.join(
                (str(here), str(here.parent), os.environ.get("PYTHONPATH", ""))
            ),
        }
        command = [python or sys.executable, str(here / "workers" / program), json.dumps(settings)]
        self._process = subprocess.Popen(
            end_with_this_process(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment | variables,
        )
        self.versions = self._answer()["versions"]

    def turn(self, split: bool = False) -> dict:
        """Run one turn and return its figures, with its `phases` if `split`."""
        self._process.stdin.write("split\n" if split else "go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the worker and wait for it."""
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.name} exited with status {self._process.wait()}; its errors are above"
            )
        return json.loads(line)


def interleave(
    workers: list[Worker], turns: int, warm_up: int, split: bool = False
) -> tuple[dict[str, list[dict]], dict[str, list[dict]]]:
    """Run `turns` turns of every worker in rounds.

    The first `warm_up` rounds are dropped. The order of the workers reverses every round.

    Args:
      workers: Workers that take turns.
      turns: Measured rounds.
      warm_up: Rounds before them.
      split: Follow each turn by one that waits after each phase. Both happen in the same minutes,
        so that a change in the machine's speed affects them alike.

    Returns:
      The answers by worker name, and the answers of the split turns (empty without `split`).
    """
    answers = {worker.name: [] for worker in workers}
    split_answers = {worker.name: [] for worker in workers}
    for round_number in range(warm_up + turns):
        for worker in workers[:: 1 if round_number % 2 else -1]:
            answers[worker.name].append(worker.turn())
            if split:
                split_answers[worker.name].append(worker.turn(split=True))
        latest = ", ".join(
            f"{name} {turns_so_far[-1]['seconds']:.3f} s" for name, turns_so_far in answers.items()
        )
        print(f"round {round_number + 1}/{warm_up + turns}: {latest}", file=sys.stderr, flush=True)
    return (
        {name: all_turns[warm_up:] for name, all_turns in answers.items()},
        {name: all_turns[warm_up:] for name, all_turns in split_answers.items()},
    )


def validate_sides(
    parser: argparse.ArgumentParser, args: argparse.Namespace, known: list[str]
) -> None:
    """Exit with an error if --sides contains an unknown name or requires --peers."""
    if wrong := [side for side in args.sides if side not in known]:
        parser.error(f"--sides {','.join(wrong)}: expected some of {', '.join(known)}")
    if not args.peers and set(args.sides) - {"ours"}:
        parser.error("--peers: required for every side except ours")


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the quartiles, the minimum and the maximum."""
    quartiles = [values[0]] * 3
    if len(values) > 1:
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "median": statistics.median(values),
        "quartile_1": quartiles[0],
        "quartile_3": quartiles[2],
        "min": min(values),
        "max": max(values),
    }


def format_spread(figures: dict[str, float], form: str) -> str:
    """Format the median, and the interquartile range in parentheses."""
    median, low, high = (figures[name] for name in ("median", "quartile_1", "quartile_3"))
    return f"{median:{form}} ({low:{form}}-{high:{form}})"


def machine() -> dict:
    """Describe the machine that the figures were measured on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": THREADS,
        "load_before": os.getloadavg()[0],
    }


def save(name: str, result: dict) -> Path:
    """Write results/NAME.json and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
