"""Prompts of large Parquet files, tokenized once by worker processes and cached on a disk.

The rows that are not dropped, with the tokens of their prompts, are written to Arrow files in
`data.cache_dir`, each for a few row groups of a Parquet file, and looked up there. The memory does
not grow with the data; order, dropped prompts and positions are the same as for data in
memory. A file is named IDENTITY.CHECKSUM.arrow, by hashes of everything that determines its
contents and of the contents: any run with the same data and tokenizer uses it, an interrupted run
continues where it stopped, and damage is found before the first step.
"""

import bisect
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_ppo import processes
from jax_ppo.data import files
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.columns import Columns, ignored_columns
from jax_ppo.data.prompt_shaping import RowParser
from jax_ppo.data.prompts import PromptDataset, PromptEncoding, encode_prompts, report_long_prompts
from jax_ppo.data.sources import SourceFiles, report_ignored_columns
from jax_ppo.errors import UserError
from jax_ppo.storage import disk_space
from jax_ppo.types import Example

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

_OPTION = "config.data.train_files"
_FORMAT = 4  # version of the cache's format; changing it invalidates all files
_ROWS_PER_FILE = 8192  # at least, unless the Parquet file has fewer
_TOKENS = "jax_ppo_prompt_tokens"  # the column of the prompts' tokens
_SOURCE_COLUMN = "data_source"
_OPEN_FILES = 64
_CHECKING_THREADS = 8
_ABANDONED_SECONDS = 24 * 3600  # since a process last wrote to an unfinished file

# Raises `UserError` for the first unusable example. The function must be a module's own, since its
# name and its arguments are part of a cache file's identity.
Validate = functools.partial[None]


@dataclasses.dataclass(frozen=True)
class _Part:
    """Consecutive row groups of a Parquet file, and the rows of them to use."""

    path: Path
    row_groups: tuple[int, ...]
    first_row: int  # row of the file that the first group begins with, from 0
    start: int  # the first row to use, counted within these groups
    end: int  # the row after the last one to use
    source: int  # number of the source

    def identity(self) -> list[Any]:
        """Return the facts that determine the rows; a changed file has a new time."""
        status = self.path.stat()
        file_version = [str(self.path.absolute()), status.st_size, status.st_mtime_ns]
        return [*file_version, self.row_groups, self.start, self.end]


@dataclasses.dataclass(frozen=True)
class _Job:
    """Everything that determines the contents of the cache, besides the Parquet files."""

    parser: RowParser
    encoding: PromptEncoding
    tokenizer_path: str
    validate: Validate

    def identity(self) -> list[Any]:
        """Return the facts that determine what becomes of rows."""
        tokenizer = _load_tokenizer(self.tokenizer_path)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        definition = backend.to_str() if backend else sorted(tokenizer.get_vocab().items())
        return [
            _FORMAT,
            dataclasses.asdict(self.parser),
            dataclasses.asdict(self.encoding),
            [type(tokenizer).__name__, definition, tokenizer.chat_template],
            [self.validate.func.__qualname__, repr(self.validate.keywords)],
        ]


_load_tokenizer = functools.lru_cache(maxsize=1)(tokenizer_lib.load_tokenizer)


class CachedExamples(Sequence[Example]):
    """The examples of the concatenated rows of several Arrow files, parsed when looked up."""

    def __init__(
        self,
        paths: Sequence[Path],
        sources: Sequence[int],
        parse: Callable[[dict[str, Any], str], Example],
    ) -> None:
        """Refer to files, each with the number of its source.

        `parse` takes the columns of a row and a location for messages.
        """
        self._paths = paths
        self._sources = sources
        self._parse = parse
        self._table = functools.lru_cache(_OPEN_FILES)(_open_table)
        self._ends = list(itertools.accumulate(len(_open_table(path)) for path in paths))

    def __len__(self) -> int:
        return self._ends[-1]

    def sources(self) -> np.ndarray:
        """Return the number of the source of each row, int [rows]."""
        return np.repeat(self._sources, np.diff(self._ends, prepend=0))

    def fingerprint(self) -> str:
        """Return a hash of the rows, from the checksums in the names of their files."""
        return _hash([[path.name.split(".")[1] for path in self._paths], self._sources])

    def tokens(self, index: int) -> np.ndarray:
        """Return the tokens of a row, int32 [length]."""
        _, row = self._locate(index)
        return np.array(row.column(_TOKENS)[0].values, np.int32)

    # Of one row; no slice is looked up.
    def __getitem__(self, index: Any) -> Any:
        file, row = self._locate(int(index))
        return self._parse_row(row.drop(_TOKENS).to_pylist()[0], file, int(index))

    def __iter__(self) -> Iterator[Example]:
        index = 0
        for file, path in enumerate(self._paths):
            for batch in _open_table(path).drop(_TOKENS).to_batches():
                for columns in batch.to_pylist():
                    yield self._parse_row(columns, file, index)
                    index += 1

    def _locate(self, index: int) -> tuple[int, "pyarrow.Table"]:
        """Return the number of a row's file, and a table of that row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect.bisect_right(self._ends, index)
        table = self._table(self._paths[file])
        return file, table.slice(index - self._ends[file] + len(table), 1)

    def _parse_row(self, columns: dict[str, Any], file: int, index: int) -> Example:
        example = self._parse(columns, f"config.data.cache_dir, row {index + 1}")
        return dataclasses.replace(example, source=self._sources[file])


class _CachedTokens(Sequence[np.ndarray]):
    """The tokens of cached rows, each int32 [length]; like the examples, of one row at a time."""

    def __init__(self, rows: CachedExamples) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows.tokens(int(index))


@dataclasses.dataclass(frozen=True)
class CachedPrompts(PromptDataset):
    """Prompts whose examples and tokens are read from a disk."""

    examples: CachedExamples

    def sources(self) -> np.ndarray:
        """Return the number of the source of each example, int [rows]."""
        return self.examples.sources()

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Return facts that differ if the rows do: see `PromptDataset`."""
        return {"rows": len(self), f"cache_{_FORMAT}": self.examples.fingerprint()}


def cache_prompts(
    folder: Path,
    sources: Sequence[SourceFiles],
    parser: RowParser,
    encoding: PromptEncoding,
    tokenizer_path: str,
    validate: Validate,
    *,
    max_samples: int | None = None,
    workers: int | None = None,
    on_progress: Callable[[int, int], None] = lambda rows_read, total: None,
) -> CachedPrompts:
    """Return the prompts of Parquet files from a cache, after adding the missing ones to it.

    Its folder is created if necessary. Of the sources, the first `max_samples` rows are used, by
    default all. `workers` processes call `validate` with all examples; 0 uses this process, `None`
    one for each core. `on_progress` is called with the rows read so far and in total; it may end
    the work by raising.

    Raises:
      UserError: a row cannot be used, no prompt is left, or the folder cannot be written to.
    """
    # An earlier call in this process may have loaded another tokenizer from the same path.
    _load_tokenizer.cache_clear()
    job = _Job(parser, encoding, tokenizer_path, validate)
    parts = list(_divide(sources, max_samples))
    total = sum(part.end - part.start for part in parts)
    if not total:
        raise UserError(f"{_OPTION}: the files have no rows")
    common = _hash(job.identity())
    identities = [_hash([common, *part.identity()]) for part in parts]
    _remove_abandoned(folder)
    paths = _find_intact_files(folder, identities)
    tasks = {
        number: (job, parts[number], folder, identities[number])
        for number, path in enumerate(paths)
        if path is None
    }
    # A complete cache may be on a read-only disk.
    if tasks:
        _make_folder(folder)
    rows_read = total - sum(part.end - part.start for _, part, _, _ in tasks.values())
    on_progress(rows_read, total)
    if workers is None:
        workers = len(os.sched_getaffinity(0))
    for number, path in zip(tasks, _fill(list(tasks.values()), workers), strict=True):
        paths[number] = path
        rows_read += parts[number].end - parts[number].start
        on_progress(rows_read, total)
    examples = CachedExamples(
        [path for path in paths if path is not None], [part.source for part in parts], parser.parse
    )
    longest = encoding.max_prompt_length
    report_long_prompts(total - len(examples), total, longest, _OPTION)
    return CachedPrompts(examples, _CachedTokens(examples), longest, _OPTION)


def _divide(sources: Sequence[SourceFiles], max_samples: int | None) -> Iterator[_Part]:
    """Yield the parts of all sources that have rows of their slices, at most `max_samples` rows."""
    remaining = sys.maxsize if max_samples is None else max_samples
    for number, source in enumerate(sources):
        source_end = sys.maxsize if source.end is None else source.end
        earlier_rows = 0  # of the source
        for path in source.paths:
            first_row = 0
            for groups, rows in _join_groups(path):
                start = _clip(source.start - earlier_rows, rows)
                end = min(_clip(source_end - earlier_rows, rows), start + remaining)
                if start < end:
                    yield _Part(path, groups, first_row, start, end, number)
                    remaining -= end - start
                first_row += rows
                earlier_rows += rows


def _clip(row: int, rows: int) -> int:
    """Return the number of a row, limited to 0..rows."""
    return min(max(row, 0), rows)


def _group_sizes(path: Path) -> list[int]:
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except Exception as error:
        raise files.parquet_error(path, 0, error) from error
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _join_groups(path: Path) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield consecutive row groups that together have enough rows for a file, and their rows."""
    sizes = _group_sizes(path)
    first, rows = 0, 0
    for group, size in enumerate(sizes):
        rows += size
        if rows >= _ROWS_PER_FILE or group + 1 == len(sizes):
            yield tuple(range(first, group + 1)), rows
            first, rows = group + 1, 0


def _find_intact_files(folder: Path, identities: Sequence[str]) -> list[Path | None]:
    """Return the file of each identity, `None` if it is missing or damaged, which is logged."""
    named = collections.defaultdict[str, list[Path]](list)
    for path in sorted(folder.glob("*.arrow")):
        named[path.name.partition(".")[0]].append(path)

    def find_intact(identity: str) -> Path | None:
        return next(filter(_is_intact, named[identity]), None)

    # Hashing releases the interpreter lock.
    with concurrent.futures.ThreadPoolExecutor(_CHECKING_THREADS) as threads:
        intact_paths = list(threads.map(find_intact, identities))
    for identity, intact_path in zip(identities, intact_paths, strict=True):
        if intact_path is None and named[identity]:
            log.warning(
                "config.data.cache_dir: %s is damaged and is written again", named[identity][0]
            )
    return intact_paths


def _is_intact(path: Path) -> bool:
    try:
        return path.name.split(".")[1] == _checksum(path)
    except OSError:
        return False


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def _remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files that killed processes left, where that is possible."""
    for path in folder.glob("*.unfinished"):
        # Another run may have removed or finished it, or it belongs to another user.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                path.unlink()


def _make_folder(folder: Path) -> None:
    """Create the folder of the cache; raise `UserError` if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        # The command explains a full disk.
        if disk_space.is_disk_full(error):
            raise
        raise UserError(
            f"config.data.cache_dir={str(folder)!r}: cannot be written to: {error.strerror}"
        ) from error


def _fill(tasks: Sequence[tuple[_Job, _Part, Path, str]], workers: int) -> Iterator[Path]:
    """Call `_write_part` with each task's arguments; yield the paths in order."""
    if not tasks or not workers:
        yield from itertools.starmap(_write_part, tasks)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers, len(tasks)),
        mp_context=processes.WorkerContext(),
        initializer=_initialize_worker,
        initargs=(os.getpid(),),
    )
    try:
        for future in [pool.submit(_write_part, *task) for task in tasks]:
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "config.data.cache_dir: a worker process was killed, which happens when memory runs "
            f"out; {min(workers, len(tasks))} were running at once. Finished files are kept: start "
            "the run again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _initialize_worker(parent: int) -> None:
    # Ctrl-C reaches all processes of the command, but the run ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.end_with_parent(parent)


def _write_part(job: _Job, part: _Part, folder: Path, identity: str) -> Path:
    """Write the file of a part; return its path."""
    import pyarrow as pa

    unfinished = folder / f"{secrets.token_hex(8)}.unfinished"
    try:
        tables = _encode_part(job, part)
        first = next(tables)
        with unfinished.open("xb") as file, pa.ipc.new_file(file, first.schema) as writer:
            for rows in itertools.chain([first], tables):
                writer.write_table(rows)
        path = folder / f"{identity}.{_checksum(unfinished)}.arrow"
        # If two runs write the same file, either result is valid.
        return unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _encode_part(job: _Job, part: _Part) -> Iterator["pyarrow.Table"]:
    """Yield the rows of a part that are not dropped, with the tokens of their prompts."""
    import pyarrow as pa

    row = 0  # counted within these row groups
    columns = _columns_read(part.path, job.parser.columns)
    for batch in files.read_parquet_batches(part.path, part.row_groups, columns):
        start, end = (_clip(bound - row, len(batch)) for bound in (part.start, part.end))
        first = part.first_row + row + start + 1
        row += len(batch)
        rows = _without_dictionaries(pa.Table.from_batches([batch.slice(start, end - start)]))
        examples = [
            job.parser.parse(columns, f"{part.path}, row {number}")
            for number, columns in enumerate(rows.to_pylist(), first)
        ]
        job.validate(examples)
        tokenizer = _load_tokenizer(job.tokenizer_path)
        ids = pa.array(
            list(encode_prompts(examples, tokenizer, job.encoding, str(part.path))),
            pa.list_(pa.int32()),
        )
        yield rows.append_column(_TOKENS, ids).filter(ids.is_valid())


def _without_dictionaries(table: "pyarrow.Table") -> "pyarrow.Table":
    """Return a table with plain columns: an Arrow file holds only one dictionary for each."""
    import pyarrow as pa

    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def _open_table(path: Path) -> "pyarrow.Table":
    """Return the rows of a file, which stay on the disk until they are read."""
    import pyarrow as pa

    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"config.data.cache_dir: {path} can no longer be read: {error}. Start the run "
            "again to rewrite the file"
        ) from error


def representative_examples(sources: Sequence[SourceFiles], parser: RowParser) -> Iterator[Example]:
    """Yield an example of each `data_source` of each file, without reading all columns.

    Rows outside a slice are included.

    Raises:
      UserError: a file is not Parquet, or such a row has no known form.
    """
    for path in dict.fromkeys(path for source in sources for path in source.paths):
        report_ignored_columns(str(path), [_column_names(path)], parser.columns)
        seen: set[str | None] = set()
        for group in range(len(_group_sizes(path))):
            unseen = _sources_of_group(path, group) - seen
            seen |= unseen
            batches = files.read_parquet_batches(path, [group]) if unseen else ()
            for row in itertools.chain.from_iterable(batch.to_pylist() for batch in batches):
                if not unseen:
                    break
                data_source = row.get(_SOURCE_COLUMN)
                if data_source in unseen:
                    unseen.remove(data_source)
                    yield parser.parse(row, f"{path}, row group {group + 1}")


def _sources_of_group(path: Path, group: int) -> set[str | None]:
    """Return the values of `data_source`; `None` stands for a file without this column."""
    values: set[str | None] = set()
    for batch in files.read_parquet_batches(path, [group], [_SOURCE_COLUMN]):
        values.update(batch.column(0).unique().to_pylist() if batch.num_columns else [None])
    return values


def _columns_read(path: Path, columns: Columns) -> list[str] | None:
    """Return the columns to read of rows in verl's form; `None`, for all, in any other form."""
    names = _column_names(path)
    if "reward_model" not in names:
        return None
    ignored = ignored_columns(names, columns)
    return [name for name in names if name not in ignored]


def _column_names(path: Path) -> list[str]:
    import pyarrow.parquet

    return [str(name) for name in pyarrow.parquet.read_schema(path).names]
