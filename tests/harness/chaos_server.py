"""Start commands from a process that has already imported what they need.

    python tests/harness/chaos_server.py SOCKET

The server imports the package and its libraries once, and forks a child for each command. A child
has the environment, directory, standard files, signal handlers and process group of a fresh
process, and ends as one: only the interpreter's start and the imports are missing. The server has
not initialized a backend of JAX, which could not be forked. It ends with its standard input.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

START_SECONDS = 600.0
# What commands import beside the package's own modules.
LIBRARIES = (
    "matplotlib.pyplot",
    "orbax.checkpoint",
    "tensorboardX",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
)
CODE = struct.Struct("!i")


class WarmProcess:
    """A command that the server has started, with the part of `subprocess.Popen` that is needed.

    Attributes:
      pid: its process id.
      stdout: its standard output and standard error.
    """

    def __init__(self, connection: socket.socket, pid: int, pidfd: int, stdout: IO[str]) -> None:
        """Hold what `ForkServer.start` has received."""
        self.pid = pid
        self.stdout = stdout
        self._connection = connection
        # A pid could be another process's by the time of a signal.
        self._pidfd = pidfd
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or `None` while the process runs."""
        if self._returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self._returncode

    def wait(self) -> int:
        """Wait for the end of the process, and return the exit code."""
        if self._returncode is None:
            (self._returncode,) = CODE.unpack(self._connection.recv(CODE.size))
            self._connection.close()
            os.close(self._pidfd)
        return self._returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client of a server, which it starts."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        """Start a server with a socket in `folder`; the first start waits for its imports."""
        self._path = folder / "server"
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self._path)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            process_group=0,
        )

    def start(
        self, arguments: list[str], environment: dict[str, str], directory: Path
    ) -> WarmProcess:
        """Start tests/harness/chaos_command.py.

        Args:
          arguments: of the command, without the interpreter and the script.
          environment: the whole environment.
          directory: the working directory.
        """
        connection = self._connect()
        reader, writer = os.pipe()
        request = {"arguments": arguments, "environment": environment, "directory": str(directory)}
        text = json.dumps(request).encode()
        socket.send_fds(connection, [CODE.pack(len(text))], [writer])
        os.close(writer)
        connection.sendall(text)
        reply, fds, _, _ = socket.recv_fds(connection, CODE.size, 1)
        (pid,) = CODE.unpack(reply)
        stdout = os.fdopen(reader, errors="replace")
        return WarmProcess(connection, pid, fds[0], stdout)

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def _connect(self) -> socket.socket:
        """Return a connection, once the server has imported everything."""
        end = time.monotonic() + START_SECONDS
        while self._server.poll() is None and time.monotonic() < end:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._path))
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                time.sleep(0.1)
        raise RuntimeError("the server of warm processes did not start")


def serve(path: str) -> list[str] | None:
    """Fork a child for each request.

    Returns:
      In a child the arguments of its command; in the server `None`, once its standard input ends.
    """
    import_modules()
    # Children share what the garbage collector would otherwise write to.
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    # By the file descriptor of each child its pid and the connection that waits for its end.
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([sys.stdin, listener, *children], [], [])[0]:
            if ready is sys.stdin:
                return None
            if isinstance(ready, int):
                pid, connection = children.pop(ready)
                status = os.waitpid(pid, 0)[1]
                # The harness may have ended.
                with contextlib.suppress(OSError):
                    connection.sendall(CODE.pack(os.waitstatus_to_exitcode(status)))
                connection.close()
                os.close(ready)
                continue
            connection = listener.accept()[0]
            request, output = _receive_request(connection)
            pid = os.fork()
            if not pid:
                for fd, (_, other) in children.items():
                    os.close(fd)
                    other.close()
                connection.close()
                listener.close()
                _become_fresh(request, output)
                return request["arguments"]
            os.close(output)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, connection
            socket.send_fds(connection, [CODE.pack(pid)], [pidfd])


def import_modules() -> None:
    """Import all modules of the package, and libraries that it imports late.

    Raises:
      RuntimeError: an import has initialized a backend, which a child could not use.
    """
    import jax_ppo

    for module in pkgutil.walk_packages(jax_ppo.__path__, "jax_ppo."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in LIBRARIES:
        importlib.import_module(name)
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise RuntimeError("an import has initialized a backend of JAX")


def _receive_request(connection: socket.socket) -> tuple[dict, int]:
    """Return the request and the file for the child's output."""
    header, fds, _, _ = socket.recv_fds(connection, CODE.size, 1)
    (size,) = CODE.unpack(header)
    return json.loads(connection.recv(size, socket.MSG_WAITALL)), fds[0]


def _become_fresh(request: dict, output: int) -> None:
    """Give this child the state of a fresh process."""
    import jax

    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # JAX has read its variables when the server imported it.
    jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))
    gc.unfreeze()


if __name__ == "__main__":
    arguments = serve(sys.argv[1])
    if arguments is not None:
        import chaos_command

        chaos_command.main(arguments)
