"""Addresses in object stores: gs://BUCKET/PATH and s3://BUCKET/PATH.

They are accessed with fsspec's clients (gcsfs, s3fs), as in `etils.epath` and Orbax. Credentials
are the store's own: application default credentials for gs, the AWS settings for s3.
"""

import contextlib
import importlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax_ppo.errors import UserError, did_you_mean, shorten

# By scheme: the module that fsspec loads, which is also the package's name, and jax_ppo's extra.
_CLIENTS = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
# Code that treats an address as a path reduces its two slashes to one.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)([^/]*)(.*)")
_FORBIDDEN = ("forbidden", "403", "does not have storage.", "access denied", "accessdenied")
_NO_CREDENTIALS = ("invalid credentials", "anonymous caller", "401", "nocredentialserror")


class RemoteFile(NamedTuple):
    """A file in an object store."""

    path: str  # BUCKET/PATH
    size: int  # bytes
    version: str  # identifies the contents; it changes when other contents are uploaded
    crc32c: str  # base64 of the CRC-32C of the contents, or "" if the store does not have it


def is_address(path: str) -> bool:
    """Return whether a path is an address, SCHEME://..., rather than a local path."""
    return _ADDRESS.fullmatch(path) is not None


def validate_address(address: str, option: str, schemes: tuple[str, ...] = tuple(_CLIENTS)) -> None:
    """Raise `UserError` unless an address has a bucket and a scheme whose client is installed."""
    match = _ADDRESS.fullmatch(address)
    assert match is not None, f"not an address: {address}"
    scheme, second_slash, bucket, _ = match.groups()
    forms = " or ".join(f"{name}://BUCKET/PATH" for name in schemes)
    problem = f"{option}={shorten(address)!r}: "
    if scheme not in schemes:
        hint = did_you_mean(f"{scheme}://", [f"{name}://" for name in schemes])
        raise UserError(f"{problem}expected a local path or {forms}.{hint}")
    if not second_slash or not bucket:
        raise UserError(f"{problem}the bucket is missing; expected {forms}")
    module, extra = _CLIENTS[scheme]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{problem}needs the package {module} ({error}): pip install 'jax_ppo[{extra}]'"
        ) from error


def open_filesystem(address: str) -> Any:
    """Return fsspec's client for a validated address."""
    import fsspec  # imported late: only runs that use a bucket have it

    # Its warnings are about optional features, and its errors are raised as well.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # tensorstore writes and deletes objects behind the client's back, so that the client's cache of
    # listings, which also serves `etils.epath` and Orbax, would be out of date.
    scheme = address.partition(":")[0]
    # fsspec has two names for this client and reads the settings of both.
    protocols = {"gs": ("gcs", "gs")}.get(scheme, (scheme,))
    for protocol in protocols:
        fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
    return fsspec.filesystem(protocols[0])


@contextlib.contextmanager
def reported_errors(address: str, option: str) -> Iterator[None]:
    """Replace the errors of a store's client by `UserError` in a block that accesses an address."""
    try:
        yield
    except UserError:
        raise
    # Clients also raise the errors of their HTTP and credential libraries.
    except Exception as error:
        raise UserError(f"{option}={shorten(address)!r}: {_explain(address, error)}") from error


def list_files(address: str, option: str) -> dict[str, RemoteFile]:
    """Return all files at and below a validated address, by their path relative to it.

    The file at the address itself is "". Raise `UserError` if the bucket cannot be read.
    """
    root = bucket_path(address)
    with reported_errors(address, option):
        _require_network(address)
        listing = open_filesystem(address).find(root, detail=True)
    files = {}
    for path, details in listing.items():
        # A client may list neighbors whose names merely begin with this one.
        if path != root and not path.startswith(f"{root}/"):
            continue
        # Some tools create empty objects with such names to represent folders.
        if not path.endswith("/"):
            crc32c = details.get("crc32c") or ""
            # Cloud Storage has checksums; for S3 the ETag identifies the contents.
            version = crc32c or details.get("ETag") or details.get("etag", "")
            files[path[len(root) :].lstrip("/")] = RemoteFile(
                path, int(details["size"]), str(version).strip('"'), crc32c
            )
    return files


def _require_network(address: str) -> None:
    """Raise `OSError` at once if the store's name has no address; clients retry for a minute."""
    server = {"gs": "storage.googleapis.com", "s3": "s3.amazonaws.com"}[address.partition(":")[0]]
    # An emulator, a proxy or another store (AWS_ENDPOINT_URL_S3) is accessed by another address.
    settings = re.compile("STORAGE_EMULATOR_HOST|.*ENDPOINT_URL.*|(?i:https_proxy)")
    if not any(value and settings.fullmatch(name) for name, value in os.environ.items()):
        socket.getaddrinfo(server, 443)


def bucket_path(address: str) -> str:
    """Return BUCKET/PATH of an address, without slashes at the end."""
    return address.partition("://")[2].rstrip("/")


def _explain(address: str, error: Exception) -> str:
    """Return why a store refused the access, in one line, with a remedy if there is one."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    lower = text.lower()
    scheme, _, rest = address.partition("://")
    bucket = f"{scheme}://{rest.partition('/')[0]}"
    if isinstance(error, OSError) and error.filename:
        reason = f"{error.filename} on this machine: {error.strerror}"
        return f"{reason}; XDG_CACHE_HOME names another folder for copies"
    if isinstance(error, FileNotFoundError):
        return f"there is no bucket {bucket} (check the spelling, and the project it belongs to)"
    lacks_credentials = "credentials" in type(error).__name__.lower()
    if lacks_credentials or any(sign in lower for sign in _NO_CREDENTIALS):
        remedy = (
            "run `gcloud auth application-default login`, or give the machine a service account"
        )
        if scheme == "s3":
            remedy = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return f"no valid credentials for {bucket}: {remedy} ({shorten(text, 200)})"
    if isinstance(error, PermissionError) or any(sign in lower for sign in _FORBIDDEN):
        remedy = (
            "its account needs the roles Storage Object User and, for work directories, Storage "
            "Legacy Bucket Reader on the bucket"
        )
        if scheme == "s3":
            remedy = "its account needs s3:ListBucket, s3:GetObject and s3:PutObject on it"
        return f"no permission for {bucket}: {remedy} ({shorten(text, 200)})"
    return f"{bucket} cannot be accessed ({shorten(text, 300)})"
