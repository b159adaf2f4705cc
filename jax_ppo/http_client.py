"""Requests over HTTP to a server that an option names: a judge, an environment, a sampler.

The key of a server is the value of an environment variable and is sent as a bearer token. It never
occurs in an option, a message or a file of the run. Key and data go only to the host that the user
named: redirections are not followed.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import weakref
from collections.abc import Callable
from typing import Any

from jax_ppo.errors import UserError, shorten

_MAX_REPLY = 100_000_000  # bytes
_PART = 65_536  # bytes that are read at a time
_FIRST_PAUSE = 0.5  # seconds before the second attempt; doubled for each further one


class RequestFault(RuntimeError):
    """A failed request: `is_final` if it would fail again, `is_refusal` if it had no effect.

    `status` is HTTP's, or 0.
    """

    def __init__(
        self, text: str, is_final: bool = False, is_refusal: bool = False, status: int = 0
    ) -> None:
        super().__init__(text)
        self.is_final, self.is_refusal, self.status = is_final, is_refusal, status


class RequestTimeout(RequestFault):
    """A request that took too long."""


def read_key(variable: str) -> str:
    """Return the key for a server, "" without one; raise `UserError` if it cannot be sent."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{variable}: the key has characters that HTTP headers cannot hold")
    return key


@dataclasses.dataclass(frozen=True, eq=False)
class HTTPClient:
    """A server, called by any number of threads; `UserError` for a key that cannot be sent."""

    url: str  # a valid address without a password; it may have a query, which no message repeats
    key_variable: str  # the environment variable with the server's key
    timeout: float  # seconds that an attempt may take
    retries: int = 0  # number of times that `post` repeats a failed request
    option: str = ""  # "config.SECTION.NAME" of the address, to begin messages with
    by_proxy: bool = True  # by way of the proxy that the environment names, if it names one
    _connections: weakref.WeakSet[http.client.HTTPConnection] = dataclasses.field(
        default_factory=weakref.WeakSet, init=False
    )
    _lock: Any = dataclasses.field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        read_key(self.key_variable)

    def __str__(self) -> str:
        """Return the address without its query, which may contain a key."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit(parts._replace(query="", fragment=""))

    def get(self, route: str, timeout: float | None = None) -> Any:
        """Return the reply to a GET request, as `post` does, which is sent once."""
        return self._send("GET", route, None, timeout or self.timeout)

    def post(
        self,
        route: str,
        content: str,
        is_repeatable: bool = True,
        read: Callable[[Any], Any] = lambda reply: reply,
    ) -> Any:
        """Return the reply to JSON; repeat the request after faults that may be temporary.

        `route` is appended to the path of the address. Only refusals are followed by another
        attempt unless `is_repeatable`: after other faults the server may have acted. `read`
        extracts the result from a JSON value, or from text that is not JSON; its `ValueError` is a
        fault. Raise `RequestFault` if no attempt succeeded.
        """
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                return read(self._send("POST", route, content, self.timeout))
            except RequestFault as error:
                fault = error
            except ValueError as error:
                fault = RequestFault(self._describe(route, f"unexpected reply: {error}"))
            if fault.is_final or not (is_repeatable or fault.is_refusal):
                break
        raise fault

    def abort(self) -> None:
        """Let the requests of all threads that wait for a reply fail."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _describe(self, route: str, problem: str) -> str:
        server = f"{self.option}={self}" if self.option else ""
        return ": ".join(filter(None, (server, route, problem)))

    def _send(self, method: str, route: str, content: str | None, timeout: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := read_key(self.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        parts = urllib.parse.urlsplit(self.url)
        if route:
            parts = parts._replace(path=parts.path.rstrip("/") + route)
        request = urllib.request.Request(
            urllib.parse.urlunsplit(parts),
            # Half of a surrogate pair has no encoding.
            None if content is None else content.encode(errors="replace"),
            headers,
            method=method,
        )
        proxies = [] if self.by_proxy else [urllib.request.ProxyHandler({})]
        handlers = [_RefuseRedirects(), _HTTPHandler(self), _HTTPSHandler(self), *proxies]
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as reply:
                body = read_reply(reply, timeout, _MAX_REPLY + 1)
        except urllib.error.HTTPError as error:
            raise RequestFault(
                self._describe(route, _describe_status(error, timeout)),
                is_final=300 <= error.code < 500 and error.code not in (408, 429),
                is_refusal=error.code in (429, 503),
                status=error.code,
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            # While connecting, the error is the reason of a URLError.
            reason = getattr(error, "reason", None)
            cause = reason if isinstance(reason, Exception) else error
            kind = RequestTimeout if isinstance(cause, TimeoutError) else RequestFault
            raise kind(
                self._describe(route, f"{type(cause).__name__}: {cause}"),
                is_refusal=isinstance(cause, ConnectionRefusedError),
            ) from error
        if len(body) > _MAX_REPLY:
            raise RequestFault(self._describe(route, f"expected at most {_MAX_REPLY} bytes"))
        kind_of_text = reply.headers.get_content_type()  # text/plain if it names none
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            if kind_of_text == "text/plain" or not body:
                return body.decode(errors="replace")
            form = ", ".join(filter(None, (kind_of_text, reply.headers["Content-Encoding"])))
            raise RequestFault(
                self._describe(route, f"the reply ({form}) is not JSON: {error}")
            ) from None


def _describe_status(error: urllib.error.HTTPError, timeout: float) -> str:
    text = ""
    with contextlib.suppress(OSError, http.client.HTTPException), error:
        reply: Any = error.fp
        text = shorten(read_reply(reply, timeout, 1000).decode(errors="replace"), 200)
    if 300 <= error.code < 400:
        target = shorten(error.headers["Location"] or "", 200)
        text = f"redirections are not followed, here to {target}"
    return f"HTTP {error.code} {error.reason}: {text}".rstrip(": ")


def read_reply(reply: http.client.HTTPResponse, seconds: float, most: int | None = None) -> bytes:
    """Return the body of a reply, or its first `most` bytes.

    Raise `TimeoutError` if parts arrive after `seconds`, or none within the connection's limit, and
    `http.client.IncompleteRead` if the connection ended before the body did.
    """
    end = time.monotonic() + seconds
    body = bytearray()
    while (most is None or len(body) < most) and (part := reply.read1(_PART)):
        body += part
        if time.monotonic() > end:
            raise TimeoutError("the reply took too long")
    if reply.length and (most is None or len(body) < most):
        raise http.client.IncompleteRead(bytes(body), reply.length)
    return bytes(body[:most])


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        """Return `None`, which turns the redirection into an error."""


class _Tracking(urllib.request.AbstractHTTPHandler):
    """Tells a client of the connections that it opens."""

    def __init__(self, client: HTTPClient) -> None:
        super().__init__()
        self._client = client

    def do_open(
        self, http_class: Any, req: urllib.request.Request, **http_conn_args: Any
    ) -> http.client.HTTPResponse:
        """Open a connection. See `AbstractHTTPHandler.do_open`."""

        def connect(*where: Any, **how: Any) -> http.client.HTTPConnection:
            connection: http.client.HTTPConnection = http_class(*where, **how)
            with self._client._lock:
                self._client._connections.add(connection)
            return connection

        return super().do_open(connect, req, **http_conn_args)  # type: ignore[arg-type]


class _HTTPHandler(_Tracking, urllib.request.HTTPHandler):
    """Opens connections without encryption."""


class _HTTPSHandler(_Tracking, urllib.request.HTTPSHandler):
    """Opens encrypted connections."""
