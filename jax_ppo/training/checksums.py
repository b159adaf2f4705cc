"""Checksums of a checkpoint's files: written before the folder gets its name, verified on reading.

CRC-32 detects every flipped bit and truncation. zlib computes it at more than 1 GB/s per thread and
releases the interpreter lock, so that reading the files takes most of the time.
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

CHECKSUMS = "checksums.json"
THREADS = 8
_CHUNK_BYTES = 1 << 22
# Orbax reads only small files of the checkpoints that a run does not resume from.
_SMALL_FILE_BYTES = 1 << 20
_STEP_METADATA = "_CHECKPOINT_METADATA"


class ChecksummedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A temporary checkpoint folder of Orbax that gets its checksums before it is renamed.

    Orbax finalizes it on the first process, after all processes have written their arrays.
    """

    async def finalize(self) -> None:
        """Write the last metadata and the checksums, then rename the folder."""
        # Orbax updates the metadata last; done here, it is covered by a checksum, too.
        store: Any = self._checkpoint_metadata_store
        self._checkpoint_metadata_store: Any = None
        if store is not None:
            await asyncio.to_thread(store.wait_until_finished)
            await asyncio.to_thread(
                store.update,
                file_path=self.get() / _STEP_METADATA,
                commit_timestamp_nsecs=time.time_ns(),
            )
            await asyncio.to_thread(store.wait_until_finished)
        await asyncio.to_thread(write_checksums, Path(self.get()))
        await super().finalize()


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


def find_damage(folder: Path, *, small_files_only: bool = False) -> str | None:
    """Return what is wrong with a checkpoint's files, or `None` if they are as they were written.

    Args:
      folder: of one checkpoint.
      small_files_only: compute the checksums of small files only, and compare the sizes of all.
    """
    try:
        expected = {
            folder / name: (int(entry["bytes"]), int(entry["crc32"]))
            for name, entry in json.loads((folder / CHECKSUMS).read_text()).items()
        }
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS} is unreadable"
    if not expected:
        return f"{CHECKSUMS} names no file"
    # Existence and size of all files come first: they cost no reading.
    for path, (size, _) in expected.items():
        name = path.relative_to(folder)
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    limit = _SMALL_FILE_BYTES if small_files_only else float("inf")
    paths = [path for path, (size, _) in expected.items() if size <= limit]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for path, checksum in zip(paths, pool.map(_checksum_or_none, paths), strict=True):
            if checksum is None:
                return f"{path.relative_to(folder)} is unreadable"
            if checksum != expected[path][1]:
                return f"the checksum of {path.relative_to(folder)} differs"
    return None


def set_damaged_aside(directory: Path, report: Callable[[str], None]) -> int | None:
    """Rename damaged checkpoints, so that the newest one in the directory is intact.

    Only the newest intact checkpoint is read completely. Older ones are the best of the run or
    spare: their sizes and small files, which hold their metrics, are compared.

    Args:
      directory: holds a folder per step.
      report: called with a line for each damaged checkpoint.

    Returns:
      The step of the newest intact checkpoint, or `None`.
    """
    if not directory.is_dir():
        return None
    newest = None
    # Folders are named by their step; anything else belongs to Orbax or to the user.
    names = (path.name for path in directory.iterdir() if path.name.isdecimal())
    steps = sorted((int(name) for name in names if str(int(name)) == name), reverse=True)
    for position, step in enumerate(steps):
        folder = directory / str(step)
        damage = find_damage(folder, small_files_only=newest is not None)
        if damage is None:
            newest = step if newest is None else newest
        elif newest is not None and damage.endswith("is missing"):
            # Old checkpoints are deleted file by file; the run was killed while it did so.
            shutil.rmtree(folder)
            report(f"{folder} is incomplete ({damage}): removed")
        else:
            aside = directory / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            # Renamed and not deleted: the user may still recover something from it.
            folder.rename(aside)
            report(_describe_damage(folder, damage, aside, newest, steps[position + 1 :]))
    return newest


def _describe_damage(
    folder: Path, damage: str, aside: Path, newest: int | None, older: list[int]
) -> str:
    text = f"checkpoint {folder} is damaged ({damage}): renamed to {aside.name}"
    if newest is not None:
        return text
    if not older:
        return f"{text}; there is no older one, so the run starts again from step 0"
    return f"{text}; trying the one of step {older[0]}"


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
