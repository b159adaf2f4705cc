"""Disturb tiny runs at random instants, resume them, and compare them with undisturbed ones.

    python tests/harness/chaos.py --faults 1000 --seed 0 --parallel 2

A run is disturbed, resumed and disturbed again until it is complete. Then every exported file, each
figure of training_metrics.csv except times, all evaluations and the training examples of each step
must equal an undisturbed run's. After a difference the work directory is kept, and the exit
code is 1.

The faults of a run follow from the seed and its number, the instant also from the load of the
machine: `--run NUMBER` disturbs one run again.

The environment server of a variant is also killed and started again, every few seconds.

A limit on the size of files stands for a disk without space.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import chaos_environment
from chaos_compare import Failure, Reference, compare_runs, validate_examples
from chaos_process import STARTING, Hang, Processes
from chaos_variants import VARIANTS, Variant, write_inputs
from jax_ppo.runtime.faults import LOST_EXIT_CODE
from waiting import keep_port

KINDS = ("kill", "SIGTERM", "SIGINT", "damage", "file limit")
# The exit codes that a fault may have, beside 0 for a run that did not notice a limit or was over.
# Before the interpreter has installed its handlers, a signal ends a process by itself.
EXIT_CODES = {
    "kill": {-9},
    "damage": {-9},
    # A collective of the others fails, or JAX aborts them.
    "kill one": {-9, LOST_EXIT_CODE, -signal.SIGABRT},
    "SIGTERM": {143},
    "SIGINT": {130},
    "file limit": {0, 1},
}
# Before the command installs its handlers of signals, and after the interpreter has removed them.
WITHOUT_HANDLERS_EXIT_CODES = {"SIGTERM": {-15}, "SIGINT": {-2}}
FINISHING = "finishing"  # the last phase
# The phases of a start after the last step; the others come before it.
LAST_PHASES = {STARTING, "loading", "exporting", FINISHING}
MAX_FAULTS = 8  # of one run, which then completes
WRITING_SECONDS = 0.6  # a checkpoint is written in the background for about as long
LONGEST_SERVICE = 4.0  # seconds between two deaths of an environment server


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


class Chaos:
    """Disturbs runs and counts faults.

    Attributes:
      faults: all faults so far.
      failures: the numbers of the runs that a fault has changed.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        """Write the inputs of all runs to `folder`.

        Args:
          folder: holds everything that the runs read and write.
          seed: of the faults.
        """
        self.faults: list[Fault] = []
        self.failures: list[int] = []
        self._folder = folder
        self._seed = seed
        self._references: dict[str, Reference] = {}
        self._reference_locks = collections.defaultdict(threading.Lock)
        write_inputs(folder / "inputs")

    def disturb_run(self, name: str, number: int, max_faults: int = MAX_FAULTS) -> None:
        """Disturb a run until it is complete, and compare it.

        Args:
          name: of its variant.
          number: of the run; it seeds the faults.
          max_faults: at most this many faults.
        """
        # Several runs of a variant share its undisturbed run.
        with self._reference_locks[name]:
            if name not in self._references:
                self._references[name] = self._run_undisturbed(name)
        folder = self._folder / f"{number:04d}_{name.replace(' ', '_')}"
        episodes = self._folder / f"{folder.name}.episodes"
        rng = random.Random(f"{self._seed} {number}")
        workdir = folder / "run"
        folder.mkdir()
        examples: dict[int, set[str]] = collections.defaultdict(set)
        log: list[str] = []
        try:
            is_complete, faults = False, 0
            with serving(VARIANTS[name], episodes, random.Random(rng.random())) as url:
                while not is_complete:
                    is_complete, is_disturbed = self._start_once(
                        name, workdir, rng if faults < max_faults else None, examples, log, url
                    )
                    faults += is_disturbed
            compare_runs(VARIANTS[name], workdir, self._references[name], examples)
        except (Failure, Hang) as error:
            self.failures.append(number)
            (folder / "log").write_text("".join(log))
            print(f"FAILED: run {number}, {name}: {error}", flush=True)
        else:
            print(f"run {number}, {name}: equal after {faults} faults", flush=True)
            shutil.rmtree(folder)

    def _run_undisturbed(self, name: str) -> Reference:
        workdir = self._folder / f"undisturbed_{name.replace(' ', '_')}"
        with serving(VARIANTS[name], self._folder / f"{workdir.name}.episodes", None) as url:
            processes = Processes(VARIANTS[name], self._folder / "inputs", workdir, url)
            codes = processes.wait()
            processes.kill()
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
        environment_url: str,
    ) -> tuple[bool, bool]:
        """Start a run and disturb it, unless `rng` is `None`.

        Returns:
          Whether the run is complete, and whether it was disturbed.
        """
        if rng is not None:
            kind, phase, occurrence = self._draw_fault(name, workdir, rng)
        processes = Processes(VARIANTS[name], self._folder / "inputs", workdir, environment_url)
        fault = None
        try:
            if rng is not None and processes.wait_for_phase(phase, occurrence):
                seconds = self._references[name].durations[phase]
                if phase == "checkpointing":
                    seconds = max(seconds, WRITING_SECONDS)
                processes.follow(rng.uniform(0, seconds))
                if not processes.is_over():
                    disturbed_phase = processes.phase
                    processes.disturb(kind, rng)
                    codes = processes.wait()
                    if kind == "damage" and not damage_newest_checkpoint(workdir, rng):
                        kind = "kill"
                    fault = Fault(name, kind, disturbed_phase, codes)
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
        return not any(codes) and kind != "damage", True

    def _draw_fault(self, name: str, workdir: Path, rng: random.Random) -> tuple[str, str, int]:
        """Return the kind of the next fault, and the phase and its occurrence to wait for."""
        reference = self._references[name]
        kind = rng.choice([*KINDS, *["kill one"] * 3 * (VARIANTS[name].processes > 1)])
        phases = set(reference.durations)
        if (workdir / "checkpoints" / str(reference.occurrences["updating"])).exists():
            phases &= LAST_PHASES
        phase = rng.choice(sorted(phases))
        if phase == "compiling":
            self._drop_compiled_programs(rng)
        is_rare = reference.occurrences[phase] <= 3
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
        judge_fault(fault, output)


def judge_fault(fault: Fault, output: str) -> None:
    """Validate the exit codes of a fault, and that it has ended the run in one line.

    Args:
      fault: the fault.
      output: of all processes.

    Raises:
      Failure: the run has ended in another way, or has ignored the fault.
    """
    expected = set(EXIT_CODES[fault.kind])
    if fault.phase == FINISHING:
        expected.add(0)
    if fault.phase == STARTING and fault.kind == "kill one":
        expected.add(1)  # it had not connected yet
    if fault.phase in (STARTING, FINISHING):
        expected |= WITHOUT_HANDLERS_EXIT_CODES.get(fault.kind, set())
    if not set(fault.codes) <= expected:
        raise Failure(f"{fault}: unexpected exit codes")
    # An interpreter that has not installed the command's handlers shows where SIGINT hit it.
    is_early = fault.phase == STARTING and set(fault.codes) & {-2, -15}
    ends_in_one_line = fault.kind in ("SIGTERM", "SIGINT", "file limit")
    if ends_in_one_line and not is_early and "Traceback" in output:
        raise Failure(f"{fault}: a traceback")


@contextlib.contextmanager
def serving(variant: Variant, folder: Path, rng: random.Random | None) -> Iterator[str]:
    """Run the environment server of a variant, and kill and restart it at instants that rng draws.

    Without `rng` it is not killed.

    Yields:
      Its address; "" if the variant has none.
    """
    if not any("{server}" in option for option in variant.options):
        yield ""
        return
    is_over = threading.Event()
    restarts = 0
    with keep_port() as kept:
        port = kept.getsockname()[1]
        server = chaos_environment.start(port, folder)

        def kill() -> None:
            nonlocal server, restarts
            while rng is not None and not is_over.wait(rng.uniform(0, LONGEST_SERVICE)):
                server.kill()
                server.wait()
                server = chaos_environment.start(port, folder)
                restarts += 1

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield f"http://localhost:{port}"
        finally:
            is_over.set()
            thread.join()
            server.kill()
            server.wait()
    if rng is not None:
        print(f"  {folder.name}: the server was killed {restarts} times", flush=True)


def damage_newest_checkpoint(workdir: Path, rng: random.Random) -> bool:
    """Change one byte of the newest checkpoint; return whether there is a checkpoint."""
    steps = [path for path in workdir.glob("checkpoints/*") if path.name.isdigit()]
    if not steps:
        return False
    newest = max(steps, key=lambda path: int(path.name))
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)
    return True


def _seconds(durations: dict[str, float]) -> str:
    return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in durations.items())


def disturb_runs(chaos: Chaos, numbers: Iterator[int], names: list[str], faults: int) -> int:
    """Disturb one run after the other until there were enough faults; return how many runs."""
    count = 0
    while len(chaos.faults) < faults and (number := next(numbers, None)) is not None:
        chaos.disturb_run(names[number % len(names)], number)
        count += 1
    return count


def main() -> int:
    """Disturb runs of all variants until there were enough faults; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names with commas between")
    parser.add_argument("--run", type=int, help="number of the only run to disturb")
    arguments = parser.parse_args()
    # A shell ignores SIGINT for what it runs in the background, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    names = arguments.variants.split(",")
    numbers = itertools.count() if arguments.run is None else iter([arguments.run])
    folder = Path(tempfile.mkdtemp(prefix="jax_ppo_chaos_"))
    failures: list[int] = []
    try:
        chaos = Chaos(folder, arguments.seed)
        with concurrent.futures.ThreadPoolExecutor(arguments.parallel) as pool:
            failures = chaos.failures
            workers = [
                pool.submit(disturb_runs, chaos, numbers, names, arguments.faults)
                for _ in range(arguments.parallel)
            ]
            count = sum(worker.result() for worker in workers)
    finally:
        if not failures:
            shutil.rmtree(folder)
    for attribute in ("kind", "phase", "variant"):
        counts = collections.Counter(getattr(fault, attribute) for fault in chaos.faults)
        print(f"by {attribute}: {', '.join(f'{name} {n}' for name, n in counts.most_common())}")
    minutes = (time.monotonic() - started) / 60
    print(
        f"\nseed {arguments.seed}: {len(chaos.faults)} faults in {count} runs, {minutes:.0f} "
        f"minutes; {len(failures)} runs differ"
    )
    if failures:
        print(f"runs {failures}: their work directories and output are in {folder}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
