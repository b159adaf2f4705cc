"""Checksums of a checkpoint's files: written before the folder gets its name, verified on reading.

CRC-32 detects every flipped bit and truncation. zlib computes it at more than 1 GB/s per thread and
releases the interpreter lock, so that reading the files takes most of the time.

A bucket verifies and keeps a checksum of each object itself. There one listing, without reading
the arrays, compares checksums and sizes with the ones taken when they were written.
"""

import asyncio
import concurrent.futures
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jax_ppo.runtime import compat
from jax_ppo.storage import remote

CHECKSUMS = "checksums.json"
THREADS = 8
_CHUNK_BYTES = 1 << 22
# Orbax reads only small files of the checkpoints that a run does not resume from.
_SMALL_FILE_BYTES = 1 << 20
_STEP_METADATA = "_CHECKPOINT_METADATA"


async def _write_last_metadata(temporary_path: Any) -> None:
    """Write the metadata that Orbax updates last, so that a checksum covers it, too."""
    store = compat.take_metadata_store(temporary_path)
    if store is not None:
        await asyncio.to_thread(store.wait_until_finished)
        await asyncio.to_thread(
            store.update,
            file_path=temporary_path.get() / _STEP_METADATA,
            commit_timestamp_nsecs=time.time_ns(),
        )
        await asyncio.to_thread(store.wait_until_finished)


class ChecksummedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A temporary checkpoint folder of Orbax that gets its checksums before it is renamed.

    Orbax finalizes it on the first process, after all processes have written their arrays.
    """

    async def finalize(self) -> None:
        """Write the last metadata and the checksums, then rename the folder."""
        await _write_last_metadata(self)
        await asyncio.to_thread(write_checksums, Path(self.get()))
        await super().finalize()


class ChecksummedBucketPath(ocp.path.atomicity.CommitFileTemporaryPath):
    """A checkpoint in a bucket, which cannot rename: an object written last makes it complete."""

    async def finalize(self) -> None:
        """Write the last metadata and the checksums, then the object that completes it."""
        await _write_last_metadata(self)
        await asyncio.to_thread(write_bucket_checksums, str(self.get()))
        await super().finalize()


def temporary_path_class(directory: str) -> type[ocp.path.atomicity.TemporaryPathBase]:
    """Return how checkpoints in a directory, a path or an address, become complete."""
    return ChecksummedBucketPath if remote.is_address(directory) else ChecksummedPath


def write_checksums(folder: Path) -> None:
    """Write the size and CRC-32 of every file below the folder to checksums.json in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        # zlib releases the interpreter lock: several files are read side by side.
        checksums = pool.map(_file_checksum, paths)
        files = {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": checksum}
            for path, checksum in zip(paths, checksums, strict=True)
        }
    with (folder / CHECKSUMS).open("w") as file:
        json.dump(files, file, indent=1)
        # On disk before the folder gets its final name, which claims that it is complete.
        file.flush()
        os.fsync(file.fileno())


def write_bucket_checksums(address: str) -> None:
    """Write the size and checksum that the bucket has of every object to checksums.json."""
    files = {
        name: {"bytes": file.size, "crc32c": file.version}
        for name, file in remote.list_files(address, "--workdir").items()
    }
    filesystem = remote.open_filesystem(address)
    filesystem.pipe_file(
        f"{remote.bucket_path(address)}/{CHECKSUMS}", json.dumps(files, indent=1).encode()
    )


def find_bucket_damage(address: str) -> str | None:
    """Return what is wrong with a checkpoint in a bucket, as `find_damage` does."""
    files = remote.list_files(address, "--workdir")
    if CHECKSUMS not in files:
        return f"{CHECKSUMS} is missing"
    try:
        filesystem = remote.open_filesystem(address)
        expected = json.loads(filesystem.cat_file(files[CHECKSUMS].path))
        sizes = {name: int(entry["bytes"]) for name, entry in expected.items()}
        if wrong := _compare_sizes(sizes, {name: file.size for name, file in files.items()}):
            return wrong
        for name, entry in expected.items():
            if files[name].version != entry["crc32c"]:
                return f"the checksum of {name} differs"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS} is unreadable"
    return None


def _compare_sizes(expected: dict[str, int], found: dict[str, int]) -> str | None:
    """Return what existence and size of all files say, which cost no reading."""
    if not expected:
        return f"{CHECKSUMS} names no file"
    for name, size in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes instead of {size}"
    return None


def find_damage(folder: Path, *, small_files_only: bool = False) -> str | None:
    """Return what is wrong with a checkpoint's files, or `None` if they are as they were written.

    With `small_files_only`, checksums of small files alone are computed, and the sizes of all files
    compared.
    """
    try:
        entries = json.loads((folder / CHECKSUMS).read_text())
        sizes = {name: int(entry["bytes"]) for name, entry in entries.items()}
        checksums = {name: int(entry["crc32"]) for name, entry in entries.items()}
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS} is unreadable"
    paths = {name: folder / name for name in sizes}
    found = {name: path.stat().st_size for name, path in paths.items() if path.is_file()}
    if wrong := _compare_sizes(sizes, found):
        return wrong
    if small_files_only:
        paths = {name: path for name, path in paths.items() if sizes[name] <= _SMALL_FILE_BYTES}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for name, checksum in zip(paths, pool.map(_checksum_or_none, paths.values()), strict=True):
            if checksum is None:
                return f"{name} is unreadable"
            if checksum != checksums[name]:
                return f"the checksum of {name} differs"
    return None


class _Folders:
    """The checkpoints in a local directory, by their paths."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def names(self) -> list[str]:
        if not self._directory.is_dir():
            return []
        return [path.name for path in self._directory.iterdir()]

    def find_damage(self, name: str, small_files_only: bool) -> str | None:
        return find_damage(self._directory / name, small_files_only=small_files_only)

    def remove(self, name: str) -> None:
        shutil.rmtree(self._directory / name, ignore_errors=True)

    def rename(self, name: str, new: str) -> None:
        (self._directory / name).rename(self._directory / new)


class _BucketFolders:
    """The complete checkpoints in a bucket; Orbax removes the others."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._filesystem = remote.open_filesystem(directory)

    def names(self) -> list[str]:
        files = remote.list_files(self._directory, "--workdir")
        commit = ocp.path.atomicity.COMMIT_SUCCESS_FILE
        folders = (name.removesuffix(f"/{commit}") for name in files if name.endswith(f"/{commit}"))
        return [name for name in folders if "/" not in name]

    def find_damage(self, name: str, small_files_only: bool) -> str | None:
        del small_files_only  # no file is read
        return find_bucket_damage(f"{self._directory}/{name}")

    def remove(self, name: str) -> None:
        root = remote.bucket_path(self._directory)
        if self._filesystem.exists(f"{root}/{name}"):
            self._filesystem.rm(f"{root}/{name}", recursive=True)

    def rename(self, name: str, new: str) -> None:
        root = remote.bucket_path(self._directory)
        self._filesystem.mv(f"{root}/{name}", f"{root}/{new}", recursive=True)


def set_damaged_aside(directory: str | os.PathLike, report: Callable[[str], None]) -> int | None:
    """Rename damaged checkpoints; return the step of the newest intact one, if there is any.

    Only the newest intact checkpoint is read completely. Of older ones, which are the best of the
    run or spare, the sizes and the small files, which hold the metrics, are compared. `directory`
    is a path or a gs:// address with a folder per step; `report` is called with a line for each
    damaged checkpoint.
    """
    directory = os.fspath(directory)
    folders: _Folders | _BucketFolders = _Folders(directory)
    if remote.is_address(directory):
        folders = _BucketFolders(directory)
    newest = None
    # Folders are named by their step; anything else belongs to Orbax or to the user.
    names = (name for name in folders.names() if name.isdecimal())
    steps = sorted((int(name) for name in names if str(int(name)) == name), reverse=True)
    for position, step in enumerate(steps):
        folder = f"{directory}/{step}"
        damage = folders.find_damage(str(step), small_files_only=newest is not None)
        if damage is None:
            if newest is None:
                newest = step
        elif newest is not None and damage.endswith("is missing"):
            # Old checkpoints are deleted file by file; the run was killed while it did so.
            folders.remove(str(step))
            report(f"{folder} is incomplete ({damage}): removed")
        else:
            aside = f"{step}.damaged"
            folders.remove(aside)
            # Renamed and not deleted: the user may still recover something from it.
            folders.rename(str(step), aside)
            line = f"checkpoint {folder} is damaged ({damage}): renamed to {aside}"
            if newest is None and position + 1 < len(steps):
                line += f"; trying the one of step {steps[position + 1]}"
            elif newest is None:
                line += "; there is no older one, so the run starts again from step 0"
            report(line)
    return newest


def _checksum_or_none(path: Path) -> int | None:
    try:
        return _file_checksum(path)
    except OSError:
        return None


def _file_checksum(path: Path) -> int:
    checksum = 0
    # One buffer for all chunks: a file of many gigabytes needs no more memory.
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(view[:count], checksum)
    return checksum
