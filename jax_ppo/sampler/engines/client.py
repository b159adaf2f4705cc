"""A client of one HTTP server, and a server in a separate process."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_ppo.errors import shorten
from jax_ppo.json_server import read_key, read_reply

# Sent as a bearer token. It never occurs in an option, a message or a file of the run.
KEY_VARIABLE = "JAX_PPO_ROLLOUT_KEY"
# Ends the whole process group with the run, however the run ends, and with the server, whose
# workers would otherwise keep their memory.
_SUPERVISOR = """
import glob, os, signal, subprocess, sys, threading, time
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
is_asked = False
def end(*ignored):
    global is_asked
    is_asked = True
    server.terminate()  # lets it and its workers remove what they have in shared memory
    threading.Timer(10, os.killpg, (0, signal.SIGKILL)).start()
def watch():
    sys.stdin.buffer.read()
    end()
signal.signal(signal.SIGTERM, end)
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


class ServerFault(Exception):
    """A request that failed; `is_final` if it would fail again. `status` is HTTP's, or 0."""

    def __init__(self, text: str, is_final: bool = False, status: int = 0) -> None:
        super().__init__(text)
        self.is_final, self.status = is_final, status


class Client:
    """Sends requests to one address: without proxies, and without following redirections."""

    def __init__(self, url: str, timeout: float) -> None:
        """Prepare the client of http://HOST:PORT or https://HOST/PATH; nothing is sent.

        It waits `timeout` seconds for a reply.
        """
        self._parts = urllib.parse.urlsplit(url.rstrip("/"))
        self._timeout = timeout
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def get(self, route: str, timeout: float | None = None) -> Any:
        """Return the reply to a GET request. See `post`."""
        return self._send("GET", route, None, timeout)

    def post(self, route: str, body: Any) -> Any:
        """Return the reply to a POST request, `None` if it is empty or plain text.

        Raises:
          ServerFault: there was no reply in time, or none with status 200 that can be read.
        """
        return self._send("POST", route, body, None)

    def abort(self) -> None:
        """Let the requests of all threads fail."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _send(self, method: str, route: str, body: Any, timeout: float | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := read_key(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body)
        timeout = timeout or self._timeout
        try:
            with self._connection(timeout) as connection:
                connection.request(method, self._parts.path + route, content, headers)
                with connection.getresponse() as reply:
                    data = read_reply(reply, timeout)
            if reply.status != 200:
                # Its words, not the request's.
                text = shorten(data.decode(errors="replace"), 200)
                if reply.status < 400 and (target := reply.headers["Location"]):
                    text = f"redirections are not followed, here to {shorten(target, 200)}"
                is_final = 300 <= reply.status < 500 and reply.status not in (408, 429)
                raise ServerFault(f"{route}: HTTP {reply.status}: {text}", is_final, reply.status)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerFault(f"{route}: {type(error).__name__}: {error}") from error
        kind = reply.headers.get_content_type()  # text/plain if it names none
        if not data or kind == "text/plain":
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            form = ", ".join(filter(None, (kind, reply.headers["Content-Encoding"])))
            raise ServerFault(f"{route}: the reply ({form}) is not JSON: {error}") from None

    @contextlib.contextmanager
    def _connection(self, timeout: float) -> Iterator[http.client.HTTPConnection]:
        kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
        if self._parts.scheme == "https":
            kind = http.client.HTTPSConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=timeout)
        with self._lock:
            self._open.add(connection)
        try:
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


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
