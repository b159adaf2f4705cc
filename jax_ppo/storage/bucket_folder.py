"""A work directory in a bucket: a local folder whose files are uploaded, used by one run at a time.

Orbax writes checkpoints to the bucket itself; other files are uploaded as a whole when they change.

The object `run` names the run that uses the folder. A run replaces it when it starts, on condition
that it is still the one just read: of two runs that start together, one is refused. A run that
finds another's object in its place saves nothing more. So the same command resumes a killed run at
once, anywhere.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError
from jax_ppo.storage import downloads, remote

RUN_OBJECT = "run"
UPLOAD_SECONDS = 30.0
EXPORTED = ("config.json", ".safetensors")
_OPTION = "--workdir"


class BucketFolder:
    """The bucket's folder of a work directory, and the local one that stands for it."""

    def __init__(self, address: str, process: int) -> None:
        """Prepare the folder for a validated address; each process has a separate local one."""
        self.address = address.rstrip("/")  # gs://BUCKET/PATH
        name = downloads.local_name(self.address, process)
        self.folder = downloads.cache_folder("workdirs") / name
        self._filesystem = remote.open_filesystem(address)
        self._root = remote.bucket_path(address)
        self._uploaded: dict[str, tuple[int, int]] = {}  # states of files that are in the bucket
        self._uploading = threading.Lock()
        self._bucket: Any = None  # the client's, on the process that has claimed the folder
        self._generation = 0  # of the object that this run has written

    def claim(self, holder: str) -> str:
        """Take the folder for a run, which `holder` describes.

        Return how the run before is described if it has not ended by itself, else "". Raise
        `UserError` if another run claims the folder at the same time.
        """
        from google.api_core import exceptions
        from google.cloud import storage  # comes with gcsfs

        with remote.reported_errors(self.address, _OPTION):
            # Objects belong to buckets, so the project does not matter.
            self._bucket = storage.Client(project="none").bucket(self._root.partition("/")[0])
            # Orbax queries the bucket when it deletes a checkpoint; a missing permission fails now.
            self._bucket.reload()
            before = self._read_claim()
            run = self._bucket.blob(self._run_name)
            run.metadata = {"holder": holder}
            generation = 0 if before is None else before.generation
            # A retry of a write that was not answered may find the object written.
            with contextlib.suppress(exceptions.PreconditionFailed):
                run.upload_from_string("", if_generation_match=generation)
            run = self._read_claim()
            if run is None or _holder(run) != holder:
                raise UserError(
                    f"--workdir={self.address}: another run has just started there"
                    f"{f': {_holder(run)}' if run else ''}; give another --workdir"
                )
            self._generation = run.generation
            return "" if before is None else _holder(before)

    def release(self) -> None:
        """Remove the object of this run, unless another run has replaced it."""
        # A run that ended, whatever this request meets, can be resumed.
        with contextlib.suppress(Exception):
            run = self._read_claim()
            if run is not None and run.generation == self._generation:
                run.delete(if_generation_match=run.generation)

    def fetch(self, name: str = "") -> None:
        """Replace a local folder with the bucket's; without a name, with its files alone."""
        if name:
            files = remote.list_files(f"{self.address}/{name}", _OPTION)
            files = {f"{name}/{path}": file for path, file in files.items()}
        else:
            found = remote.list_files(self.address, _OPTION).items()
            files = {path: file for path, file in found if path != RUN_OBJECT and "/" not in path}
        folder = self.folder / name
        with self._uploading, remote.reported_errors(self.address, _OPTION):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            downloads.fetch_files(self.address, files, self.folder)
            self._uploaded |= {name: _state(self.folder / name) for name in files}

    def upload(self) -> None:
        """Upload changed files; raise `UserError` if another run has claimed the folder."""
        with self._uploading, remote.reported_errors(self.address, _OPTION):
            run = self._read_claim()
            if run is None or run.generation != self._generation:
                cause = "was removed" if run is None else f"is now that of {_holder(run)}"
                raise UserError(
                    f"--workdir={self.address}: the object {RUN_OBJECT!r} of this run {cause}; "
                    "this run saves nothing more there"
                )
            paths = [path for path in self.folder.rglob("*") if path.is_file()]
            local = {self.name_of(path): path for path in paths}
            # Uploaded last, config.json marks an export as complete.
            for name in sorted(local, key=lambda name: (name.endswith("config.json"), name)):
                # Hidden and temporary files are still being written.
                is_hidden = any(part.startswith(".") for part in name.split("/"))
                if not is_hidden and not name.endswith((".tmp", ".part")):
                    self._upload_file(name, local[name])

    @contextlib.contextmanager
    def uploading(self, report: Callable[[str], None]) -> Iterator[None]:
        """Upload changes every UPLOAD_SECONDS during the block, and once more at its end."""
        stop = threading.Event()
        last = ""

        def try_to_upload() -> None:
            nonlocal last
            problem = ""
            try:
                self.upload()
            # The next attempt may succeed; if the problem lasts, the next checkpoint fails.
            except Exception as error:
                problem = f"note: {self.address} lacks the newest files of the run: {error}"
            if problem and problem != last:
                report(problem)
            last = problem

        def keep_uploading() -> None:
            while not stop.wait(UPLOAD_SECONDS):
                try_to_upload()

        thread = threading.Thread(target=keep_uploading, name="uploads", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            try_to_upload()  # its error must not hide the one that ends the run
            raise
        else:
            self.upload()
        finally:
            stop.set()
            thread.join()

    def name_of(self, path: Path) -> str:
        """Return the name of a local file or folder in the bucket."""
        return path.relative_to(self.folder).as_posix()

    def move(self, path: Path, name: str) -> None:
        """Upload a file under a name, and delete the local one; any process may call this."""
        with remote.reported_errors(self.address, _OPTION):
            self._filesystem.put_file(str(path), f"{self._root}/{name}")
        path.unlink()

    def remove_file(self, path: Path) -> None:
        """Delete a file of the run."""
        with self._uploading, remote.reported_errors(self.address, _OPTION):
            path.unlink()
            self._delete(f"{self._root}/{self.name_of(path)}")
            self._uploaded.pop(self.name_of(path), None)

    def remove_export(self, name: str) -> None:
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
                self._uploaded.pop(f"{name}/{file}", None)

    @property
    def _run_name(self) -> str:
        return f"{self._root.partition('/')[2]}/{RUN_OBJECT}".lstrip("/")

    def _read_claim(self) -> Any:
        """Return the client's description of the object `run`; `None` if there is none."""
        return self._bucket.get_blob(self._run_name)

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # the user may have deleted it
            self._filesystem.rm_file(path)

    def _upload_file(self, name: str, path: Path) -> None:
        try:
            # Determined before the file is read, so that later additions are uploaded next time.
            state = _state(path)
            if self._uploaded.get(name) != state:
                # Read at once, since the size of a growing file may change during the upload.
                self._filesystem.pipe_file(f"{self._root}/{name}", path.read_bytes())
                self._uploaded[name] = state
        except FileNotFoundError:
            if path.exists():  # else it was removed or renamed meanwhile
                raise


def _holder(run: Any) -> str:
    return (run.metadata or {}).get("holder", "an unknown process")


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
