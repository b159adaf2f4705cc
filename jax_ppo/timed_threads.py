"""Concurrent calls in threads, each with a time limit.

Python cannot end a thread. A thread whose call takes too long is abandoned and replaced; no thread
keeps the process from exiting.
"""

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

CallResult = concurrent.futures.Future[Any]


class CallTimeout(Exception):
    """A call did not return within the limit."""


class _Call:
    """A call, the time at which it began, and its result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result: CallResult = concurrent.futures.Future()
        self.has_started = threading.Event()
        self.started_at = 0.0
        self.is_abandoned = False

    def run(self) -> None:
        self.started_at = time.monotonic()
        self.has_started.set()
        try:
            self.result.set_result(self.function())
        except KeyboardInterrupt as error:  # its own: that of Ctrl-C reaches only the main thread
            failure = RuntimeError(repr(error))
            failure.__cause__ = error
            self.result.set_exception(failure)
        except BaseException as error:
            self.result.set_exception(error)


class TimedThreads:
    """A number of threads that make calls."""

    def __init__(self, threads: int) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        for _ in range(threads):
            self._start_thread()

    def call_all(
        self, functions: Sequence[Callable[[], Any]], timeout: float
    ) -> Generator[CallResult]:
        """Yield the results of calls in order; `CallTimeout` for one longer than `timeout` seconds.

        When the generator is closed, calls that have not begun are not made, and threads whose
        calls go on are abandoned.
        """
        calls = [_Call(function) for function in functions]
        for call in calls:
            self._calls.put(call)
        try:
            for call in calls:
                yield self._wait(call, timeout)
        finally:
            for call in calls:
                if not (call.result.cancel() or call.result.done() or call.is_abandoned):
                    self._abandon(call)

    def _wait(self, call: _Call, timeout: float) -> CallResult:
        # Every call starts, since each earlier one has returned or its thread has been replaced.
        call.has_started.wait()
        remaining = call.started_at + timeout - time.monotonic()
        concurrent.futures.wait([call.result], max(remaining, 0.0))
        if call.result.done():
            return call.result
        self._abandon(call)
        late: CallResult = concurrent.futures.Future()
        late.set_exception(CallTimeout(f"no answer within {timeout:g} seconds"))
        return late

    def _abandon(self, call: _Call) -> None:
        call.is_abandoned = True
        self._start_thread()

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="timed call", daemon=True).start()

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if not call.result.set_running_or_notify_cancel():
                continue
            call.run()
            if call.is_abandoned:
                return
