"""Reading rows of JSONL and Parquet files, each with its location for error messages."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError, did_you_mean

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def read_rows(path: Path, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return an iterator over the (location, row) pairs of a file.

    Args:
      path: a JSONL, gzipped JSONL or Parquet file.
      option: the option that names the file, for messages.

    Returns:
      An iterator. A location is "FILE:LINE" or "FILE, row N", counted from 1.

    Raises:
      UserError: the file does not exist, does not have the format of its suffix, or contains a line
        that is not a JSON object. Errors of the contents are raised while iterating.
    """
    path = Path(path)
    if not path.is_file():
        raise _missing_file_error(path, option)
    if path.name.endswith(".parquet"):
        return _read_parquet_rows(path)
    return _read_json_rows(path)


def _missing_file_error(path: Path, option: str) -> UserError:
    if path.is_dir():
        return UserError(
            f"{option}: {path} is a folder; expected a file that ends in {', '.join(SUFFIXES)}"
        )
    folder = path.parent
    if not folder.is_dir():
        return UserError(
            f"{option}: there is no file {path}, nor a folder {folder} (looked from {Path.cwd()})"
        )
    siblings = [file.name for file in folder.iterdir() if file.name.endswith(SUFFIXES)]
    return UserError(f"{option}: there is no file {path}.{did_you_mean(path.name, siblings)}")


def _read_json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    is_gzipped = path.name.endswith(".gz")
    open_file = gzip.open if is_gzipped else open
    number = 0
    try:
        with open_file(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    location = f"{path}:{number}"
                    yield location, _parse_json_object(line, location)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        kind = "gzipped UTF-8 text" if is_gzipped else "UTF-8 text"
        raise UserError(
            f"{path}, after line {number}: cannot be read as {kind}: {error}"
        ) from error


def _parse_json_object(line: str, location: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{location}: not JSON: {error.msg} at column {error.colno} of {_shorten(line)!r}"
        ) from error
    if not isinstance(row, dict):
        raise UserError(
            f"{location}: expected a JSON object, got {type(row).__name__}: {_shorten(line)!r}"
        )
    return row


def _read_parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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
            f"{path}, after row {number}: cannot be read as Parquet: {error}"
        ) from error


def _shorten(line: str, width: int = 80) -> str:
    line = line.strip()
    return line if len(line) <= width else line[:width] + "..."
