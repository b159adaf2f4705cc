"""Checksums of a checkpoint's files: written before the folder gets its name, verified on reading.

CRC-32 detects every flipped bit and truncation. zlib computes it at more than 1 GB/s per thread and
releases the interpreter lock, so that reading the files takes most of the time.

A bucket verifies and keeps a checksum of each object itself. There one listing, without reading
the arrays, compares checksums and sizes with the ones taken when they were written.
"""

import asyncio
import concurrent.futures
import functools
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
    """A temporary checkpoint folder of Orbax that gets its checksums before it is renamed."""

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
        files = {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": checksum}
            for path, checksum in zip(paths, pool.map(_file_checksum, paths), strict=True)
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
    remote.open_filesystem(address).pipe_file(
        f"{remote.bucket_path(address)}/{CHECKSUMS}", json.dumps(files, indent=1).encode()
    )


def find_damage(folder: str | Path, *, small_files_only: bool = False) -> str | None:
    """Return what is wrong with a checkpoint's files, or `None` if they are as they were written.

    `small_files_only` computes checksums of small local files alone, and compares all sizes.
    """
    read_checksums: Callable[[], bytes]
    if isinstance(folder, str) and remote.is_address(folder):
        objects = remote.list_files(folder, "--workdir")
        sizes = {name: file.size for name, file in objects.items()}
        kind, root = "crc32c", remote.bucket_path(folder)
        filesystem = remote.open_filesystem(folder)
        read_checksums = functools.partial(filesystem.cat_file, f"{root}/{CHECKSUMS}")
    else:
        objects, kind, root = {}, "crc32", str(folder)
        files = [path for path in Path(root).rglob("*") if path.is_file()]
        sizes = {path.relative_to(root).as_posix(): path.stat().st_size for path in files}
        read_checksums = Path(root, CHECKSUMS).read_bytes
    if CHECKSUMS not in sizes:
        return f"{CHECKSUMS} is missing"
    try:
        entries = json.loads(read_checksums())
        expected = {name: (int(entry["bytes"]), entry[kind]) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS} is unreadable"
    if not expected:
        return f"{CHECKSUMS} names no file"
    for name, (size, _) in expected.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes instead of {size}"

    def checksum(name: str) -> Any:
        if name in objects:
            return objects[name].version
        if small_files_only and sizes[name] > _SMALL_FILE_BYTES:
            return expected[name][1]
        try:
            return _file_checksum(Path(root, name))
        except OSError:
            return None

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for name, found in zip(expected, pool.map(checksum, expected), strict=True):
            if found is None:
                return f"{name} is unreadable"
            if found != expected[name][1]:
                return f"the checksum of {name} differs"
    return None


def set_damaged_aside(directory: str, report: Callable[[str], None]) -> int | None:
    """Rename damaged checkpoints; return the step of the newest intact one, if there is any.

    That one is read completely; of older ones only the sizes and the small files, which hold the
    metrics. `directory` is a path or an address with a folder per step; `report` is called with a
    line for each damaged checkpoint.
    """
    newest = None
    if remote.is_address(directory):
        # Of complete checkpoints: Orbax removes the others.
        end = f"/{ocp.path.atomicity.COMMIT_SUCCESS_FILE}"
        files = remote.list_files(directory, "--workdir")
        names = [x.removesuffix(end) for x in files if x.endswith(end)]
    else:
        names = os.listdir(directory) if os.path.isdir(directory) else []
    # Folders are named by their step; anything else belongs to Orbax or to the user.
    steps = sorted(
        (int(name) for name in names if name.isdecimal() and str(int(name)) == name), reverse=True
    )
    for position, step in enumerate(steps):
        folder = f"{directory}/{step}"
        damage = find_damage(folder, small_files_only=newest is not None)
        if damage is None:
            if newest is None:
                newest = step
        elif newest is not None and damage.endswith("is missing"):
            # Old checkpoints are deleted file by file; the run was killed while it did so.
            _remove(folder)
            report(f"{folder} is incomplete ({damage}): removed")
        else:
            aside = f"{step}.damaged"
            _remove(f"{directory}/{aside}")
            # Renamed and not deleted: the user may still recover something from it.
            if remote.is_address(folder):
                paths = map(remote.bucket_path, (folder, f"{directory}/{aside}"))
                remote.open_filesystem(folder).mv(*paths, recursive=True)
            else:
                os.rename(folder, f"{directory}/{aside}")
            line = f"checkpoint {folder} is damaged ({damage}): renamed to {aside}"
            if newest is None and position + 1 < len(steps):
                line += f"; trying the one of step {steps[position + 1]}"
            elif newest is None:
                line += "; there is no older one, so the run starts again from step 0"
            report(line)
    return newest


def _remove(folder: str) -> None:
    if not remote.is_address(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    filesystem, path = remote.open_filesystem(folder), remote.bucket_path(folder)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


def _file_checksum(path: Path) -> int:
    checksum = 0
    # One buffer for all chunks: a file of many gigabytes needs no more memory.
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(view[:count], checksum)
    return checksum
