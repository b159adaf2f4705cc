"""An environment server that may be killed at any instant: its episodes are files.

    python tests/harness/chaos_environment.py PORT FOLDER

A file has the seed of an episode and the replies to its turns, one a line. A turn that is sent
again gets the same reply.
"""

import http.server
import json
import socketserver
import subprocess
import sys
from pathlib import Path

TURNS = 4  # of an episode


def start(port: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start a server of the episodes in a folder, at a port that `waiting.keep_port` keeps."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, __file__, str(port), str(folder)], process_group=0)


def answer(path: Path, request: dict) -> str:
    """Return the reply to a turn, as JSON, from the file of its episode."""
    seed, *replies = path.read_text().splitlines()
    turn = request["turn"]
    if turn == len(replies):
        digits = sum(c.isdigit() for c in request["action"])
        observation = f"{(int(seed) + turn + digits) % 10}="
        reply = {"observation": observation, "reward": digits / 10, "done": turn + 1 == TURNS}
        replies.append(json.dumps(reply | {"info": {"turns": turn + 1}}))
        replace(path, "\n".join((seed, *replies)))
    return replies[turn]


def replace(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    written = path.with_suffix(".new")
    written.write_text(text)
    written.replace(path)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves episodes."""

    def do_POST(self) -> None:
        """Answer a request."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.server.folder / request["episode_id"]
        if self.path == "/reset":
            replace(path, str(request["seed"]))
            reply = json.dumps({"observation": "", "repeatable": True})
        else:
            reply = answer(path, request)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Answers requests side by side."""

    request_queue_size = 64
    allow_reuse_port = True
    daemon_threads = True

    def __init__(self, port: int, folder: Path) -> None:
        """Listen."""
        self.folder = folder
        super().__init__(("localhost", port), Handler)


if __name__ == "__main__":
    Server(int(sys.argv[1]), Path(sys.argv[2])).serve_forever()
