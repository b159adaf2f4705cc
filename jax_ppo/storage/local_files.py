"""Local paths that options name, free space on their disks, and the errors of full disks."""

import errno
import shutil
from pathlib import Path

from jax_ppo.errors import UserError, shorten

CHECKPOINTS = "checkpoints"  # the folder of checkpoints in a work directory

# EFBIG: beyond the limit of this process (ulimit -f) or of the file system on the size of a file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# tensorstore, which writes the arrays of checkpoints, reports it only in these words.
_FULL_TEXTS = (
    "RESOURCE_EXHAUSTED",
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
)


def expand_local_path(path: str, option: str) -> Path:
    """Return the path in an option, which need not exist, with `~` and `~USER` replaced.

    Raise `UserError` if there is no such user, or if the operating system refuses to look the path
    up, for example because it is too long. `Path.is_file` and `is_dir` do not raise for the result.
    """
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option}={shorten(path)!r}: not a usable path: {reason}") from error
    return expanded


def require_free_space(folder: Path, needed: int, what: str) -> None:
    """Raise `UserError` if a folder's disk lacks the bytes that are about to be written."""
    if shutil.disk_usage(folder).free < needed:
        raise disk_full_error(folder, what, needed)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error or its cause is a full disk, or a file beyond the limit on sizes."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(text in str(error) for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full_error(folder: Path, what: str, needed: int | None = None) -> UserError:
    """Return the error for a full disk, or for a file beyond the limit on the size of files.

    `what`, such as "the checkpoint of step 3", was written to an existing folder; `needed` is its
    size in bytes, if known.
    """
    free = _megabytes(shutil.disk_usage(folder).free)
    need = "did not fit" if needed is None else f"needs {_megabytes(needed)}"
    return UserError(
        f"{folder}: the disk is full: {what} {need}; {free} are free. Make room, or raise the "
        "limit on files (`ulimit -f`), then the same command resumes from the newest checkpoint"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
