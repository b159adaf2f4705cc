"""The work directory of a run: created, locked against a second run, and seen by all processes.

A work directory is a folder of this machine or of a disk that it mounts; Cloud Storage addresses
(gs://...) are refused by the command line, because they have no locks.
"""

import contextlib
import datetime
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ppo.errors import UserError
from jax_ppo.runtime import distributed

LOCK_FILE = "lock"
# Network file systems show a new file to other hosts after a few seconds.
VISIBLE_SECONDS = 20.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def open_work_directory(workdir: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Create and lock the work directory for the duration of the block.

    The main process holds the lock. The operating system releases it when that process ends, in
    whichever way.

    Args:
      workdir: the folder.
      report: called with lines for the user.

    Raises:
      UserError: on every process: the folder cannot be created or written to, another run uses it,
        or not all processes see it.
    """
    with contextlib.ExitStack() as stack:
        distributed.run_on_main(lambda: stack.enter_context(_locked(workdir, report)))
        require_shared(workdir)
        yield


@contextlib.contextmanager
def _locked(workdir: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Create the folder and hold its lock; raise `UserError` if another run holds it."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / LOCK_FILE).open("a+")
    except OSError as error:
        raise UserError(f"--workdir={workdir}: cannot be written to: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "a process that is just starting"
            raise UserError(
                f"--workdir={workdir}: another run uses it: {holder}; stop that run, or give "
                "another --workdir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            report(f"{workdir} is on a disk without file locks: nothing else prevents two runs")
        # A forked child shares the lock and would keep it when this process is killed.
        children = _FilesClosedInChildren.register(file)
        _write_holder(file)
        try:
            yield
        finally:
            children.discard(file)
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _write_holder(file: IO[str]) -> None:
    started = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
    file.flush()


class _FilesClosedInChildren:
    """Open files that a forked child closes at once."""

    _files: set[IO[str]] | None = None

    @classmethod
    def register(cls, file: IO[str]) -> set[IO[str]]:
        """Add a file, and return the set to remove it from."""
        if cls._files is None:
            cls._files = set()
            os.register_at_fork(after_in_child=cls._close_all)
        cls._files.add(file)
        return cls._files

    @classmethod
    def _close_all(cls) -> None:
        for file in cls._files or ():
            os.close(file.fileno())


def require_shared(workdir: Path, seconds: float = VISIBLE_SECONDS) -> None:
    """Verify that every process sees a file that process 0 writes to the work directory.

    Args:
      workdir: the folder.
      seconds: how long to wait for the file to appear.

    Raises:
      UserError: on every process: some do not see the file. Checkpoints would never be complete.
    """
    if jax.process_count() == 1:
        return
    nonce = int.from_bytes(os.urandom(3), "big")
    # A name of this start only: a file left by an earlier one proves nothing.
    nonce = int(multihost_utils.broadcast_one_to_all(np.int32(nonce)))
    path = workdir / f".shared-{nonce:08d}"
    distributed.run_on_main(path.touch)
    visible = _wait_for(path, seconds)
    # Everyone must agree before the file is removed and before anyone raises.
    all_visible = np.atleast_1d(multihost_utils.process_allgather(np.int32(visible)))
    if distributed.is_main():
        path.unlink(missing_ok=True)
    # Every process raises the same error, with all of those that cannot see the file.
    blind = [str(process) for process in np.flatnonzero(all_visible == 0)]
    if blind:
        raise UserError(
            f"--workdir={workdir.absolute()}: process {', '.join(blind)} of {len(all_visible)} "
            "cannot see what process 0 writes there; give a --workdir on a disk that all hosts "
            "share (NFS, Lustre, Filestore)"
        )


def _wait_for(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        # Listing the folder makes network file systems refresh what they know of it.
        with contextlib.suppress(OSError):
            if path.name in os.listdir(path.parent):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
