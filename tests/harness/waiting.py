"""Waits of tests whose outcome does not depend on how fast the machine is or what else it does.

A test waits for an event, not for a time; a limit only ends a test that would otherwise hang.
"""

import pathlib
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

# Nothing takes as long, even where ten busy processes share a processor.
HANG_SECONDS = 300.0
# Of a whole training run.
RUN_SECONDS = 1800.0
_POLL_SECONDS = 0.02


def wait_until(condition: Callable[[], object], seconds: float = HANG_SECONDS) -> None:
    """Wait until a condition holds; one that needs a file that is not there yet does not."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except FileNotFoundError:
            pass
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(_POLL_SECONDS)


def finish_all(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Wait for the end of processes; return the output and the errors of each.

    If one hangs, none is left behind.
    """
    try:
        return [process.communicate(timeout=HANG_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()


def is_running(process_id: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        status = pathlib.Path(f"/proc/{process_id}/stat").read_text()
    except OSError:  # there is none, or it ends while it is looked at
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def keep_port() -> socket.socket:
    """Return a socket whose port nobody is given until it is closed.

    A server that asks for sharing (SO_REUSEPORT), as JAX's coordination service does, can still
    listen there; otherwise connections are refused.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind(("localhost", 0))
    return kept
