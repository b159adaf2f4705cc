"""Work directories in a bucket: the run writes its files to a local folder, which is uploaded.

Checkpoints are written to the bucket directly; metrics, curves, event files and exports appear in
the local folder first. Since objects cannot be appended to, a changed file is uploaded as a whole,
at most every UPLOAD_SECONDS.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jax_ppo.errors import UserError
from jax_ppo.storage import downloads, remote
from jax_ppo.storage.bucket_lock import LOCK_OBJECT, RENEW_SECONDS, BucketLock

UPLOAD_SECONDS = 30.0
CHECKPOINTS = "checkpoints"
EXPORTED = ("config.json", ".safetensors")
_OPTION = "--workdir"
# Larger files do not grow, and are not read at once.
_MOST_BYTES_AT_ONCE = 64 << 20


class StagedFolder:
    """The local folder of a work directory in a bucket."""

    def __init__(self, address: str, process: int) -> None:
        """Prepare the folder for a validated address; each process has its own."""
        self.address = address.rstrip("/")  # gs://BUCKET/PATH
        name = downloads.local_name(self.address, process)
        self.folder = downloads.cache_folder("workdirs") / name
        self._filesystem = remote.open_filesystem(address)
        self._root = remote.bucket_path(address)
        self._inode: int | None = None  # of the folder that `fetch` made
        self._uploaded: dict[str, tuple[int, int]] = {}  # states of files that are in the bucket
        self._removed: set[str] = set()  # files that the run has deleted, but not the bucket's
        self._uploading = threading.Lock()

    def fetch(self, *names: str) -> None:
        """Replace the contents of the local folder with files from the bucket.

        These are the files directly in the work directory and in the folders `names`.
        """
        with self._uploading, remote.reported_errors(self.address, _OPTION):
            fetched = {
                name: file
                for name, file in remote.list_files(self.address, _OPTION).items()
                if name != LOCK_OBJECT and ("/" not in name or name.partition("/")[0] in names)
            }
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self._inode = self.folder.stat().st_ino
            downloads.fetch_files(self.address, fetched, self.folder)
            self._uploaded = {name: _state(self.folder / name) for name in fetched}

    def fetch_folder(self, name: str) -> None:
        """Replace one local folder with the bucket's.

        Other files are left alone: the run may have them open, and write to them later.
        """
        with self._uploading, remote.reported_errors(self.address, _OPTION):
            listed = remote.list_files(f"{self.address}/{name}", _OPTION)
            files = {f"{name}/{path}": file for path, file in listed.items()}
            shutil.rmtree(self.folder / name, ignore_errors=True)
            downloads.fetch_files(self.address, files, self.folder)
            self._uploaded |= {path: _state(self.folder / path) for path in files}

    def upload(self) -> None:
        """Upload changed files, delete removed ones; raise `UserError` if the folder is gone."""
        with self._uploading, remote.reported_errors(self.address, _OPTION):
            # Before `fetch` the folder may have files of another run.
            if self._inode is None:
                return
            # Else its files in the bucket would be taken for removed ones.
            if not self.folder.is_dir() or self.folder.stat().st_ino != self._inode:
                raise UserError(
                    f"{self.folder}, the local folder of this run, was deleted while it ran: what "
                    f"it had not uploaded to {self.address} is lost; run the same command again to "
                    "continue from the last checkpoint"
                )
            local = {self.name_of(path): path for path in self._files()}
            # Uploaded last, config.json marks an export as complete.
            for name in sorted(local, key=lambda name: (name.endswith("config.json"), name)):
                self._upload_file(name, local[name])
            # A file that is only missing here may be the last copy of it.
            for name in sorted(self._removed - local.keys()):
                self._delete(f"{self._root}/{name}")
                self._uploaded.pop(name, None)
            self._removed.clear()

    def name_of(self, path: Path) -> str:
        """Return the name of a local file or folder in the bucket."""
        return path.relative_to(self.folder).as_posix()

    def move(self, path: Path, name: str) -> None:
        """Upload a file under a name, and delete the local one.

        Any process may call this; the file stays in the bucket until its folder is removed.
        """
        with remote.reported_errors(self.address, _OPTION):
            self._filesystem.put_file(str(path), f"{self._root}/{name}")
        path.unlink()

    def remove_file(self, path: Path) -> None:
        """Delete a local file, and with the next upload the bucket's."""
        with self._uploading:
            path.unlink()
            self._removed.add(self.name_of(path))

    def remove(self, name: str) -> None:
        """Remove an earlier export from the bucket: first config.json, which marks it complete."""
        with self._uploading, remote.reported_errors(self.address, _OPTION):
            files = remote.list_files(f"{self.address}/{name}", _OPTION)
            # An interrupted export has only weights.
            if files and not any(file.endswith(EXPORTED) for file in files):
                raise UserError(
                    f"{self.address}/{name} exists and contains something other than an export; "
                    "remove it, or give another --workdir"
                )
            for file in sorted(files, key=lambda file: (not file.endswith("config.json"), file)):
                self._delete(files[file].path)
            prefix = f"{name}/"
            self._uploaded = {
                file: state for file, state in self._uploaded.items() if not file.startswith(prefix)
            }

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # the user may have deleted it
            self._filesystem.rm_file(path)

    def _files(self) -> Iterator[Path]:
        """Yield the files to upload; hidden and temporary ones are still being written."""
        for path in sorted(self.folder.rglob("*")):
            parts = path.relative_to(self.folder).parts
            is_hidden = any(part.startswith(".") for part in parts)
            if not is_hidden and path.suffix not in (".tmp", ".part") and path.is_file():
                yield path

    def _upload_file(self, name: str, path: Path) -> None:
        try:
            # Determined before the file is read, so that later additions are uploaded next time.
            state = _state(path)
            if self._uploaded.get(name) == state:
                return
            target = f"{self._root}/{name}"
            if state[1] > _MOST_BYTES_AT_ONCE:
                self._filesystem.put_file(str(path), target)
            else:
                # Read at once, since the size of a growing file may change during the upload.
                self._filesystem.pipe_file(target, path.read_bytes())
        except FileNotFoundError:
            if path.exists():
                raise
            return  # a temporary folder that was removed or renamed
        self._uploaded[name] = state


@contextlib.contextmanager
def locked_and_uploaded(
    staged: StagedFolder, lock: BucketLock, report: Callable[[str], None]
) -> Iterator[None]:
    """Hold the lock and upload changes during the block, and once more at its end."""
    with remote.reported_errors(staged.address, _OPTION):
        lock.acquire(report)
    stop = threading.Event()
    thread = threading.Thread(
        target=_keep_uploading, args=(staged, lock, stop, report), name="uploads", daemon=True
    )
    thread.start()
    try:
        try:
            yield
        except BaseException:
            # The error or signal that ends the run must not be hidden by one of the upload.
            _upload_or_report(staged, lock, report)
            raise
        lock.require_held()
        staged.upload()
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(Exception):
            lock.release()


def _upload_or_report(
    staged: StagedFolder, lock: BucketLock, report: Callable[[str], None]
) -> None:
    try:
        lock.require_held()
        staged.upload()
    except Exception as error:
        report(f"note: {staged.address} does not have the last files of the run: {error}")


def _keep_uploading(
    staged: StagedFolder, lock: BucketLock, stop: threading.Event, report: Callable[[str], None]
) -> None:
    uploaded_at = time.monotonic()
    is_failing = False
    while not stop.wait(RENEW_SECONDS):
        try:
            lock.renew()
            if time.monotonic() - uploaded_at >= UPLOAD_SECONDS:
                staged.upload()
                uploaded_at = time.monotonic()
            is_failing = False
        # The next attempt may succeed; if the problem lasts, the next checkpoint fails.
        except Exception as error:
            if not is_failing:
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                report(f"note: {staged.address} was not updated, trying again: {kind}{error}")
            is_failing = True


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
