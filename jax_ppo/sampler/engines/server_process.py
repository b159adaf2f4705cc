"""A server in a separate process, which ends with the run."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_ppo.errors import shorten

# Ends the whole process group with the run, however the run ends, and with the server, whose
# workers would otherwise keep their memory.
_SUPERVISOR = """
import glob, os, signal, subprocess, sys, threading, time
server = None
is_asked = False
def end(*ignored):
    global is_asked
    is_asked = True
    if server is not None:
        server.terminate()  # lets it and its workers remove what they have in shared memory
    threading.Timer(10, os.killpg, (0, signal.SIGKILL)).start()
def watch():
    sys.stdin.buffer.read()
    end()
signal.signal(signal.SIGTERM, end)
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
if is_asked:  # while it started
    server.terminate()
threading.Thread(target=watch, daemon=True).start()
def has_workers():
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            state, _, group = open(path).read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if state != "Z" and int(group) == os.getpgrp() and f"/{os.getpid()}/" not in path:
            return True
server.wait()
while is_asked and has_workers():
    time.sleep(0.05)
os.killpg(0, signal.SIGKILL)
"""


class ServerProcess:
    """A server that this run starts and ends, with everything that it starts."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        """Start it with further variables; its output is appended to the file `log`."""
        self._log = log
        inherited = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SUPERVISOR, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=inherited | environment,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self._process.poll() is None

    def output(self) -> str:
        """Return what it has written."""
        return self._log.read_text(errors="replace")

    def last_words(self) -> str:
        """Return the last error in its output, or its last line."""
        lines = [line for line in self.output().splitlines() if line]
        errors = [line for line in lines if "Error" in line]
        return shorten((errors or lines or ["it wrote nothing"])[-1], 300)

    def stop(self) -> None:
        """End it and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        # A forked child of this process may still hold the other end.
        self._process.terminate()
        self._process.wait()


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
