"""Rows that are looked up on a disk, in Arrow files; a lookup decompresses a few rows."""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from jax_ppo.errors import UserError
from jax_ppo.types import Example

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_BATCH = 32  # rows that a lookup decompresses
TOKENS = "jax_ppo_prompt_tokens"  # the column of the prompts' tokens
_OPEN_FILES = 64


class CachedExamples(Sequence[Example]):
    """The examples of the concatenated rows of several Arrow files, parsed when looked up.

    All batches of a file except the last have `ROWS_PER_BATCH` rows.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        sources: Sequence[int],
        parse: Callable[[dict[str, Any], str], Example],
    ) -> None:
        """Open the files.

        Args:
          paths: the files.
          sources: number of the source of each file.
          parse: takes the columns of a row and a location for messages.
        """
        self._paths = paths
        self._sources = sources
        self._parse = parse
        self._readers = functools.lru_cache(_OPEN_FILES)(_open_reader)
        # Arrow does not document that threads may share a reader.
        self._lock = threading.Lock()
        self._ends = list(itertools.accumulate(map(count_rows, paths)))

    def __len__(self) -> int:
        return self._ends[-1]

    def sources(self) -> np.ndarray:
        """Return the number of the source of each row, int [rows]."""
        return np.repeat(self._sources, np.diff(self._ends, prepend=0))

    def fingerprint(self) -> str:
        """Return a hash of the rows, from the checksums in the names of their files."""
        checksums = [path.name.split(".")[1] for path in self._paths]
        return hashlib.sha256(json.dumps([checksums, self._sources]).encode()).hexdigest()[:32]

    def read_tokens(self, index: int) -> np.ndarray:
        """Return the tokens of a row, int32 [length]."""
        return np.array(self._read(index, tokens=True)[TOKENS], np.int32)

    # Of one row; no slice is looked up.
    def __getitem__(self, index: Any) -> Any:
        columns = self._read(int(index), tokens=False)
        return self._parse_row(index, columns, self._file_of(index))

    def __iter__(self) -> Iterator[Example]:
        """Yield all examples; each batch is decompressed once."""
        index = 0
        for file, end in enumerate(self._ends):
            for batch in range(-(-(end - index) // ROWS_PER_BATCH)):
                for columns in self._read_batch(file, batch, tokens=False).to_pylist():
                    yield self._parse_row(index, columns, file)
                    index += 1

    def _parse_row(self, index: int, columns: dict[str, Any], file: int) -> Example:
        example = self._parse(columns, f"config.data.cache_dir, row {index + 1}")
        return dataclasses.replace(example, source=self._sources[file])

    def _file_of(self, index: int) -> int:
        return bisect.bisect_right(self._ends, index)

    def _read(self, index: int, tokens: bool) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = self._file_of(index)
        first_row = self._ends[file - 1] if file else 0
        batch, row = divmod(index - first_row, ROWS_PER_BATCH)
        rows = self._read_batch(file, batch, tokens).slice(row, 1)
        return dict(rows.to_pylist()[0])

    def _read_batch(self, file: int, batch: int, tokens: bool) -> "pyarrow.RecordBatch":
        import pyarrow as pa

        path = self._paths[file]
        try:
            with self._lock:
                return self._readers(path, tokens).get_batch(batch)
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"config.data.cache_dir: {path} can no longer be read: {error}. Start the run "
                "again to rewrite the file"
            ) from error


class CachedTokens(Sequence[np.ndarray]):
    """The tokens of cached rows, each int32 [length]; like the examples, of one row at a time."""

    def __init__(self, rows: CachedExamples) -> None:
        """Refer to the rows."""
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows.read_tokens(int(index))


class RowWriter:
    """Writes batches of rows with their tokens to an Arrow file."""

    def __init__(self, file: BinaryIO) -> None:
        """Write to an open, empty file, which is complete when the context ends."""
        self._file = file
        self._writer: Any = None
        self._rest: Any = None

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if self._writer is not None:
            if kind is None:
                self._flush(self._rest.num_rows)
            self._writer.close()

    def write(self, batch: "pyarrow.RecordBatch", tokens: Sequence[np.ndarray | None]) -> None:
        """Append the rows that have tokens.

        Args:
          batch: rows.
          tokens: int32 [length] of each row, `None` for one that is dropped.
        """
        import pyarrow as pa

        rows = [row for row, ids in enumerate(tokens) if ids is not None]
        table = pa.Table.from_batches([batch.take(pa.array(rows, pa.int64()))])
        for number, field in enumerate(table.schema):
            # An Arrow file holds one dictionary per column; a Parquet file may have several.
            if pa.types.is_dictionary(field.type):
                values = table.column(number).cast(field.type.value_type)
                table = table.set_column(number, field.name, values)
        ids = pa.array([ids for ids in tokens if ids is not None], pa.list_(pa.int32()))
        table = table.append_column(TOKENS, ids)
        if self._writer is None:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            self._writer = pa.ipc.new_file(self._file, table.schema, options=options)
            self._rest = table.slice(0, 0)
        self._rest = pa.concat_tables([self._rest, table])
        self._flush(self._rest.num_rows // ROWS_PER_BATCH * ROWS_PER_BATCH)

    def _flush(self, rows: int) -> None:
        whole = self._rest.slice(0, rows).combine_chunks()
        self._writer.write_table(whole, max_chunksize=ROWS_PER_BATCH)
        self._rest = self._rest.slice(rows)


def count_rows(path: Path) -> int:
    """Return the number of rows of a cached file."""
    reader = _open_reader(path, tokens=True)
    batches = reader.num_record_batches
    if not batches:
        return 0
    return (batches - 1) * ROWS_PER_BATCH + int(reader.get_batch(batches - 1).num_rows)


def _open_reader(path: Path, tokens: bool) -> "pyarrow.RecordBatchFileReader":
    """Open a file to read its tokens alone, or all other columns."""
    import pyarrow as pa

    file = pa.memory_map(str(path))
    names = pa.ipc.open_file(file).schema.names
    fields = [number for number, name in enumerate(names) if (name == TOKENS) == tokens]
    return pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=fields))
