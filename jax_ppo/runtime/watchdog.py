"""A watchdog over a run: without progress for too long, it names the phase and shows the stacks.

Progress is reported by `report_progress`: when a phase begins or ends, a tensor was loaded, a
program compiled, a turn of a dialogue answered, or a response scored. A hung device, network or
reward function stops all of these. In a run of several processes the one that hangs is the first to
stop, while the others continue until they need it; so the first watchdog to end its process names
the right one.

Looks are counted, not seconds: a suspended process takes none, so it goes on where it was stopped.
"""

import contextlib
import dataclasses
import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

from jax_ppo.runtime import compat

_LOOKS_PER_LIMIT = 20


@dataclasses.dataclass
class _Progress:
    """The phase in which the run moved last, and after which look of the watchdog."""

    phase: str
    moved_after: int = 0
    looks: int = 0  # so far; only the watchdog sets it, so that no report is lost


_last: _Progress | None = None


@contextlib.contextmanager
def watch(seconds: float, on_stall: Callable[[str], object]) -> Iterator[None]:
    """Watch over the block, in which something must move every `seconds`; 0 sets no limit.

    `on_stall` is called with the reason in a separate thread; it should end the process.
    """
    global _last
    if not seconds or _last is not None:
        yield
        return
    last = _last = _Progress("starting")
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(seconds / _LOOKS_PER_LIMIT):
            last.looks += 1
            # The first look may follow at once, so it starts the time.
            if last.looks - last.moved_after <= _LOOKS_PER_LIMIT:
                continue
            # faulthandler shows the 100 newest threads: the main one is not always among them.
            frame = compat.main_thread_frame()
            if frame is not None and sys.__stderr__ is not None:
                print("Main thread (most recent call last):", file=sys.__stderr__)
                traceback.print_stack(frame, file=sys.__stderr__)
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            on_stall(
                f"nothing has moved for {seconds:g} s (config.distributed.stall_seconds) "
                f"since the phase {last.phase!r}; the stacks are above"
            )
            return

    thread = threading.Thread(target=look, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _last = None
        is_over.set()
        thread.join()


def report_progress(phase: str) -> None:
    """Record that the run has reached a phase, or makes progress in it."""
    if _last is not None:
        _last.phase = phase
        _last.moved_after = _last.looks
