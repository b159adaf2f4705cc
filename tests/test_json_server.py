"""Replies that come in parts, too slowly or not whole."""

import contextlib
import http.client
import http.server
import threading
import time

import pytest

from jax_ppo.json_server import JSONServer, RequestFault, RequestTimeout, read_reply
from jax_ppo.sampler.engines.client import Client, ServerFault

TIMEOUT = 0.3


@contextlib.contextmanager
def serving(parts, pause, length):
    """Yield the address of a server that sends `parts` of a body that shall have `length`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(length))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has gone
                for part in parts:
                    self.wfile.write(part)
                    time.sleep(pause)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def ask(url):
    return JSONServer("config.reward.url", url, "NO_KEY", TIMEOUT, retries=0).post("{}")


def ask_engine(url):
    return Client(url, TIMEOUT).post("/generate", {})


@pytest.mark.parametrize(
    ("call", "fault"), [(ask, RequestTimeout), (ask_engine, ServerFault)], ids=["json", "engine"]
)
def test_a_reply_that_never_ends_is_given_up(call, fault):
    """Each part comes in time, so that no single read takes too long."""
    begin = time.monotonic()
    with serving([b"1"] * 100, 0.05, 100) as url, pytest.raises(fault, match="took too long"):
        call(url)
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize(("call", "fault"), [(ask, RequestFault), (ask_engine, ServerFault)])
def test_a_reply_that_is_cut_off_is_a_fault(call, fault):
    with serving([b"12"], 0, 3) as url, pytest.raises(fault, match="IncompleteRead"):
        call(url)


@pytest.mark.parametrize(
    ("body", "problem"),
    [(b"[" * 200_000, "not JSON"), (b"1" * 1_500_000, "expected at most 1000000 bytes")],
    ids=["nested too deeply", "too long"],
)
def test_a_reply_that_cannot_be_read_is_a_fault(body, problem):
    with serving([body], 0, len(body)) as url, pytest.raises(RequestFault, match=problem):
        ask(url)


@pytest.mark.parametrize("call", [ask, ask_engine])
def test_a_reply_in_parts_is_read_whole(call):
    with serving([b"[1,", b" 2", b"]"], 0.02, 6) as url:
        assert call(url) == [1, 2]


def test_no_more_is_read_than_wanted():
    with serving([b"1" * 10], 0, 10) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.request("POST", "/", "")
        with connection.getresponse() as reply:
            assert read_reply(reply, TIMEOUT, most=4) == b"1111"
        connection.close()
