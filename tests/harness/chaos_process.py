"""Start the processes of a run, follow their announcements, and disturb them."""

import collections
import contextlib
import os
import queue
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import quick_compilation
from chaos_variants import Variant
from waiting import keep_port

ROOT = Path(__file__).parents[2]
COMMAND = Path(__file__).with_name("chaos_command.py")
# Seconds of a start or of an end before a run counts as hung. Processes that wait for one that has
# ended before it connected end by themselves after 300.
TIMEOUT = 600.0
STARTING = "starting"
# Like the tests: compiling quickly matters more than running quickly.
quick_compilation.set_flags(print)
EXAMPLES = re.compile(r"step (\d+) of examples ([\d ]+)")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": os.environ["XLA_FLAGS"],
}


class Hang(Exception):
    """A run that neither ends nor announces anything for TIMEOUT seconds."""


class Processes:
    """The running processes of one start of a run.

    Attributes:
      phase: the phase announced last by process 0.
      durations: the longest duration of each phase so far, in seconds.
      occurrences: how often each phase has begun.
      examples: for each step the announced ids of its examples, once per announcement.
      lines: all lines of all processes.
    """

    def __init__(
        self, variant: Variant, inputs: Path, workdir: Path, environment_url: str = ""
    ) -> None:
        """Start the processes.

        Args:
          variant: the kind of run.
          inputs: the folder of `chaos_variants.write_inputs`.
          workdir: the run's work directory.
          environment_url: of the run's environment server, if it has one.
        """
        config = inputs / ("ppo.py" if variant.command == "train" else "supervised.py")
        arguments = [variant.command, f"--config={config}", f"--workdir={workdir}"]
        arguments += [
            f"--config.{option.format(inputs=inputs, server=environment_url)}"
            for option in variant.options
        ]
        environment = {**os.environ, **ENVIRONMENT, "JAX_NUM_CPU_DEVICES": str(variant.devices)}
        # What killed processes leave there goes with the folder.
        environment["TMPDIR"] = str(inputs / "temporary")
        self._kept_port = contextlib.ExitStack()
        if variant.processes > 1:
            kept = self._kept_port.enter_context(keep_port())
            environment["JAX_COORDINATOR_ADDRESS"] = f"localhost:{kept.getsockname()[1]}"
            environment["JAX_NUM_PROCESSES"] = str(variant.processes)
        self.phase = STARTING
        self.durations: dict[str, float] = collections.defaultdict(float)
        self.occurrences: collections.Counter[str] = collections.Counter()
        self.examples: dict[int, set[str]] = collections.defaultdict(set)
        self.lines: list[str] = []
        self._phase_started = time.monotonic()
        self._queue: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._open_outputs = variant.processes
        self._processes: list[subprocess.Popen[str]] = []
        for number in range(variant.processes):
            if variant.processes > 1:
                environment["JAX_PROCESS_ID"] = str(number)
            self._processes.append(_start_interpreter(arguments, environment))
        for number in range(variant.processes):
            threading.Thread(target=self._read, args=(number,), daemon=True).start()

    def wait_for_phase(self, phase: str, occurrence: int) -> bool:
        """Follow the run until it announces a phase for the given time, counted from 1.

        Returns:
          Whether the phase began; otherwise the run has ended.
        """
        if phase == STARTING:
            return True
        while occurrence:
            started = self._next_phase(TIMEOUT)
            if started is None:
                return False
            occurrence -= started == phase
        return True

    def follow(self, seconds: float) -> None:
        """Follow the run for some time, or until it ends."""
        end = time.monotonic() + seconds
        while self._open_outputs and (left := end - time.monotonic()) > 0:
            try:
                self._take_line(left)
            except queue.Empty:
                return

    def is_over(self) -> bool:
        """Return whether every process has ended."""
        return all(process.poll() is not None for process in self._processes)

    def disturb(self, kind: str, rng: random.Random) -> None:
        """Cause a fault of a kind now."""
        processes = self._processes
        if kind == "kill one":
            rng.choice(processes).kill()
        elif kind == "file limit":
            # A file may not grow beyond the limit: the next write beyond it fails with EFBIG.
            limit = int(2 ** rng.uniform(0, 17))
            for process in processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        else:
            number = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}.get(kind, signal.SIGKILL)
            for process in processes:
                process.send_signal(number)

    def wait(self) -> tuple[int, ...]:
        """Follow the run to its end, and return the exit codes."""
        while self._open_outputs:
            self._next_phase(TIMEOUT)
        self._end_phase()
        return tuple(process.wait() for process in self._processes)

    def kill(self) -> None:
        """Kill whatever still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._kept_port.close()

    def _read(self, number: int) -> None:
        output = self._processes[number].stdout
        assert output is not None
        for line in output:
            self._queue.put((number, line))
        self._queue.put((number, None))
        output.close()

    def _next_phase(self, timeout: float) -> str | None:
        """Return the next phase that process 0 announces, or `None` at the end of the run."""
        while self._open_outputs:
            try:
                phase = self._take_line(timeout)
            except queue.Empty:
                raise Hang(f"no output in {timeout:g} s while {self.phase}") from None
            if phase:
                return phase
        return None

    def _take_line(self, timeout: float) -> str | None:
        """Return the phase that the next line announces, if it does.

        Raises:
          queue.Empty: there was no line in time.
        """
        number, line = self._queue.get(timeout=max(timeout, 0))
        if line is None:
            self._open_outputs -= 1
            return None
        self.lines.append(f"{number}: {line}")
        # The progress bar leaves its own characters before a line.
        _, found, announcement = line.rstrip().partition("chaos: ")
        if not found or number:
            return None
        if match := EXAMPLES.match(announcement):
            self.examples[int(match[1])].add(match[2])
            return None
        self._end_phase()
        self.phase = announcement.removeprefix("phase ")
        self.occurrences[self.phase] += 1
        return self.phase

    def _end_phase(self) -> None:
        now = time.monotonic()
        seconds = now - self._phase_started
        self.durations[self.phase] = max(self.durations[self.phase], seconds)
        self._phase_started = now


def _start_interpreter(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(COMMAND), *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
