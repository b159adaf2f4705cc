"""Ending a run by SIGTERM or Ctrl-C: the loop saves and ends, and waits for nothing that hangs.

Before the first step that can be saved, a signal ends the run at once. Later the loop asks for it
after each step. A second signal ends the run at once, and so does a limited region, such as a hung
reward function, that keeps the loop from asking for LIMIT_SECONDS.

The interpreter runs Python's signal handlers in the main thread only, which may be in the compiler
or wait for a device for minutes. Therefore its C handler also writes each signal to a socket that a
thread reads.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from jax_ppo.runtime import compat, heartbeat

LIMIT_SECONDS = 30.0
_SAME_SIGNAL_SECONDS = 0.1  # `timeout` signals a process and its group: that counts as one
_POLL_SECONDS = 0.1
_ACKNOWLEDGEMENT = (
    "the run saves and ends after the current step; a second signal ends it at once, unsaved"
)
_JOIN = getattr(threading.Thread, "_wait_for_tstate_lock", None)  # up to Python 3.12
_JOIN_CODE = getattr(_JOIN, "__code__", None)


class _StopSignals:
    """The signals that this process has received since the handlers were installed."""

    def __init__(self, ends_process: bool) -> None:
        self.ends_process = ends_process  # whether the run may end the process without returning
        self.received: signal.Signals | None = None  # the first signal
        self.saved_step: int | None = None  # the newest step that was saved because of it
        # Whether a signal waits for the end of a step; otherwise it ends the run at once.
        self.defer = False
        # Work that delays the end of the run, and the time when it began; see `limited`.
        self.region: tuple[str, float] | None = None
        self._received_at: float | None = None
        self._is_repeated = False
        self._raise_in_main = False
        self._is_over = threading.Event()
        self.previous_handlers: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()

    def install(self, numbers: tuple[signal.Signals, ...]) -> None:
        """Install the handlers, but not for signals that are ignored or handled in C."""
        for number in numbers:
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self.previous_handlers[number] = signal.signal(number, self._handle)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop signals", daemon=True)
        self._thread.start()

    def uninstall(self) -> None:
        self._is_over.set()
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)
        # The thread reads the end of the stream.
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def error(self, text: str) -> BaseException:
        """Return the exception that ends the caller: a command, or that of the Python API."""
        if self.received == signal.SIGINT and not self.ends_process:
            return KeyboardInterrupt(text)
        return SystemExit(128 + (self.received or signal.SIGTERM))

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        # Here and not in the thread only: the loop may ask right after the signal.
        self.received = self.received or signal.Signals(number)
        # Python 3.11 takes a thread for ended if an exception interrupts the wait for it, and dies
        # at exit if it still runs. The signal is sent again, so it raises after the wait.
        if frame is not None and frame.f_code is _JOIN_CODE:
            return
        if self._raise_in_main and not self._is_over.is_set():
            self._is_over.set()
            raise self.error(f"stopped by {self.received.name}")

    def _watch(self) -> None:
        """Read the signals, and end the run once it must not continue."""
        while True:
            poll_seconds = None if self._received_at is None else _POLL_SECONDS
            if select.select([self._reader], [], [], poll_seconds)[0]:
                numbers = self._reader.recv(64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self.previous_handlers:
                        self._count(signal.Signals(number))
            reason = self._reason_to_end()
            if reason is not None:
                self._end(reason)
                return

    def _count(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._received_at is None:
            self.received = self.received or number
            self._received_at = now
            if self.defer:
                # Unbuffered, as in `_end`: the main thread may hold the lock of the buffer.
                with contextlib.suppress(OSError):
                    os.write(2, f"{number.name}: {_ACKNOWLEDGEMENT}\n".encode())
        elif now - self._received_at > _SAME_SIGNAL_SECONDS:
            self._is_repeated = True

    def _reason_to_end(self) -> str | None:
        """Return why the run must end now, or `None` if it may continue."""
        if self._received_at is None:
            return None
        if not self.defer:
            return " before a step could be saved"
        if self._is_repeated:
            return ", not saved: a second signal followed"
        # Work that does not end, in contrast to a long update, would be waited for in vain.
        if region := self.region:
            work, started = region
            if time.monotonic() - max(started, self._received_at) >= LIMIT_SECONDS:
                return f", not saved: {work} did not end within {LIMIT_SECONDS:g} s"
        return None

    def _end(self, reason: str) -> None:
        received = self.received
        assert received is not None, "a signal is the reason to end"
        if not self.ends_process:
            # In the Python API the process is the caller's: raise in its main thread.
            self._raise_in_main = True
            main_thread = threading.main_thread().ident
            assert main_thread is not None, "the main thread has started"
            # Unlike `_thread.interrupt_main`, this also interrupts a blocking system call. A signal
            # that arrives right before the call does not, so it is sent again until it has raised.
            signal.pthread_kill(main_thread, received)
            while not self._is_over.wait(_POLL_SECONDS):
                signal.pthread_kill(main_thread, received)
            return
        # Unbuffered: the main thread may hold the lock of the buffer, and never release it.
        os.write(2, f"stopped by {received.name}{reason}\n".encode())
        for announce in _on_abrupt_end:
            announce(f"stopped by {received.name}{reason}", 128 + received)
        # Threads that lose their worker processes would print tracebacks.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _kill_children()
        os._exit(128 + received)


_active: _StopSignals | None = None
_on_abrupt_end: list[Callable[[str, int], None]] = []


@contextlib.contextmanager
def handle_stop_signals(*, ends_process: bool) -> Iterator[_StopSignals | None]:
    """Handle SIGTERM and SIGINT in the block, and yield what was received.

    A block inside of another yields what that one does; outside of the main thread a block yields
    `None`. Neither installs handlers. `ends_process`: the run may end the process without
    returning, as commands may; otherwise `KeyboardInterrupt` or `SystemExit` is raised in the main
    thread.
    """
    global _active
    if _active is not None:
        yield _active
        return
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    signals = _StopSignals(ends_process)
    signals.install((signal.SIGINT, signal.SIGTERM))
    _active = signals
    try:
        yield signals
    finally:
        _active = None
        signals.uninstall()


def on_abrupt_end(announce: Callable[[str, int], None]) -> None:
    """Have `announce(reason, exit code)` called before a signal ends the process at once.

    It is called in a thread, and must not wait for long.
    """
    _on_abrupt_end.append(announce)


def received_signal() -> signal.Signals | None:
    """Return the signal that asked the run to save and end, or `None`."""
    return None if _active is None else _active.received


def record_signal(number: signal.Signals) -> None:
    """Record the signal on which several processes agreed."""
    if _active:
        _active.received = number


def defer_signals() -> None:
    """Let signals wait for the end of a step from now on: there is a step to save."""
    if _active:
        _active.defer = True


def record_saved_step(step: int) -> None:
    """Record the step that was saved last."""
    if _active:
        _active.saved_step = step


@contextlib.contextmanager
def limited(work: str) -> Iterator[heartbeat.Activity]:
    """Mark work that may delay the end of the run by at most LIMIT_SECONDS.

    The time counts from the signal, or from the start of the work if that is later. Do not nest
    such blocks: the inner one would end the limit of the outer one.
    """
    with heartbeat.activity(work) as activity:
        signals = _active
        if signals is None:
            yield activity
            return
        signals.region = (work, time.monotonic())
        try:
            yield activity
        finally:
            signals.region = None


def raise_if_stopped(report: Callable[[str], None]) -> None:
    """End a run that has returned because of a signal.

    Raise `SystemExit` with 128 + the signal, or `KeyboardInterrupt` for SIGINT in the Python API.
    """
    if _active is None or _active.received is None:
        return
    step = _active.saved_step
    outcome = "the run was over" if step is None else f"saved step {step}"
    text = f"stopped by {_active.received.name}, {outcome}"
    report(text)
    raise _active.error(text)


def _kill_children() -> None:
    """Kill the worker processes, and release what their queues hold in the operating system."""

    def release() -> None:
        for child in multiprocessing.active_children():
            child.terminate()
        compat.release_multiprocessing()

    # In a thread, since what hangs may hold a lock that this needs.
    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    thread.join(timeout=2)


def _reset_after_fork() -> None:
    """Give a forked child, which has no such thread, the default handlers."""
    global _active
    if _active is not None:
        signal.set_wakeup_fd(-1)
        for number in _active.previous_handlers:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
        _active = None


os.register_at_fork(after_in_child=_reset_after_fork)
