"""The work directory of a run: created, locked against a second run, and seen by all processes.

It is a folder of this machine, of a disk that it mounts, or a gs:// address. For an address the run
writes to a local folder instead (`storage.bucket_folder`), except for its checkpoints.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import jax

from jax_ppo.errors import UserError
from jax_ppo.runtime import distributed, signals
from jax_ppo.storage import local_files, remote
from jax_ppo.storage.bucket_folder import BucketFolder

LOCK_FILE = "lock"
VISIBLE_SECONDS = 20.0  # until network file systems show a new file to other hosts
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP)

_Report = Callable[[str], None]
_open_buckets: dict[Path, BucketFolder] = {}  # those that this process uses, by local folder
_lost_runs: dict[Path, str] = {}  # how a run that left its lock in the folder has ended, or ""


@contextlib.contextmanager
def open_work_directory(workdir: str | Path, report: _Report) -> Iterator[Path]:
    """Create and lock the work directory for the duration of the block, and yield its folder.

    The main process holds the lock of a folder until it ends, in whichever way; in a bucket the run
    that has started last may write. Raise `UserError`, on every process, if the folder cannot be
    created or written to, another run uses it, or not all processes see it.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(workdir, str) and remote.is_address(workdir):
            yield stack.enter_context(_open_bucket(workdir, report))
            return
        folder = Path(workdir)
        distributed.run_on_main(lambda: stack.enter_context(_locked(folder, report)))
        require_shared(folder)
        yield folder


@contextlib.contextmanager
def _open_bucket(address: str, report: _Report) -> Iterator[Path]:
    """Claim a work directory in a bucket, and yield the local folder that stands for it."""
    bucket = BucketFolder(address, jax.process_index())
    with contextlib.ExitStack() as stack:

        def claim() -> None:
            # The first access: it reports a missing bucket, permission or credentials.
            remote.list_files(address, "--workdir")
            before = bucket.claim(_describe_process())
            stack.callback(bucket.release)
            _lost_runs[bucket.folder] = before and (
                f"the run before, {before}, did not end by itself (killed?); if it is still "
                "running, it ends before it saves again"
            )

        distributed.run_on_main(claim)
        bucket.fetch()
        distributed.run_on_main(lambda: stack.enter_context(bucket.uploading(report)))
        _open_buckets[bucket.folder] = bucket
        stack.callback(_open_buckets.pop, bucket.folder)
        yield bucket.folder


def checkpoint_directory(folder: str | Path) -> str:
    """Return where the checkpoints of a run are, from its work directory."""
    return f"{shown_path(folder)}/{local_files.CHECKPOINTS}"


def shown_path(folder: str | Path) -> str:
    """Return the work directory as a user knows it, also from the local folder of a bucket."""
    bucket = _open_buckets.get(Path(folder))
    return str(folder) if bucket is None else bucket.address


def has_checkpoints(folder: str | Path) -> bool:
    """Return whether a run has checkpoints, from its work directory."""
    directory = checkpoint_directory(folder)
    if remote.is_address(directory):
        return bool(remote.list_files(directory, "--workdir"))
    return Path(directory).is_dir() and any(Path(directory).iterdir())


def refuse_checkpoints(workdir: str | Path) -> None:
    """Raise `UserError` if a work directory has checkpoints."""
    if has_checkpoints(workdir):
        raise UserError(
            f"--workdir={workdir}: a training run has checkpoints there, and an evaluation would "
            "replace its metrics and responses; give another --workdir"
        )


def lost_run(folder: Path) -> str:
    """Return, on the main process, a line about the folder's last run if it was killed; else ""."""
    return _lost_runs.get(folder, "")


def publish(folder: Path) -> None:
    """Upload what has changed to a bucket, on the main process; raise `UserError` if it fails."""
    if folder in _open_buckets:
        _open_buckets[folder].upload()


def fetch_folder(folder: Path, name: str) -> None:
    """Fetch a folder that an interrupted run has written, if the work directory is in a bucket."""
    if folder in _open_buckets:
        _open_buckets[folder].fetch(name)


def remove_file(path: Path) -> None:
    """Delete a file of a run, in its bucket too; nothing else is deleted there."""
    if bucket := bucket_of(path):
        bucket.remove_file(path)
    else:
        path.unlink()


def bucket_of(folder: Path) -> BucketFolder | None:
    """Return the open bucket that a folder of a run's files is on its way to, if there is one."""
    opened = (_open_buckets[above] for above in folder.parents if above in _open_buckets)
    return next(opened, None)


@contextlib.contextmanager
def _locked(workdir: Path, report: _Report) -> Iterator[None]:
    """Create the folder and hold its lock; raise `UserError` if another run holds it."""
    _refuse_foreign_config(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / LOCK_FILE).open("a+")
    except FileExistsError:
        raise UserError(
            f"--workdir={workdir}: is a file, or a link to nothing; expected a folder, or a name "
            "for one"
        ) from None
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
        _held_files.add(file)
        file.seek(0)
        # A run that ends, even by an error, empties the file.
        _lost_runs[workdir] = ""
        if lock := file.read().splitlines():
            written = max(entry.stat().st_mtime for entry in os.scandir(workdir) if entry.is_file())
            reason = lock[1] if len(lock) > 1 else "without a word (killed?)"
            _lost_runs[workdir] = (
                f"the run before, {lock[0]}, ended: {reason}; it last wrote at "
                f"{_format_time(written)}"
            )
        file.truncate(0)
        _write_line(file, _describe_process())
        signals.on_abrupt_end(lambda reason, code: _write_line(file, reason))
        try:
            yield
        finally:
            _held_files.discard(file)
            with contextlib.suppress(OSError):
                file.truncate(0)
                fcntl.flock(file, fcntl.LOCK_UN)


def _describe_process() -> str:
    """Return a line about this process, to be written to the folder that it uses from now on."""
    return f"process {os.getpid()} on {socket.gethostname()}, started {_format_time(time.time())}"


def _format_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _refuse_foreign_config(workdir: Path) -> None:
    config = {"experiment_name": ""}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "experiment_name" not in config:
        raise UserError(
            f"--workdir={workdir}: holds a config.json that is not a run's (a model's?), which the "
            "run would replace; give another --workdir"
        )


def _write_line(file: IO[str], text: str) -> None:
    # The block that holds the lock may be over.
    with contextlib.suppress(OSError, ValueError):
        file.write(f"{text}\n")
        file.flush()


_held_files: set[IO[str]] = set()  # open files that a forked child closes at once


def _close_held_files() -> None:
    for file in _held_files:
        os.close(file.fileno())


os.register_at_fork(after_in_child=_close_held_files)


def require_shared(workdir: Path) -> None:
    """Raise `UserError` on every process unless all soon see a file that process 0 writes."""
    if jax.process_count() == 1:
        return
    # A name of this start only: a file left by an earlier one proves nothing.
    path = workdir / f".shared-{distributed.allgather_json(os.urandom(4).hex())[0]}"
    distributed.run_on_main(path.touch)
    deadline = time.monotonic() + VISIBLE_SECONDS
    is_visible = False
    while not is_visible and time.monotonic() < deadline:
        # Listing the folder makes network file systems refresh what they know of it.
        with contextlib.suppress(OSError):
            is_visible = path.name in os.listdir(path.parent)
        if not is_visible:
            time.sleep(0.2)
    # Everyone must agree before the file is removed and before anyone raises.
    all_visible = distributed.allgather_json(is_visible)
    if distributed.is_main():
        path.unlink(missing_ok=True)
    # Every process raises the same error, with all of those that cannot see the file.
    blind = [str(process) for process, visible in enumerate(all_visible) if not visible]
    if blind:
        raise UserError(
            f"--workdir={workdir.absolute()}: process {', '.join(blind)} of {len(all_visible)} "
            "cannot see what process 0 writes there; give a --workdir on a disk that all hosts "
            "share (NFS, Lustre, Filestore)"
        )
