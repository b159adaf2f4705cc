"""A lock on a folder in Cloud Storage: an object that its holder keeps renewing.

Buckets have no locks that end with a process. Instead, every write of the object names the
generation that it replaces, so that of two processes that try, one succeeds. A holder that has not
renewed its lock for STALE_SECONDS is taken to be dead; a dead process of the same machine is
recognized at once. No clocks of different machines are compared.
"""

import datetime
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError
from jax_ppo.storage import remote

LOCK_OBJECT = "lock"
RENEW_SECONDS = 15.0
STALE_SECONDS = 60.0
POLL_SECONDS = 1.0

_own_tokens: set[str] = set()


class BucketLock:
    """The lock of one folder."""

    def __init__(self, address: str) -> None:
        """Prepare the lock of a folder, a validated gs:// address."""
        from google.cloud import storage  # comes with gcsfs

        self._address = address
        bucket, _, folder = remote.bucket_path(address).partition("/")
        self._name = f"{folder}/{LOCK_OBJECT}".lstrip("/")
        # Objects belong to buckets: the project plays no role.
        self._bucket = storage.Client(project="none").bucket(bucket)
        self._generation = 0  # of the object as this process wrote it
        started = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        self._token = uuid.uuid4().hex
        self._contents = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}, started {started}",
            "token": self._token,
            "machine": _machine(),
            "pid": os.getpid(),
        }

    def acquire(self, report: Callable[[str], None]) -> None:
        """Take the lock; wait for up to STALE_SECONDS to see whether its holder is alive.

        Args:
          report: called with a line before a wait.

        Raises:
          UserError: another run holds the lock.
        """
        # Orbax asks for the bucket when it deletes a checkpoint: a missing permission shows now.
        self._bucket.reload()
        first_seen: int | None = None
        deadline = 0.0
        while not self._write(replaces=0):
            found = self._read()
            if found is None:  # released in the meantime
                continue
            generation, contents = found
            if contents.get("token") in _own_tokens:
                raise self._held_error(contents)
            is_stale = first_seen is not None and time.monotonic() > deadline
            if _is_dead(contents) or (is_stale and generation == first_seen):
                if self._write(replaces=generation):
                    break
                continue
            if first_seen is None:
                first_seen = generation
                deadline = time.monotonic() + STALE_SECONDS
                report(
                    f"{self._address} is locked by {contents.get('holder')}: waiting up to "
                    f"{STALE_SECONDS:g} s to see whether that run is alive"
                )
            elif generation != first_seen:
                raise self._held_error(contents)
            time.sleep(POLL_SECONDS)
        _own_tokens.add(self._token)

    def renew(self) -> None:
        """Show that the holder is alive.

        Raises:
          UserError: another run has taken the lock.
        """
        if self._write(replaces=self._generation):
            return
        self._require_own(self._read())

    def require_held(self) -> None:
        """Raise `UserError` if another run has taken the lock."""
        self._require_own(self._read())

    def release(self) -> None:
        """Delete the object, unless another run has taken the lock."""
        from google.api_core import exceptions

        _own_tokens.discard(self._token)
        found = self._read()
        if found is None or found[1].get("token") != self._token:
            return
        try:
            self._bucket.blob(self._name).delete(if_generation_match=found[0])
        except (exceptions.NotFound, exceptions.PreconditionFailed):
            pass

    def _write(self, replaces: int) -> bool:
        """Write the object and return whether it had this generation; 0: it did not exist."""
        from google.api_core import exceptions

        blob = self._bucket.blob(self._name)
        # New contents each time: a renewal is recognized by its generation.
        text = json.dumps(self._contents | {"renewed": time.time()})
        try:
            blob.upload_from_string(text, if_generation_match=replaces)
        except exceptions.PreconditionFailed:
            return False
        self._generation = int(blob.generation)
        return True

    def _read(self) -> tuple[int, dict[str, Any]] | None:
        """Return the generation of the object and its contents, or `None` if it does not exist."""
        from google.api_core import exceptions

        try:
            blob = self._bucket.get_blob(self._name)
            if blob is None:
                return None
            contents = json.loads(blob.download_as_bytes())
        except exceptions.NotFound:
            return None
        except ValueError:  # not written by this program
            contents = {}
        return int(blob.generation), contents if isinstance(contents, dict) else {}

    def _require_own(self, found: tuple[int, dict[str, Any]] | None) -> None:
        if found is not None and found[1].get("token") == self._token:
            # A retried renewal may have succeeded without an answer.
            self._generation = found[0]
            return
        other = "nobody" if found is None else found[1].get("holder", "an unknown process")
        raise UserError(
            f"--workdir={self._address}: this run has lost its lock, which is now held by {other}: "
            f"it was not renewed for {STALE_SECONDS:g} s, or the object {LOCK_OBJECT} was removed"
        )

    def _held_error(self, contents: dict[str, Any]) -> UserError:
        return UserError(
            f"--workdir={self._address}: another run uses it: "
            f"{contents.get('holder', 'an unknown process')}; stop that run, or give another "
            "--workdir"
        )


def _machine() -> str:
    """Return what identifies the processes among which process ids are unique."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    try:
        return f"{boot.read_text().strip()} {os.readlink(namespace)}"
    except OSError:
        return ""


def _is_dead(contents: dict[str, Any]) -> bool:
    """Return whether the holder is known to be dead: a process of this machine that is over."""
    machine, pid = contents.get("machine"), contents.get("pid")
    if not machine or machine != _machine() or not isinstance(pid, int):
        return False
    # Another process that got the same number, which here is this one, is not the holder.
    return pid == os.getpid() or not Path(f"/proc/{pid}").exists()
