"""A lock on a folder in Cloud Storage: an object that its holder keeps renewing.

Buckets have no locks that end with a process. Instead, every write of the object names the
generation that it replaces, so that only one of two competing processes succeeds. A holder that has
not renewed its lock for STALE_SECONDS is presumed dead; a dead process of the same machine is
recognized at once. Clocks of different machines are never compared.
"""

import datetime
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax_ppo.errors import UserError
from jax_ppo.storage import remote

LOCK_OBJECT = "lock"
RENEW_SECONDS = 15.0
STALE_SECONDS = 60.0
POLL_SECONDS = 1.0

_own_tokens: set[str] = set()


class _LockObject(NamedTuple):
    """The object in the bucket."""

    generation: int
    contents: dict[str, Any]

    @property
    def token(self) -> str | None:
        return self.contents.get("token")

    @property
    def holder(self) -> str:
        return str(self.contents.get("holder", "an unknown process"))

    def describe_loss(self) -> str:
        """Return a line about the end of a run that has left this lock."""
        renewed = self.contents.get("renewed")
        last = ""
        if isinstance(renewed, int | float):
            last = f"; it last renewed its lock at {format_time(renewed)}"
        return (
            f"the run before, {self.holder}, ended: without a word (killed?){last}; what it had "
            "not uploaded to the bucket by then is lost"
        )


class BucketLock:
    """The lock of one folder."""

    def __init__(self, address: str) -> None:
        """Prepare the lock of a folder, a validated gs:// address."""
        from google.cloud import storage  # comes with gcsfs

        self._address = address
        bucket, _, folder = remote.bucket_path(address).partition("/")
        self._name = f"{folder}/{LOCK_OBJECT}".lstrip("/")
        # Objects belong to buckets, so the project does not matter.
        self._bucket = storage.Client(project="none").bucket(bucket)
        self._generation = 0  # of the object that this process last wrote
        self._token = uuid.uuid4().hex
        self.lost_run = ""  # a line about the run whose lock was taken over, if it was
        self._contents = {
            "holder": describe_process(),
            "token": self._token,
            "machine": _machine(),
            "pid": os.getpid(),
        }

    def acquire(self, report: Callable[[str], None]) -> None:
        """Take the lock, or raise `UserError` if another run holds it.

        Wait for up to STALE_SECONDS to see whether its holder is alive.
        """
        # Orbax queries the bucket when it deletes a checkpoint; a missing permission fails now.
        self._bucket.reload()
        first_seen: int | None = None
        deadline = 0.0
        while not self._write(replaces=0):
            lock = self._read()
            if lock is None:  # released in the meantime
                continue
            if lock.token in _own_tokens:
                raise self._held_error(lock)
            is_stale = lock.generation == first_seen and time.monotonic() > deadline
            if is_stale or _is_dead(lock):
                if self._write(replaces=lock.generation):
                    self.lost_run = lock.describe_loss()
                    break
                continue
            if first_seen is None:
                first_seen = lock.generation
                deadline = time.monotonic() + STALE_SECONDS
                report(
                    f"{self._address} is locked by {lock.holder}: waiting up to "
                    f"{STALE_SECONDS:g} s to see whether that run is alive"
                )
            elif lock.generation != first_seen:
                raise self._held_error(lock)
            time.sleep(POLL_SECONDS)
        _own_tokens.add(self._token)

    def renew(self) -> None:
        """Show that the holder is alive; raise `UserError` if another run has taken the lock."""
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
        lock = self._read()
        if lock is None or lock.token != self._token:
            return
        try:
            self._bucket.blob(self._name).delete(if_generation_match=lock.generation)
        except (exceptions.NotFound, exceptions.PreconditionFailed):
            pass

    def _write(self, replaces: int) -> bool:
        """Write the object if it has this generation, 0 for none; return whether it did."""
        from google.api_core import exceptions

        blob = self._bucket.blob(self._name)
        # The contents change each time, and with them the generation that shows a renewal.
        text = json.dumps(self._contents | {"renewed": time.time()})
        try:
            blob.upload_from_string(text, if_generation_match=replaces)
        except exceptions.PreconditionFailed:
            return False
        self._generation = int(blob.generation)
        return True

    def _read(self) -> _LockObject | None:
        """Return the object; `None` if it does not exist."""
        from google.api_core import exceptions

        try:
            blob = self._bucket.get_blob(self._name)
            if blob is None:
                return None
            contents = json.loads(blob.download_as_bytes())
        except exceptions.NotFound:
            return None
        except ValueError:
            contents = None
        if not isinstance(contents, dict):  # not written by this program
            contents = {}
        return _LockObject(generation=int(blob.generation), contents=contents)

    def _require_own(self, lock: _LockObject | None) -> None:
        if lock is not None and lock.token == self._token:
            # A retried renewal may have succeeded without an answer.
            self._generation = lock.generation
            return
        holder = "nobody" if lock is None else lock.holder
        raise UserError(
            f"--workdir={self._address}: this run has lost its lock, which is now held by "
            f"{holder}: it was not renewed for {STALE_SECONDS:g} s, or the object {LOCK_OBJECT} "
            "was removed"
        )

    def _held_error(self, lock: _LockObject) -> UserError:
        return UserError(
            f"--workdir={self._address}: another run uses it: {lock.holder}; stop that run, or "
            "give another --workdir"
        )


def describe_process() -> str:
    """Return this process in words, for the lock that it holds from now on."""
    return f"process {os.getpid()} on {socket.gethostname()}, started {format_time(time.time())}"


def format_time(seconds: float) -> str:
    """Return a time since the epoch as date, time and zone of this machine."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _machine() -> str:
    """Return an identifier of the system in which process ids are unique; "" if unknown."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    try:
        return f"{boot.read_text().strip()} {os.readlink(namespace)}"
    except OSError:
        return ""


def _is_dead(lock: _LockObject) -> bool:
    """Return whether the holder is known to be dead: a process of this machine that has ended."""
    machine = lock.contents.get("machine")
    pid = lock.contents.get("pid")
    if not machine or machine != _machine() or not isinstance(pid, int):
        return False
    # If the holder's process id is now this process's own, the holder has ended.
    return pid == os.getpid() or not Path(f"/proc/{pid}").exists()
