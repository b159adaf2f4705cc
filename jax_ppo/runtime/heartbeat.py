"""Lines that say what a run is doing while it prints nothing else.

An activity is work that may take long: loading weights, compiling a program. A thread of the main
process names those in progress, in each thread the innermost, when no line was printed for a while.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

from jax_ppo.runtime import faults

START_SECONDS = 9.0  # without a line before the first step; a user waits for 10 at most
STEP_SECONDS = 60.0  # after it each step prints its line
_CHECK_SECONDS = 0.5


@dataclasses.dataclass(eq=False)
class Activity:
    """Work in progress, from its creation until `end`."""

    name: str  # what is done, such as "loading the actor"
    detail: str = ""  # how far it has come, such as "12/290 tensors"
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    started_at: float = dataclasses.field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        _activities.append(self)
        faults.report_progress()

    def update(self, detail: str) -> None:
        """Record how far the work has come."""
        self.detail = detail
        faults.report_progress()

    def end(self) -> None:
        """Record that the work is over."""
        if self in _activities:
            _activities.remove(self)
        faults.report_progress()


class Heartbeat:
    """The time of the last line, and what to print when it is long ago."""

    def __init__(self, report: Callable[[str], object]) -> None:
        self.printed_at = time.monotonic()
        self.quiet_seconds = START_SECONDS
        self._started_at = self.printed_at
        self._report = report

    def beat(self) -> None:
        """Print a line if none was printed for `quiet_seconds`."""
        now = time.monotonic()
        if now - self.printed_at >= self.quiet_seconds:
            self.printed_at = now
            idle = f"running ({now - self._started_at:.0f} s)"
            self._report(f"... {describe_activities(now) or idle}")


_activities: list[Activity] = []
_active: Heartbeat | None = None


@contextlib.contextmanager
def activity(name: str) -> Iterator[Activity]:
    """Name what the block does."""
    current = Activity(name)
    try:
        yield current
    finally:
        current.end()


def describe_activities(now: float) -> str:
    """Return the innermost activity of each thread with its seconds, "" if there is none."""
    # Later ones replace those that they are part of.
    innermost = {current.thread: current for current in list(_activities)}
    return "; ".join(
        f"{': '.join(filter(None, (x.name, x.detail)))} ({now - x.started_at:.0f} s)"
        for x in innermost.values()
    )


@contextlib.contextmanager
def beating(report: Callable[[str], object]) -> Iterator[None]:
    """Let the run in the block be heard; `report` is called with each line, in another thread."""
    global _active
    if _active is not None:
        yield
        return
    _active = current = Heartbeat(report)
    is_over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError, ValueError):  # closed output: the run notices it itself
            while not is_over.wait(_CHECK_SECONDS):
                current.beat()

    # A daemon: it never keeps a process alive.
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _active = None
        is_over.set()
        thread.join(timeout=_CHECK_SECONDS)  # a line that cannot be written does not delay the run
        _activities.clear()  # of work that failed


def line_printed(is_step: bool = False) -> None:
    """Record that a line was printed; after that of a step, silence may last longer."""
    if _active is not None:
        _active.printed_at = time.monotonic()
        if is_step:
            _active.quiet_seconds = STEP_SECONDS
