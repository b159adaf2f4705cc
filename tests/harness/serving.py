"""HTTP servers that tests start in their own process."""

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Answers requests without a line about each of them."""

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def read_body(self) -> bytes:
        """Return what was sent."""
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, code: int, body: bytes, headers: Mapping[str, object] = {}) -> None:
        """Send a reply; the body only if it was asked for."""
        self.send_response(code)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serving(handler: type[QuietHandler]) -> Iterator[http.server.ThreadingHTTPServer]:
    """Yield a server whose requests the handler answers, with its `url`, until the end."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
