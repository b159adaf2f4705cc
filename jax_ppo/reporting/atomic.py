"""Atomic replacement of files."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jax_ppo.runtime import distributed


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` when the block succeeds.

    Readers see either the old file or the new one, never a part of one.
    """
    # In the same folder, since a rename is atomic only within one file system.
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    os.replace(temporary, path)


def write_json_lines(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    """Write JSON objects, one per line, on the main process; the file is replaced atomically."""
    if not distributed.is_main():
        return
    with replace_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for value in objects:
            text = json.dumps(value, ensure_ascii=False)
            file.write(text.encode("utf-8", errors="replace").decode() + "\n")
