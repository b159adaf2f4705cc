"""Disturb tiny runs at random instants, resume them, and compare them with undisturbed ones.

    python tests/chaos.py --faults 1000 --seed 0

A run is disturbed, resumed and disturbed again until it is complete. Then every exported file, each
figure of training_metrics.csv except times, all evaluations and the training examples of each step
must equal those of an undisturbed run. After a difference the work directory is kept, and the exit
code is 1.
"""

import argparse
import collections
import csv
import dataclasses
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from chaos_process import STARTING, Hang, Processes
from chaos_variants import VARIANTS, Variant, write_inputs

KINDS = ("kill", "SIGTERM", "SIGINT", "disk full", "damage")
# The exit codes that a fault may have beside 0, for a run that was over or did not notice. Before
# the interpreter has installed its handlers, a signal ends a process by itself.
EXIT_CODES = {
    "kill": {-9},
    "damage": {-9},
    "kill one": {-9, 1},
    "SIGTERM": {143, -15},
    "SIGINT": {130, -2},
    "disk full": {1},
}
MAX_FAULTS = 8  # of one run, which then completes
WRITING_SECONDS = 0.6  # a checkpoint is written in the background for about as long


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault as it happened.

    Attributes:
      variant: name of the variant.
      kind: what was done.
      phase: what the run was doing.
      codes: the exit codes.
    """

    variant: str
    kind: str
    phase: str
    codes: tuple[int, ...]


@dataclasses.dataclass
class Reference:
    """An undisturbed run.

    Attributes:
      workdir: its work directory.
      durations: the longest duration of each phase, in seconds.
      occurrences: how often each phase began.
      examples: for each step the announced ids of its examples.
    """

    workdir: Path
    durations: dict[str, float]
    occurrences: collections.Counter[str]
    examples: dict[int, set[str]]


class Failure(Exception):
    """A run that a fault has changed."""


class Chaos:
    """Disturbs runs and counts faults.

    Attributes:
      faults: all faults so far.
      failures: the number of runs that a fault has changed.
      disk_tracebacks: the number of full disks that ended a run with a traceback.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        """Write the inputs of all runs to `folder`."""
        self.faults: list[Fault] = []
        self.failures = 0
        self.disk_tracebacks = 0
        self._folder = folder
        self._seed = seed
        self._references: dict[str, Reference] = {}
        write_inputs(folder / "inputs")

    def disturb_run(self, name: str, number: int, max_faults: int = MAX_FAULTS) -> None:
        """Disturb a run until it is complete, and compare it.

        Args:
          name: of its variant.
          number: of the run; it seeds the faults.
          max_faults: at most this many faults.
        """
        if name not in self._references:
            self._references[name] = self._run_undisturbed(name)
        reference = self._references[name]
        rng = random.Random(f"{self._seed} {number}")
        workdir = self._folder / f"{number:04d}_{name.replace(' ', '_')}"
        examples: dict[int, set[str]] = collections.defaultdict(set)
        log: list[str] = []
        try:
            is_complete, faults = False, 0
            while not is_complete:
                disturbs = faults < max_faults
                is_complete, is_disturbed = self._start_once(
                    name, workdir, rng if disturbs else None, examples, log
                )
                faults += is_disturbed
            compare_runs(VARIANTS[name], workdir, reference, examples)
        except (Failure, Hang) as error:
            self.failures += 1
            (self._folder / f"{workdir.name}.log").write_text("".join(log))
            print(f"FAILED: {workdir}: {error}", flush=True)
        else:
            shutil.rmtree(workdir)
            print(f"run {number}, {name}: equal after {faults} faults", flush=True)

    def _run_undisturbed(self, name: str) -> Reference:
        workdir = self._folder / f"undisturbed_{name.replace(' ', '_')}"
        processes = Processes(VARIANTS[name], self._folder / "inputs", workdir)
        codes = processes.wait()
        if any(codes):
            raise RuntimeError(f"the undisturbed run failed: {''.join(processes.lines)}")
        validate_examples(processes.examples)
        print(f"undisturbed run, {name}: {_seconds(processes.durations)}", flush=True)
        return Reference(workdir, processes.durations, processes.occurrences, processes.examples)

    def _start_once(
        self,
        name: str,
        workdir: Path,
        rng: random.Random | None,
        examples: dict[int, set[str]],
        log: list[str],
    ) -> tuple[bool, bool]:
        """Start a run and disturb it, unless `rng` is `None`.

        Returns:
          Whether the run is complete, and whether it was disturbed.
        """
        variant = VARIANTS[name]
        kind = phase = None
        if rng is not None:
            kind, phase, occurrence = self._draw_fault(name, workdir, rng)
        processes = Processes(variant, self._folder / "inputs", workdir)
        fault = None
        try:
            if rng is not None and processes.wait_for_phase(phase, occurrence):
                seconds = self._references[name].durations[phase]
                if phase == "checkpointing":
                    seconds = max(seconds, WRITING_SECONDS)
                processes.follow(rng.uniform(0, seconds))
                disturbed_phase = processes.phase
                processes.disturb(kind, rng)
                fault = Fault(name, kind, disturbed_phase, processes.wait())
            codes = processes.wait()
        finally:
            processes.kill()
            log += [*processes.lines, f"-- {fault or 'no fault'}\n"]
        for step, ids in processes.examples.items():
            examples[step] |= ids
        if fault is None:
            if any(codes):
                raise Failure(f"exit codes {codes} without a fault")
            return True, False
        self._record(fault, "".join(processes.lines))
        if kind == "damage" and rng is not None:
            damage_newest_checkpoint(workdir, rng)
            return False, True
        return not any(codes), True

    def _draw_fault(self, name: str, workdir: Path, rng: random.Random) -> tuple[str, str, int]:
        """Return the kind of the next fault, and the phase and its occurrence to wait for."""
        variant = VARIANTS[name]
        kinds = [
            kind for kind in KINDS if variant.promises_signals or kind not in ("SIGTERM", "SIGINT")
        ]
        if variant.processes > 1:
            kinds.append("kill one")
        kind = rng.choice(kinds)
        phases = set(self._references[name].durations)
        # A model is made before anything else, and once.
        if (workdir / "model" / "config.json").exists():
            phases.discard("making the model")
        phase = rng.choice(sorted(phases))
        if phase == "compiling":
            self._drop_compiled_programs(rng)
        is_rare = self._references[name].occurrences[phase] <= 3
        return kind, phase, 1 if is_rare else rng.choice((1, 1, 2, 3))

    def _drop_compiled_programs(self, rng: random.Random) -> None:
        """Remove a tenth of the programs that runs share, so that some are compiled again."""
        programs = sorted((self._folder / "inputs" / "compiled").glob("*"))
        for path in programs:
            if rng.random() < 0.1:
                path.unlink(missing_ok=True)

    def _record(self, fault: Fault, output: str) -> None:
        self.faults.append(fault)
        print(
            f"  {len(self.faults)}: {fault.variant}, {fault.kind} while {fault.phase}: "
            f"exit codes {fault.codes}",
            flush=True,
        )
        unexpected = set(fault.codes) - EXIT_CODES[fault.kind] - {0}
        if unexpected:
            raise Failure(f"{fault}: unexpected exit codes")
        if "Traceback" not in output:
            return
        # A signal ends a run in one line, once the command has installed its handlers.
        if fault.kind in ("SIGTERM", "SIGINT") and fault.phase != STARTING:
            raise Failure(f"{fault}: a traceback")
        self.disk_tracebacks += fault.kind == "disk full"


def validate_examples(examples: dict[int, set[str]]) -> None:
    """Validate that a run consumes each example once per epoch, one batch per step."""
    steps = sorted(examples)
    if steps != list(range(len(steps))) or any(len(ids) != 1 for ids in examples.values()):
        raise Failure(f"examples of steps {steps}")
    consumed = [id_ for step in steps for id_ in next(iter(examples[step])).split()]
    # 24 examples: the three steps of the first epoch consume each of them.
    if sorted(map(int, consumed[:24])) != list(range(24)):
        raise Failure(f"an epoch consumes {consumed[:24]}")


def damage_newest_checkpoint(workdir: Path, rng: random.Random) -> None:
    """Change one byte of the newest checkpoint, if there is a checkpoint."""
    steps = [path for path in workdir.glob("checkpoints/*") if path.name.isdigit()]
    if not steps:
        return
    newest = max(steps, key=lambda path: int(path.name))
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)


def compare_runs(
    variant: Variant, workdir: Path, reference: Reference, examples: dict[int, set[str]]
) -> None:
    """Compare a completed run with an undisturbed one.

    Raises:
      Failure: they differ.
    """
    if examples != reference.examples:
        raise Failure(f"examples {dict(examples)} instead of {dict(reference.examples)}")
    ours, theirs = read_metrics(workdir), read_metrics(reference.workdir)
    if ours != theirs:
        raise Failure(f"training_metrics.csv differs: {_first_difference(ours, theirs)}")
    summaries = (
        json.loads((folder / "summary.json").read_text()) for folder in (workdir, reference.workdir)
    )
    ours, theirs = (
        {name: summary[name] for name in ("evaluations", "steps", "total_steps")}
        for summary in summaries
    )
    if ours != theirs:
        raise Failure(f"summary.json: {ours} instead of {theirs}")
    for export in variant.exports:
        ours, theirs = read_files(workdir / export), read_files(reference.workdir / export)
        different = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
        if different:
            raise Failure(f"{export}: {different} differ")
    # Nothing temporary remains.
    ours, theirs = (
        sorted(path.name for path in folder.iterdir()) for folder in (workdir, reference.workdir)
    )
    if ours != theirs:
        raise Failure(f"the work directory holds {ours} instead of {theirs}")


def read_metrics(workdir: Path) -> list[dict[str, str]]:
    """Return the rows of training_metrics.csv without the columns that depend on time."""
    with open(workdir / "training_metrics.csv") as file:
        return [
            {name: value for name, value in row.items() if "second" not in name}
            for row in csv.DictReader(file)
        ]


def _first_difference(ours: list[dict], theirs: list[dict]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} rows instead of {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        for name in a | b:
            if a.get(name) != b.get(name):
                return f"step {b['step']}, {name}: {a.get(name)} instead of {b.get(name)}"
    return "nothing"


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder by their names."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def print_tables(faults: list[Fault]) -> None:
    """Print the faults by kind and phase, and by kind and variant."""
    kinds = sorted({fault.kind for fault in faults})
    for attribute in ("phase", "variant"):
        counts = collections.Counter((getattr(fault, attribute), fault.kind) for fault in faults)
        print(f"\n| {attribute} | {' | '.join(kinds)} | all |\n|{' --- |' * (len(kinds) + 2)}")
        for name in sorted({name for name, _ in counts}):
            row = [counts[name, kind] for kind in kinds]
            print(f"| {name} | {' | '.join(map(str, row))} | {sum(row)} |")
        totals = [sum(fault.kind == kind for fault in faults) for kind in kinds]
        print(f"| all | {' | '.join(map(str, totals))} | {len(faults)} |")


def _seconds(durations: dict[str, float]) -> str:
    return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in durations.items())


def main() -> int:
    """Disturb runs of all variants until there were enough faults; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names with commas between")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after these")
    arguments = parser.parse_args()
    # A shell ignores SIGINT for what it runs in the background, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="jax_ppo_chaos_"))
    chaos = Chaos(folder, arguments.seed)
    names = arguments.variants.split(",")
    number = 0
    while len(chaos.faults) < arguments.faults:
        if time.monotonic() - started > arguments.minutes * 60:
            break
        chaos.disturb_run(names[number % len(names)], number)
        number += 1
    print_tables(chaos.faults)
    minutes = (time.monotonic() - started) / 60
    print(
        f"\nseed {arguments.seed}: {len(chaos.faults)} faults in {number} runs, {minutes:.0f} "
        f"minutes; {chaos.failures} runs differ; {chaos.disk_tracebacks} full disks ended in a "
        "traceback"
    )
    if chaos.failures:
        print(f"their work directories are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
