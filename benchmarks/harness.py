"""Two or more programs, each in a process of its own, timed turn by turn: what a noisy machine does to one it does to all.

A worker is a program that calls `serve(turn)`. It builds and compiles, says that it is ready, and then waits: while one
worker takes its turn the others hold no core. Workers may live in different Python environments, which is how rivals keep
theirs; they need this file alone, which imports the standard library only.
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
    """The worker's side: runs `turn` each time that it is asked to, until its input ends.

    Args:
      turn: does the work once; returns figures (numbers, or dicts of them), to which `seconds`, its time, is added if absent.
      packages: whose versions to report.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the error stream, not between the answers
    versions = {name: importlib.metadata.version(name) for name in packages}

    def say(answer):
        print(json.dumps(answer), file=channel, flush=True)

    say({"versions": {"python": platform.python_version()} | versions})
    for _ in sys.stdin:
        start = time.perf_counter()
        figures = turn()
        say({"seconds": time.perf_counter() - start} | figures)


class Worker:
    """A process that answers turn by turn."""

    def __init__(self, name: str, program: str, settings: dict, python: str | None = None):
        """Starts workers/PROGRAM with the settings as JSON. `python`: of its environment; None: this one."""
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
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.name} ended with exit status {self._process.wait()}; its errors are above"
            )
        return json.loads(line)


def interleave(workers: list[Worker], turns: int, warm_up: int) -> dict[str, list[dict]]:
    """Each worker's answers to `turns` turns, taken in rounds, the first `warm_up` rounds dropped; the order turns about."""
    answers = {worker.name: [] for worker in workers}
    for round_number in range(warm_up + turns):
        for worker in workers[:: 1 if round_number % 2 else -1]:
            answers[worker.name].append(worker.turn())
        last = ", ".join(f"{name} {given[-1]['seconds']:.3f} s" for name, given in answers.items())
        print(f"round {round_number + 1}/{warm_up + turns}: {last}", file=sys.stderr, flush=True)
    return {name: given[warm_up:] for name, given in answers.items()}


def check_sides(parser: argparse.ArgumentParser, args: argparse.Namespace, known) -> None:
    """Ends with a message where --sides names what is not there, or needs --peers."""
    if wrong := [side for side in args.sides if side not in known]:
        parser.error(f"--sides {','.join(wrong)}: expected some of {', '.join(known)}")
    if not args.peers and set(args.sides) - {"ours"}:
        parser.error("--peers: needed for all sides but ours")


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine() -> dict:
    """What the figures were taken on."""
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
    """Writes results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
