"""Connections by which the processes of a run learn at once that one of them has ended.

Process 0 listens, and every other process holds a connection to it. A process that fails sends the
reason; one that is killed closes its connection, and one whose machine is gone stops answering.
Process 0 passes the news on, and each process ends with a line that names the one that ended
first. Without this they would wait in a collective until the accelerator's own time limit.
"""

import contextlib
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from jax_ppo.runtime import signals

WITHOUT_A_WORD = "ended without a message: it was killed, or its machine is gone"
_KEY = "jax_ppo/lifeline"  # in the store that JAX's coordination service shares
_WELCOME = b"\n"
_MAX_MESSAGE = 4096  # bytes of a reason
_CONNECT_SECONDS = 30
# Process 0, which has just connected to the store, is about to answer, however slow its machine is.
_ANSWER_SECONDS = 3600


class Lifeline:
    """The connections of this process, and a thread that waits for news from them."""

    def __init__(self, process: int, on_end: Callable[[int, str, int], None]) -> None:
        """Create it without connections; `listen` or `connect` adds them.

        `process` is the number of this process. `on_end` is called in the thread with the number of
        the process that ended, the reason and the exit code.
        """
        self._process = process
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, _Peer] = {}
        self._token = ""
        self._is_over = threading.Event()

    def listen(self, store: Any, host: str, seconds: int) -> None:
        """Wait for the connections of the others, in the thread; for process 0.

        `store` is JAX's client of the coordination service; `host` the name or address under which
        the others reach this machine. After `seconds` without an answer a machine counts as gone.
        """
        self._token = secrets.token_hex(16)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._selector.register(server, selectors.EVENT_READ, seconds)
        address = {"host": host, "port": server.getsockname()[1], "token": self._token}
        store.key_value_set(_KEY, json.dumps(address))
        self._start()

    def connect(self, store: Any, seconds: int) -> None:
        """Connect to process 0; for all others. See `listen`.

        Raises:
          OSError: process 0 cannot be reached.
        """
        address = json.loads(store.blocking_key_value_get(_KEY, 1000 * _ANSWER_SECONDS))
        connection = socket.create_connection(
            (address["host"], address["port"]), timeout=_CONNECT_SECONDS
        )
        connection.settimeout(_ANSWER_SECONDS)
        self._send(connection, {"process": self._process, "token": address["token"]})
        if connection.recv(len(_WELCOME)) != _WELCOME:
            raise OSError("the connection was refused")
        self._add(connection, _Peer(process=0), seconds)
        self._start()

    def announce(self, reason: str | None, code: int = 1) -> None:
        """Tell the others that this process ends, and with it all with this exit code.

        `reason` says why the run has failed; `None`: this process alone has finished.
        """
        self._is_over.set()
        self._broadcast(self._process, reason, code)

    def _start(self) -> None:
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    self._add(connection, _Peer(), key.data)
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]

    def _add(self, connection: socket.socket, peer: "_Peer", seconds: int) -> None:
        # A machine that is gone closes no connection; these let the kernel notice it.
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 3))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._peers[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        try:
            received = connection.recv(_MAX_MESSAGE)
        except OSError:
            received = b""
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        for line in lines:
            if peer.process is None:
                peer.process = self._identify(line)
                if peer.process is None:
                    self._drop(connection)
                    return
                self._write(connection, _WELCOME)
                continue
            message = json.loads(line)
            if message["reason"] is None:
                self._drop(connection)
                return
            self._end(message["process"], message["reason"], message["code"])
        if not received:
            self._drop(connection)
            if peer.process is not None:
                self._end(peer.process, WITHOUT_A_WORD, signals.LOST_EXIT_CODE)

    def _identify(self, line: bytes) -> int | None:
        """Return the number of the process that connects, `None` for an unknown one."""
        try:
            message = json.loads(line)
            if message["token"] != self._token:
                return None
            return message["process"]
        except (ValueError, TypeError, KeyError):
            return None

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._peers[connection]
        connection.close()

    def _end(self, process: int, reason: str, code: int) -> None:
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._broadcast(process, reason, code)
        self._on_end(process, reason, code)

    def _broadcast(self, process: int, reason: str | None, code: int) -> None:
        for connection in list(self._peers):
            self._send(connection, {"process": process, "reason": reason, "code": code})

    def _send(self, connection: socket.socket, message: dict[str, Any]) -> None:
        self._write(connection, json.dumps(message).encode() + b"\n")

    def _write(self, connection: socket.socket, text: bytes) -> None:
        # A peer that is gone need not be told.
        with contextlib.suppress(OSError):
            connection.sendall(text)


class _Peer:
    """The other end of a connection: its number, once known, and what is not yet a whole line."""

    def __init__(self, process: int | None = None) -> None:
        self.process = process
        self.unread = b""
