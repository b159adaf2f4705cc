"""Local copies of model folders and data files that options name by addresses in object stores.

Copies are in the user's cache folder, under names that depend on the contents. One process per host
downloads while the others wait; an interrupted download continues where it stopped.
"""

import base64
import concurrent.futures
import contextlib
import fcntl
import fnmatch
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError, did_you_mean, shorten
from jax_ppo.storage import local_files, remote
from jax_ppo.storage.remote import RemoteFile

THREADS = 8
CHUNK_BYTES = 32 << 20


def cache_folder(name: str) -> Path:
    """Return the folder of this name in the user's cache: XDG_CACHE_HOME, else ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jax_ppo" / name


def local_name(address: str, *contents: object) -> str:
    """Return a readable name for a local folder, unique to an address and further contents."""
    digest = hashlib.sha256(repr((address.rstrip("/"), contents)).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9]+", "-", remote.bucket_path(address)).strip("-")
    return f"{readable[-60:]}-{digest}"


def download_folder(address: str, option: str, patterns: Sequence[str]) -> Path:
    """Return a local copy of the files directly in a folder that match one of the patterns.

    Raise `UserError` for an invalid or inaccessible address, no such file, or a full disk.
    """
    remote.validate_address(address, option)
    files = remote.list_files(address, option)
    matching = {
        name: file
        for name, file in files.items()
        if name and "/" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }
    if not matching:
        problem = "there is no such folder in the bucket"
        if "" in files:
            problem = "this is a file; expected a folder"
        elif files:
            problem = f"the folder has none of the expected files, only {_list_names(files)}"
        raise UserError(f"{option}={shorten(address)!r}: {problem}")
    return _download(address, option, matching)


def download_file(address: str, option: str) -> Path:
    """Return a local copy of a file; raise `UserError` as `download_folder` does."""
    remote.validate_address(address, option)
    files = remote.list_files(address, option)
    folder, _, name = address.rpartition("/")
    if "" not in files:
        problem = f"this is a folder, with {_list_names(files)}; expected a file"
        if not files:
            siblings = [path for path in remote.list_files(folder, option) if "/" not in path]
            problem = f"there is no such file.{did_you_mean(name, siblings)}"
        raise UserError(f"{option}={shorten(address)!r}: {problem}")
    return _download(address, option, {name: files[""]}) / name


def fetch_files(
    address: str,
    files: Mapping[str, RemoteFile],
    folder: Path,
    count_bytes: Callable[[int], object] = lambda count: None,
) -> None:
    """Download files into a folder, several at once; complete ones are not downloaded again.

    The files are named by their path below the folder, and `address` is any address in their store.
    `count_bytes` is called with the number of bytes after each piece.
    """
    filesystem = remote.open_filesystem(address)

    def fetch(name: str) -> None:
        _fetch_file(filesystem, files[name], folder / name, count_bytes)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch, files))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, made if needed; other processes of this machine wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(address: str, option: str, files: Mapping[str, RemoteFile]) -> Path:
    from tqdm import tqdm

    folder = cache_folder("downloads") / local_name(address, sorted(files.items()))
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    lock = folder.with_name(f"{folder.name}.lock")
    with remote.reported_errors(address, option), locked(lock):
        # Another process of this host may have downloaded it in the meantime.
        if folder.is_dir():
            return folder
        partial.mkdir(exist_ok=True)
        total = sum(file.size for file in files.values())
        present = sum(path.stat().st_size for path in partial.iterdir())
        local_files.require_free_space(partial, total - present, f"the download of {address}")
        # Bars would fill a log and tear lines that go through `| tee`.
        hidden = not (sys.stdout.isatty() and sys.stderr.isatty())
        with tqdm(
            total=total, unit="B", unit_scale=True, desc=shorten(address, 40), disable=hidden
        ) as bar:
            try:
                fetch_files(address, files, partial, bar.update)
            except OSError as error:
                if not local_files.is_disk_full(error):
                    raise
                raise local_files.disk_full_error(partial, f"the download of {address}") from error
        partial.rename(folder)
    return folder


def _fetch_file(
    filesystem: Any, file: RemoteFile, target: Path, count_bytes: Callable[[int], object]
) -> None:
    """Write one file, continuing an interrupted download of it."""
    if target.is_file() and target.stat().st_size == file.size:
        count_bytes(file.size)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    with part.open("ab") as output:
        # A part belongs to this version of the file, on which the name of its folder depends.
        start = output.tell()
        count_bytes(start)
        while start < file.size:
            end = min(start + CHUNK_BYTES, file.size)
            piece = filesystem.cat_file(file.path, start=start, end=end)
            if not piece:
                break
            output.write(piece)
            start += len(piece)
            count_bytes(len(piece))
    if start != file.size or (file.crc32c and _crc32c(part) != file.crc32c):
        part.unlink()
        raise UserError(f"{file.path} changed while it was downloaded; start again")
    part.rename(target)


def _crc32c(path: Path) -> str:
    """Return the CRC-32C of a file in base64, as Cloud Storage does."""
    import google_crc32c  # comes with the client of Cloud Storage

    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        for _ in checksum.consume(file, CHUNK_BYTES):
            pass
    return base64.b64encode(checksum.digest()).decode()


def _list_names(files: Mapping[str, RemoteFile]) -> str:
    """Return the names of the first files, and the number of the others."""
    names = sorted(files)
    others = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + others
