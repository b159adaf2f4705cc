"""Worker processes that start from a new interpreter and end with the run."""

import contextlib
import ctypes
import errno
import multiprocessing.context
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from jax_ppo.errors import UserError

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_main_module_lock = threading.Lock()


class WorkerProcess(multiprocessing.context.SpawnProcess):
    """A spawned process that does not import the run's main module."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        # Spawned processes import the parent's main module again. A worker does not need it, and a
        # script that trains at its top level would train in each worker.
        with _main_module_lock:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                spawn: Any = multiprocessing.context.SpawnProcess
                return spawn._Popen(process_obj)
            finally:
                sys.modules["__main__"] = main


class WorkerContext(multiprocessing.context.SpawnContext):
    """Starts worker processes as new interpreters, which inherit nothing from the run."""

    Process = WorkerProcess  # type: ignore[assignment]


@contextlib.contextmanager
def explained_semaphores(remedy: str = "") -> Iterator[None]:
    """Raise `UserError`, with an option that helps, if the block finds no room for semaphores."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.ENOMEM):  # of a process that cannot be started
            raise
        raise UserError(
            f"/dev/shm, where worker processes have their locks: {error.strerror}; make room there "
            f"(docker run --shm-size=1g) or mount it writable{remedy}"
        ) from error


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process as soon as its parent ends, however it ends.

    A thread that waits for it would not run while other code holds the interpreter.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
