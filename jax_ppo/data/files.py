"""Rows of files, each with the place it stands at."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from jax_ppo.errors import UserError, did_you_mean

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def read_rows(path: Path, option: str) -> Iterator[tuple[str, dict]]:
    """Yields (where, row) of a JSONL, gzipped JSONL or Parquet file; `where` is "FILE:LINE" or "FILE, row N", from 1.

    Raises:
      UserError: no such file, not of its suffix's format, a line that is no JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise _missing(path, option)
    if path.name.endswith(".parquet"):
        return _parquet_rows(path)
    return _json_rows(path)


def _missing(path, option):
    if path.is_dir():
        return UserError(
            f"{option}: {path} is a folder; expected a file that ends in {', '.join(SUFFIXES)}"
        )
    folder = path.parent
    if not folder.is_dir():
        return UserError(
            f"{option}: there is no file {path}, nor a folder {folder} (looked from {Path.cwd()})"
        )
    hint = did_you_mean(path.name, (f.name for f in folder.iterdir() if f.name.endswith(SUFFIXES)))
    return UserError(f"{option}: there is no file {path}.{hint}")


def _json_rows(path):
    opened = gzip.open if path.name.endswith(".gz") else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _json_object(line, f"{path}:{number}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        kind = "gzipped UTF-8 text" if opened is gzip.open else "UTF-8 text"
        raise UserError(
            f"{path}, after line {number}: can not be read as {kind}: {error}"
        ) from error


def _json_object(line, where):
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON: {error.msg} at column {error.colno} of {_shortened(line)!r}"
        ) from error
    if not isinstance(row, dict):
        raise UserError(
            f"{where}: expected a JSON object, got {type(row).__name__}: {_shortened(line)!r}"
        )
    return row


def _parquet_rows(path):
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}, after row {number}: can not be read as Parquet: {error}"
        ) from error


def _shortened(line, width=80):
    line = line.strip()
    return line if len(line) <= width else line[:width] + "..."
