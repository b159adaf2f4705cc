"""Replies that come in parts, too slowly or not whole."""

import concurrent.futures
import contextlib
import http.client
import socket
import time

import pytest

from jax_ppo import http_client
from jax_ppo.http_client import HTTPClient, RequestFault, RequestTimeout, read_reply
from serving import QuietHandler, serving
from waiting import HANG_SECONDS

TIMEOUT = 0.3


@contextlib.contextmanager
def serving_parts(parts, pause, length):
    """Yield the address of a server that sends `parts` of a body that shall have `length`."""

    class Handler(QuietHandler):
        def do_POST(self):
            self.read_body()
            self.answer(200, b"", {"Content-Type": "application/json", "Content-Length": length})
            with contextlib.suppress(OSError):  # the client has gone
                for part in parts:
                    self.wfile.write(part)
                    time.sleep(pause)

    with serving(Handler) as server:
        yield server.url


def ask(url, timeout=TIMEOUT, **options):
    return HTTPClient(url, "NO_KEY", timeout, **options).post("/ask", "{}")


def test_a_reply_that_never_ends_is_given_up():
    """Each part comes in time, so that no single read takes too long."""
    begin = time.monotonic()
    with serving_parts([b"1"] * 100, 0.05, 100) as url:
        with pytest.raises(RequestTimeout, match="^/ask: TimeoutError: the reply took too long"):
            ask(url)
    assert time.monotonic() - begin < 4


def test_a_reply_that_is_cut_off_is_a_fault():
    with serving_parts([b"12"], 0, 3) as url, pytest.raises(RequestFault, match="IncompleteRead"):
        ask(url)


def test_messages_begin_with_the_option_and_repeat_no_query():
    with serving_parts([b"{"], 0, 1) as url:
        with pytest.raises(RequestFault) as error:
            ask(f"{url}/judge?key=secret", option="config.reward.url")
    assert str(error.value).startswith(f"config.reward.url={url}/judge: /ask: the reply (")


def test_a_request_that_waits_for_a_reply_is_aborted():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = HTTPClient(f"http://127.0.0.1:{silent.getsockname()[1]}", "NO_KEY", HANG_SECONDS)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            asked = pool.submit(client.post, "/ask", "{}")
            with silent.accept()[0] as accepted:
                accepted.recv(1)
                client.abort()
                with pytest.raises(RequestFault):
                    asked.result(HANG_SECONDS)


@pytest.mark.parametrize(
    ("body", "problem"),
    [(b"[" * 200_000, "not JSON"), (b"1" * 1_000_001, "expected at most 1000000 bytes")],
    ids=["nested too deeply", "too long"],
)
def test_a_reply_that_cannot_be_read_is_a_fault(body, problem, monkeypatch):
    monkeypatch.setattr(http_client, "_MAX_REPLY", 1_000_000)
    with serving_parts([body], 0, len(body)) as url, pytest.raises(RequestFault, match=problem):
        ask(url)


def test_a_reply_in_parts_is_read_whole():
    with serving_parts([b"[1,", b" 2", b"]"], 0.02, 6) as url:
        assert ask(url) == [1, 2]


def test_no_more_is_read_than_wanted():
    with serving_parts([b"1" * 10], 0, 10) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.request("POST", "/", "")
        with connection.getresponse() as reply:
            assert read_reply(reply, TIMEOUT, most=4) == b"1111"
        connection.close()
