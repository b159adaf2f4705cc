"""Atomic replacement of files."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` when the block succeeds.

    Readers see either the old file or the new one, never a part of one.
    """
    # In the same folder, since a rename is atomic only within one file system.
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    os.replace(temporary, path)
