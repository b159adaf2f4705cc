"""A watchdog over a run: without progress for too long, it names the phase and shows the stacks.

Progress is reported by `report_progress`: when a phase begins or ends, a tensor was loaded, or a
program compiled. A hung device, network or reward function stops all of these. In a run of several
processes the one that hangs is the first to stop, while the others continue until they need it; so
the first watchdog to end its process names the right one.
"""

import contextlib
import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from jax_ppo.runtime import compat

_CHECKS_PER_LIMIT = 20


class _Watchdog:
    """The time of the last progress, and a thread that looks at it."""

    def __init__(self, seconds: float, on_stall: Callable[[str], object]) -> None:
        self.phase = "starting"
        self.moved_at = time.monotonic()
        self._seconds = seconds
        self._on_stall = on_stall
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(self._seconds / _CHECKS_PER_LIMIT):
            if time.monotonic() - self.moved_at < self._seconds:
                continue
            # faulthandler shows the 100 newest threads: the main one is not always among them.
            frame = compat.main_thread_frame()
            if frame is not None and sys.__stderr__ is not None:
                print("Main thread (most recent call last):", file=sys.__stderr__)
                traceback.print_stack(frame, file=sys.__stderr__)
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            self._on_stall(
                f"nothing has moved for {self._seconds:g} s (config.distributed.stall_seconds) "
                f"since the phase {self.phase!r}; the stacks are above"
            )
            return


_active: _Watchdog | None = None


@contextlib.contextmanager
def watch(seconds: float, on_stall: Callable[[str], object]) -> Iterator[None]:
    """Watch over the block.

    Args:
      seconds: the longest time without progress; 0 sets no limit.
      on_stall: called with the reason in a separate thread; it should end the process.
    """
    global _active
    if not seconds or _active is not None:
        yield
        return
    _active = _Watchdog(seconds, on_stall)
    try:
        yield
    finally:
        watchdog = _active
        _active = None
        watchdog.stop()


def report_progress(phase: str) -> None:
    """Record that the run has reached a phase, or makes progress in it."""
    if _active is not None:
        _active.phase = phase
        _active.moved_at = time.monotonic()
