"""Reading rows of JSONL, JSON, CSV and Parquet files, each with its location for messages."""

import codecs
import csv
import glob
import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError, did_you_mean, shorten

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
# Recursive functions copy and print rows: a deeper one would fail far from here.
MAX_NESTING = 100

_JSONL = "a file with an object per line is named .jsonl"
_ROWS = "columns are written as rows, an object each (pandas: to_json(orient='records'))"
_PARQUET_BATCH = 1024  # rows in memory at once

# The first half of a surrogate pair, or an unpaired half, which is not text.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def read_rows(path: Path, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return an iterator over the (location, row) pairs of the file that an option names.

    A location is "FILE:LINE", or "FILE, row N" of JSON and Parquet, counted from 1. A JSON file
    holds a list of objects, or an object whose only entry is such a list; all values of a CSV file
    are text. Raise `UserError` if the file does not exist or lacks the format of its suffix; errors
    in the contents are raised while iterating.
    """
    require_file(path, option)
    readers = {".parquet": _read_parquet_rows, ".csv": _read_csv_rows, ".json": _read_json_rows}
    if reader := readers.get(path.suffix.lower()):
        return reader(path)
    lines = read_jsonl_lines(path)
    return ((location, parse_jsonl_line(line, location)) for location, line in lines)


def has_suffix(name: str) -> bool:
    """Return whether a name ends like a file that can be read, in upper or lower case."""
    return name.lower().endswith(SUFFIXES)


def find_matching_files(pattern: Path, option: str) -> list[Path]:
    """Return the readable files of a pattern, sorted by path; raise `UserError` without any."""
    matches = [path for path in sorted(expand_pattern(pattern), key=str) if has_suffix(path.name)]
    if not matches:
        raise UserError(
            f"{option}: no file matches {pattern} and ends in {', '.join(SUFFIXES)} (looked from "
            f"{Path.cwd()})"
        )
    return matches


def expand_pattern(pattern: Path) -> set[Path]:
    """Return what matches a pattern; in contrast to `glob`, ** follows no links, which may loop."""
    parts = pattern.parts
    if "**" not in parts:
        return set(map(Path, glob.glob(str(pattern))))
    at = parts.index("**")
    found = set()
    for top in glob.glob(str(Path(*parts[:at]))):
        for folder, folders, _ in os.walk(top):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found |= expand_pattern(Path(glob.escape(folder), *(parts[at + 1 :] or "*")))
    return found


def require_file(path: Path, option: str) -> None:
    """Raise `UserError` unless a path, which an option names, is a file."""
    if path.is_dir():
        raise folder_error(path, option)
    if not path.parent.is_dir():
        raise UserError(
            f"{option}: there is no file {path}, nor a folder {path.parent} (looked from "
            f"{Path.cwd()})"
        )
    if not path.is_file():
        # Only files that could be read are suggested.
        siblings = [x.name for x in path.parent.iterdir() if has_suffix(x.name) and x.is_file()]
        raise UserError(f"{option}: there is no file {path}.{did_you_mean(path.name, siblings)}")


def folder_error(path: Path, option: str) -> UserError:
    """Return the error of a folder in the place of a file, with a pattern of its files."""
    is_one_split = all((path / f"{name}.json").exists() for name in ("state", "dataset_info"))
    if is_one_split or (path / "dataset_dict.json").exists():
        return UserError(
            f"{option}: {path} is a folder of datasets' save_to_disk, which is not read; write "
            "Parquet: datasets.load_from_disk(FOLDER)[SPLIT].to_parquet(FILE)"
        )
    readable = sorted(file.name for file in path.iterdir() if has_suffix(file.name))
    if not readable:
        return UserError(
            f"{option}: {path} is a folder without files that end in {', '.join(SUFFIXES)}"
        )
    # Not read as a whole, since it may hold held-out files too.
    suffix = next(suffix for suffix in SUFFIXES if readable[0].lower().endswith(suffix))
    return UserError(
        f"{option}: {path} is a folder, with {shorten(', '.join(readable))}; name one of these, or "
        f"{path}/*{readable[0][-len(suffix) :]} for all of a kind"
    )


def read_jsonl_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the location and the bytes of each line of a JSONL file that is not blank."""
    is_gzipped = path.name.lower().endswith(".gz")
    number = 0
    try:
        with gzip.open(path) if is_gzipped else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield f"{path}:{number}", line
    except (OSError, EOFError, zlib.error) as error:
        kind = "gzipped text" if is_gzipped else "text"
        raise UserError(
            f"{path}, after line {number}: cannot be read as {kind}: {error}"
        ) from error


def parse_jsonl_line(line: bytes, location: str) -> dict[str, Any]:
    """Return the object in a line; raise `UserError` if it is not one."""
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: {_describe_decoding(error)}") from error
    if text.lstrip().startswith("[") or text.strip() == "{":
        raise UserError(
            f"{location}: expected a whole JSON object in each line, got {shorten(text)!r}; a file "
            "that is one JSON list is named .json"
        )
    row = _parse_json(text, location)
    if not isinstance(row, dict):
        raise UserError(
            f"{location}: expected a JSON object, got {type(row).__name__}: {shorten(text)!r}"
        )
    # Counting brackets is cheap and spares nearly every row the exact measurement.
    if text.count("[") + text.count("{") > MAX_NESTING:
        _require_shallow(row, location)
    if _SURROGATE_ESCAPE.search(text):
        require_text(row, location)
    return row


def _read_json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {_describe_decoding(error)}") from error
    return parse_json_rows(text, str(path))


def parse_json_rows(text: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, row) of the text of a JSON file, or what stands for one, named `path`."""
    try:
        content = _parse_json(text, path)
    except UserError as error:
        if "Extra data" not in str(error):
            raise
        raise UserError(f"{error}; {_JSONL}") from error
    # A list, as it is or as the only entry of an object: {"data": [...]}.
    if isinstance(content, dict) and len(content) == 1:
        [content] = content.values()
    if not isinstance(content, list):
        advice = _ROWS if isinstance(content, dict) and len(content) > 1 else _JSONL
        raise UserError(
            f"{path}: expected a list of objects, got {type(content).__name__}; {advice}"
        )
    for number, row in enumerate(content, 1):
        location = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise UserError(
                f"{location}: expected a JSON object, got {type(row).__name__}: "
                f"{shorten(repr(row))}; {_ROWS}"
            )
        _require_shallow(row, location)
        require_text(row, location)
        yield location, row


def _read_csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    names: list[str] = []
    end = 0  # the last line of the row before
    # A long prompt is not an error.
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines, strict=True)
            for values in reader:
                # A value may have several lines.
                location, end = f"{path}:{end + 1}", reader.line_num
                if not values:  # a blank line
                    continue
                if not names:
                    names = values
                    _refuse_repeated_names(path, names)
                    if len(names) == 1 and (found := re.search("[;\t|]", names[0])):
                        raise UserError(
                            f"{path}: expected commas between columns, found {found[0]!r}"
                        )
                    continue
                if len(values) != len(names):
                    raise UserError(
                        f"{location}: expected {len(names)} values, one for each column of the "
                        f"first line, {shorten(', '.join(names))!r}"
                    )
                # In CSV a missing value is an empty text.
                yield location, {n: value or None for n, value in zip(names, values, strict=True)}
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, after line {end}: {_describe_decoding(error)}") from error
    except (OSError, csv.Error) as error:
        raise UserError(f"{path}, after line {end}: cannot be read as CSV: {error}") from error


def _read_parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet

    number = 0
    try:
        # `pre_buffer` would read a whole row group ahead.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            _refuse_repeated_names(path, file.schema_arrow.names)
            for batch in file.iter_batches(_PARQUET_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except UserError:
        raise
    # Besides Arrow's own exceptions, this may be OverflowError, for a date after the year 9999, or
    # UnicodeDecodeError.
    except Exception as error:
        raise UserError(
            f"{path}, after row {number}: cannot be read as Parquet: {' '.join(str(error).split())}"
        ) from error


def _refuse_repeated_names(path: Path, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise UserError(f"{path}: several columns have the same name: {', '.join(names)}")


def _parse_json(text: str, location: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_names)
    except UserError as error:
        raise UserError(f"{location}: {error}") from None
    except json.JSONDecodeError as error:
        # Not splitlines: a text that ends too early ends in an empty line, which it would drop.
        line = shorten(text.split("\n")[error.lineno - 1])
        place = f"line {error.lineno}, " * ("\n" in text) + f"column {error.colno}"
        raise UserError(f"{location}: not JSON: {error.msg} at {place} of {line!r}") from error
    except (ValueError, RecursionError) as error:  # a limit of Python's
        raise UserError(f"{location}: cannot be read as JSON: {error}") from error


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise `UserError` if two values have the same name."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two values of an object have the name {shorten(twice)!r}")
    return unique


def _describe_decoding(error: OSError | UnicodeDecodeError) -> str:
    text = f"cannot be read as UTF-8 text: {error}"
    if not isinstance(error, UnicodeDecodeError):
        return text
    is_utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    other = "UTF-16" if is_utf16 else "WINDOWS-1252"  # of which Latin-1 is a part
    return f"{text}; if it is {other}: iconv -f {other} -t UTF-8"


def _require_shallow(row: dict[str, Any], location: str) -> None:
    level: list[Any] = [row]
    for _ in range(MAX_NESTING):
        inside = [value.values() if isinstance(value, dict) else value for value in level]
        level = [x for members in inside for x in members if isinstance(x, dict | list)]
    if level:
        raise UserError(
            f"{location}: objects and lists are nested more than {MAX_NESTING} levels deep"
        )


def require_text(value: Any, location: str) -> None:
    """Raise `UserError` if a text has half of a surrogate pair, which no encoding can write."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(
            f"{location}: {half!r} is half of a surrogate pair, not a character"
        ) from error
