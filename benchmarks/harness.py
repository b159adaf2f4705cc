"""Time two or more worker processes in alternating turns, so that machine noise hits them equally.

A worker is a program that calls `serve(turn)`. It builds and compiles, reports that it is ready,
and then waits: while one worker takes its turn, the others leave the cores idle. Workers may run in
different Python environments, which allows each peer library its own; they need only this file,
which imports nothing but the standard library.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
DATA = Path(os.environ.get("JAX_PPO_DATA", Path(__file__).parents[2] / "shared" / "data"))
THREADS = 2


def serve(turn: Callable[[], dict], packages: tuple[str, ...] = ()) -> None:
    """Run `turn` on every request until standard input ends (the worker's side).

    Args:
      turn: Does the work once and returns figures (numbers, or dicts of numbers). `seconds`, its
        wall-clock time, is added if absent.
      packages: Packages whose versions are reported.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # library output goes to stderr, not in between the answers
    versions = {name: importlib.metadata.version(name) for name in packages}

    def say(answer: dict) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    say({"versions": {"python": platform.python_version()} | versions})
    for _ in sys.stdin:
        start = time.perf_counter()
        figures = turn()
        say({"seconds": time.perf_counter() - start} | figures)


class Worker:
    """A worker process that runs one turn per request."""

    def __init__(self, name: str, program: str, settings: dict, python: str | None = None) -> None:
        """Start workers/PROGRAM with the settings as JSON.

        Args:
          name: Name of the worker in results and messages.
          program: File name in the workers/ folder.
          settings: JSON-serialisable settings passed on the command line.
          python: Interpreter of the worker's environment; `None` for the current one.
        """
        self.name, here = name, Path(__file__).parent
        environment = {
            "OMP_NUM_THREADS": str(THREADS),
            "MKL_NUM_THREADS": str(THREADS),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join((str(here), str(here.parent))),
        }
        command = [python or sys.executable, str(here / "workers" / program), json.dumps(settings)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.versions = self._answer()["versions"]

    def turn(self) -> dict:
        """Run one turn and return its figures."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the worker and wait for it."""
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.name} exited with status {self._process.wait()}; its errors are above"
            )
        return json.loads(line)


def interleave(workers: list[Worker], turns: int, warm_up: int) -> dict[str, list[dict]]:
    """Run `turns` turns of every worker in rounds and return the answers by worker name.

    The first `warm_up` rounds are dropped. The order of the workers reverses every round.
    """
    answers = {worker.name: [] for worker in workers}
    for round_number in range(warm_up + turns):
        for worker in workers[:: 1 if round_number % 2 else -1]:
            answers[worker.name].append(worker.turn())
        last = ", ".join(f"{name} {given[-1]['seconds']:.3f} s" for name, given in answers.items())
        print(f"round {round_number + 1}/{warm_up + turns}: {last}", file=sys.stderr, flush=True)
    return {name: given[warm_up:] for name, given in answers.items()}


def check_sides(
    parser: argparse.ArgumentParser, args: argparse.Namespace, known: list[str]
) -> None:
    """Exit with an error if --sides contains an unknown name or requires --peers."""
    if wrong := [side for side in args.sides if side not in known]:
        parser.error(f"--sides {','.join(wrong)}: expected some of {', '.join(known)}")
    if not args.peers and set(args.sides) - {"ours"}:
        parser.error("--peers: required for every side except ours")


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


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
