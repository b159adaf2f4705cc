"""Free space of the disks that a run writes to, and the errors of full ones."""

import errno
import shutil
from pathlib import Path

from jax_ppo.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# tensorstore, which writes the arrays of checkpoints, has only these words for it.
_FULL_TEXTS = ("RESOURCE_EXHAUSTED", "No space left on device", "Disk quota exceeded")


def require_free_space(folder: Path, needed: int, what: str) -> None:
    """Raise `UserError` if a disk has too little space for what is about to be written.

    Args:
      folder: An existing folder on the disk.
      needed: Bytes that will be written.
      what: What is written, for the message.
    """
    if shutil.disk_usage(folder).free < needed:
        raise disk_full_error(folder, what, needed)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is that of a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(text in str(error) for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full_error(folder: Path, what: str, needed: int | None = None) -> UserError:
    """Return the error for a full disk.

    Args:
      folder: An existing folder on the disk.
      what: What was written, such as "the checkpoint of step 3".
      needed: Its size in bytes, if it is known.
    """
    free = _megabytes(shutil.disk_usage(folder).free)
    need = "" if needed is None else f" needs {_megabytes(needed)};"
    return UserError(
        f"{folder}: the disk is full: {what}{need or ' did not fit;'} {free} are free. Make room, "
        "then the same command resumes from the newest checkpoint"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
