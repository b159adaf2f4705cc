"""The files of a cache: each is complete and has the checksum of its contents in its name.

    IDENTITY.CRC32.arrow    a file, named after a hash of everything that determines its contents
    RANDOM.unfinished       a file that a process is writing and holds a lock on

The kernel releases the locks of a process however it ends. That identifies the files that a killed
process left, even if several containers, whose process ids may be equal, share the folder.
"""

import collections
import concurrent.futures
import contextlib
import fcntl
import logging
import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 22
_THREADS = 8
_UNFINISHED = ".unfinished"


def find_intact_files(folder: Path, identities: Sequence[str]) -> list[Path | None]:
    """Return the file of each identity, `None` if it is missing or damaged.

    All files are read: CRC-32 detects flipped bits and truncation. Damaged files are logged.
    """
    named: dict[str, list[Path]] = collections.defaultdict(list)
    for path in folder.glob("*.arrow"):
        named[path.name.partition(".")[0]].append(path)

    def find_intact(identity: str) -> Path | None:
        return next(filter(_is_intact, named[identity]), None)

    # zlib releases the interpreter lock.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        intact_paths = list(threads.map(find_intact, identities))
    for identity, intact_path in zip(identities, intact_paths, strict=True):
        if intact_path is None and named[identity]:
            log.warning(
                "config.data.cache_dir: %s is damaged and is written again", named[identity][0]
            )
    return intact_paths


def _is_intact(path: Path) -> bool:
    try:
        return path.name.split(".")[1] == _checksum(path)
    except OSError:
        return False


def _checksum(path: Path) -> str:
    """Return the CRC-32 of a file, eight hexadecimal digits."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


@contextlib.contextmanager
def open_unfinished(folder: Path) -> Iterator[BinaryIO]:
    """Create a file to write to; the end of the context removes it unless it has been published.

    Raises:
      OSError: the folder cannot be written to.
    """
    file = _create_locked(folder)
    try:
        yield file
    finally:
        Path(file.name).unlink(missing_ok=True)
        file.close()


def publish_cache_file(file: BinaryIO, identity: str) -> Path:
    """Rename a completely written file of `open_unfinished` to its final name; return its path."""
    file.flush()
    unfinished = Path(file.name)
    path = unfinished.with_name(f"{identity}.{_checksum(unfinished)}.arrow")
    # If two runs write the same file, either result is valid.
    unfinished.replace(path)
    return path


def _create_locked(folder: Path) -> BinaryIO:
    while True:
        file = (folder / f"{secrets.token_hex(8)}{_UNFINISHED}").open("xb")
        # Some shared disks have no locks; nothing is removed there.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another run may have removed it before it was locked.
        if os.path.exists(file.name):
            return file
        file.close()


def remove_abandoned_files(folder: Path) -> None:
    """Remove the unfinished files that no living process writes."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        # Errors mean that it is locked, already removed by another run, or in a read-only folder.
        with contextlib.suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
