"""Data files that tests write."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """Write rows in the form that the name asks for, .jsonl, .jsonl.gz or .parquet; return it."""
    if path.suffix.lower() == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return str(path)
