"""JSON requests to a server that an option names: repeated after faults, without redirects.

The key of a server is the value of an environment variable and is sent as a bearer token. It never
occurs in an option, a message or a file of the run.
"""

import dataclasses
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from jax_ppo.errors import UserError

_MAX_REPLY = 1_000_000  # bytes
_PART = 65_536  # bytes that are read at a time
_FIRST_PAUSE = 0.5  # seconds before the second attempt; doubled for each further one


class RequestFault(RuntimeError):
    """No attempt at a request succeeded."""


class RequestTimeout(RequestFault):
    """The last attempt took too long."""


def read_reply(reply: http.client.HTTPResponse, seconds: float, most: int | None = None) -> bytes:
    """Return the body of a reply, or its first `most` bytes.

    Raises:
      TimeoutError: parts of the body still arrive after `seconds`, or none arrives within the
        connection's own time limit.
      http.client.IncompleteRead: the connection ended before the body did.
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


def read_key(variable: str) -> str:
    """Return the key for a server, "" if there is none.

    Raises:
      UserError: it cannot be sent; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{variable}: the key has characters that HTTP headers cannot hold")
    return key


@dataclasses.dataclass(frozen=True)
class JSONServer:
    """A server, and how it is called."""

    option: str  # the option that holds the address, "config.SECTION.NAME"
    url: str  # a valid address without a password; it may have a query, which no message repeats
    key_variable: str  # the environment variable with the server's key
    timeout: float  # seconds that an attempt may take
    retries: int  # number of times that a failed request is repeated

    def __post_init__(self) -> None:
        """Raise `UserError` for a key that cannot be sent."""
        read_key(self.key_variable)

    def __str__(self) -> str:
        """Return the address without its query, which may contain a key."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit(parts._replace(query="", fragment=""))

    def post(
        self,
        request: str,
        path: str = "",
        is_repeatable: bool = True,
        read: Callable[[Any], Any] = lambda reply: reply,
    ) -> Any:
        """Return the server's reply to JSON; repeat the request after faults that may be temporary.

        `path` is appended to that of the address. Unless `is_repeatable`, which allows the server
        to have acted on a request that is repeated, only refusals are followed by another attempt.
        `read` returns what is needed of a reply; a `ValueError` that it raises is a fault.

        Raises:
          RequestFault: no attempt succeeded.
        """
        problem = ""
        timed_out = False
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            timed_out = False
            is_refusal = False
            try:
                return read(self._send(request, path))
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code} {error.reason}"
                if 300 <= error.code < 400:
                    problem += "; redirects are refused, so name the final address"
                # A refusal is final, unless the server is busy or broken.
                if error.code != 429 and error.code < 500:
                    break
                is_refusal = error.code in (429, 503)
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
                # While connecting, the error is the reason of a URLError.
                reason = getattr(error, "reason", error)
                timed_out = isinstance(reason, TimeoutError)
                is_refusal = isinstance(reason, ConnectionRefusedError)
            except (json.JSONDecodeError, RecursionError) as error:
                problem = f"the reply is not JSON: {error}"
            except ValueError as error:
                problem = f"the reply is of another form: {error}"
            if not is_repeatable and not is_refusal:
                break
        fault = RequestTimeout if timed_out else RequestFault
        raise fault(f"{self.option}={self}: {problem}")

    def _send(self, request: str, path: str) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := read_key(self.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        parts = urllib.parse.urlsplit(self.url)
        if path:
            parts = parts._replace(path=f"{parts.path.rstrip('/')}/{path}")
        message = urllib.request.Request(
            urllib.parse.urlunsplit(parts),
            # Half of a surrogate pair has no encoding.
            request.encode(errors="replace"),
            headers,
            method="POST",
        )
        opener = urllib.request.build_opener(_RefuseRedirects)
        with opener.open(message, timeout=self.timeout) as reply:
            body = read_reply(reply, self.timeout, _MAX_REPLY + 1)
        if len(body) > _MAX_REPLY:
            raise ValueError(f"expected at most {_MAX_REPLY} bytes")
        return json.loads(body)


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: key and data are sent only to the host that the user named."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        """Return `None`, which turns the redirect into an error."""
