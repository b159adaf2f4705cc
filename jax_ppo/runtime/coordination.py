"""JAX's coordination service in a separate process, which outlives process 0.

Inside process 0 the service would be gone when that process is killed. JAX ends a process whose
connection to the service breaks, at once and without naming the one that has ended. Here the
service stays until the lifeline, which does name it, has ended the others. The service itself
notices a process that is alive but frozen by its missing heartbeats. JAX then aborts the others,
and the service's process reports which one it was.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from jax_ppo.errors import UserError
from jax_ppo.runtime import compat

_READY = "ready\n"
_STOP = "stop\n"
_POLL_SECONDS = 0.05
_PROBE_SECONDS = 5  # more than a connection within one machine takes
_ESTABLISHED = "01"  # the state of a connection in /proc/net/tcp
# Where the system does not list connections.
_GRACE_SECONDS = 1.0


class ServiceProcess:
    """The service, as far as `jax.distributed` uses it."""

    def __init__(self, address: str, num_nodes: int, **options: Any) -> None:
        """Start the service; takes the same arguments as the class in JAX.

        Raises:
          UserError: it does not start, for example because the address is in use.
        """
        arguments = json.dumps({"address": address, "num_nodes": num_nodes} | options)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jax_ppo.runtime.coordination", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            self._process.communicate()
            raise UserError(
                f"JAX's coordination service does not start on {address}; is the port in use? "
                "config.distributed.coordinator_address names another"
            )

    def shutdown(self) -> None:
        """Stop the service once the other processes have disconnected."""
        self._process.communicate(_STOP)


def _serve(arguments: str) -> None:
    """Run the service until process 0 stops it or has ended."""
    # A signal to all processes of a run is for process 0 to handle.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    options = json.loads(arguments)
    seconds = options["heartbeat_timeout"]
    _name_silent_processes(seconds)
    _require_free(options["address"], seconds)
    service = compat.start_coordination_service(**options)
    print(_READY, end="", flush=True)
    if sys.stdin.read() == _STOP:
        service.shutdown()
    elif sys.platform == "linux":
        # After `seconds` without a sign of life from process 0, the service has JAX end the others.
        _wait_while(_has_connections, seconds)
    else:
        time.sleep(_GRACE_SECONDS)


def _require_free(address: str, seconds: float) -> None:
    """Wait until nothing listens on the address; exit if that takes longer than `seconds`.

    The service of an earlier start may still be there, for a process that is slow to end. The
    system would let both listen, and give each of them some of the connections.
    """
    host, _, port = address.rpartition(":")

    def is_in_use() -> bool:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
        except OSError:
            return False
        return True

    if is_in_use():
        print(f"something listens on {address}: waiting for its end", file=sys.stderr, flush=True)
        if _wait_while(is_in_use, seconds):
            sys.exit(1)


def _wait_while(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait while a condition holds, at most for `seconds`; return whether it still holds."""
    deadline = time.monotonic() + seconds
    while holds():
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _has_connections() -> bool:
    """Return whether another process is connected to this one by TCP."""
    open_files = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        # Another thread may close it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            open_files.add(os.readlink(descriptor))
    rows = [
        line.split()
        for table in Path("/proc/self/net").glob("tcp*")
        for line in table.read_text().splitlines()[1:]
    ]
    # The fourth column is the state, the tenth the number of the socket.
    return any(row[3] == _ESTABLISHED and f"socket:[{row[9]}]" in open_files for row in rows)


def _name_silent_processes(seconds: int) -> None:
    """Pass on what the service writes to standard error, and a line per process that is silent."""
    errors = os.fdopen(os.dup(2), "w", errors="replace")
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    lines = os.fdopen(reader, errors="replace")
    threading.Thread(target=_pass_on, args=(lines, errors, seconds), daemon=True).start()


def _pass_on(lines: IO[str], errors: IO[str], seconds: int) -> None:
    are_listed = False
    for line in lines:
        print(line, end="", file=errors, flush=True)
        # The numbers follow this line, one on each.
        if "stopped sending heartbeats" in line:
            are_listed = True
        elif are_listed and (number := re.match(r"\d+$", line.strip().rpartition("/task:")[2])):
            print(
                f"the run ends: process {number[0]}: no sign of life for {seconds} s: it hangs, or "
                "its machine does",
                file=errors,
                flush=True,
            )
        else:
            are_listed = False


if __name__ == "__main__":
    _serve(sys.argv[1])
