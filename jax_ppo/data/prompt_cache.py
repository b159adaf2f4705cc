"""Prompts of large Parquet files, tokenized once by worker processes and cached on a disk.

A file is read by row groups. The rows that are not dropped, with the tokens of their prompts, are
written to Arrow files in `data.cache_dir`, each for a few row groups, and a batch looks its rows up
there. The memory does not grow with the data; the order, the dropped prompts and the positions are
the same as for data in memory. The name of a cache file is a hash of everything that determines its
contents: any run with the same data and tokenizer uses it, and an interrupted run continues where
it stopped. Files are verified before they are used.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from jax_ppo import processes
from jax_ppo.data import cache_folder, files, prompt_shaping, row_formats
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.cached_rows import CachedExamples, CachedTokens, RowWriter
from jax_ppo.data.columns import Columns, ignored_columns
from jax_ppo.data.prompts import PromptDataset, PromptEncoding, encode_prompts, report_dropped
from jax_ppo.data.sources import SourceFiles, report_ignored_columns
from jax_ppo.errors import UserError
from jax_ppo.storage import disk_space
from jax_ppo.types import Example

_FORMAT = 3  # version of the cache's format; changing it invalidates all files
_ROWS_PER_FILE = 8192  # at least, unless the Parquet file has fewer
_SOURCE_COLUMN = "data_source"

# Raises `UserError` for the first unusable example. The function must be a module's own, since its
# name and its arguments are part of a cache file's identity.
Validate = functools.partial[None]


@dataclasses.dataclass(frozen=True)
class RowParser:
    """Conversion of rows to examples.

    Attributes:
      columns: names of columns that options set.
      instruction: text added to the question in rows of some forms.
      system_prompt: message in front of every chat; "" adds none.
      template: text around every prompt; "" leaves it as it is.
    """

    columns: Columns = dataclasses.field(default_factory=Columns)
    instruction: str = ""
    system_prompt: str = ""
    template: str = ""

    def parse(self, row: dict[str, Any], location: str) -> Example:
        """Return the example of a row; messages name its location."""
        example = row_formats.parse_row(row, location, self.columns, self.instruction)
        [shaped] = prompt_shaping.shape_prompts(
            [example], self.system_prompt, self.template, location
        )
        return shaped


@dataclasses.dataclass(frozen=True)
class _Part:
    """Consecutive row groups of a Parquet file, and the rows of them to use.

    Attributes:
      path: the file.
      row_groups: their numbers.
      first_row: row of the file that the first group begins with, from 0.
      start: the first row to use, counted within these groups.
      end: the row after the last one to use.
      source: number of the source.
    """

    path: Path
    row_groups: tuple[int, ...]
    first_row: int
    start: int
    end: int
    source: int


@dataclasses.dataclass(frozen=True)
class _Job:
    """Everything that determines the contents of the cache, besides the Parquet files."""

    parser: RowParser
    encoding: PromptEncoding
    tokenizer_path: str
    validate: Validate


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
            if not unseen:
                continue
            for batch in files.read_parquet_batches(path, [group]):
                for row in batch.to_pylist():
                    data_source = row.get(_SOURCE_COLUMN)
                    if data_source in unseen:
                        unseen.remove(data_source)
                        yield parser.parse(row, f"{path}, row group {group + 1}")
                if not unseen:
                    break


def _sources_of_group(path: Path, group: int) -> set[str | None]:
    """Return the values of `data_source`; `None` stands for a file without this column."""
    values: set[str | None] = set()
    for batch in files.read_parquet_batches(path, [group], [_SOURCE_COLUMN]):
        if batch.num_columns:
            values.update(batch.column(0).unique().to_pylist())
        else:
            values.add(None)
    return values


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
    name: str = "config.data.train_files",
) -> PromptDataset:
    """Return the prompts of Parquet files from a cache, after adding the missing ones to it.

    Args:
      folder: the cache; it is created if necessary.
      sources: the files.
      parser: converts rows to examples.
      encoding: converts prompts to tokens.
      tokenizer_path: the path of the tokenizer, as in `load_tokenizer`.
      validate: called with all examples, in a worker.
      max_samples: number of rows to use, from the start; `None`: all.
      workers: number of processes; 0 uses this one, `None` one for each core.
      on_progress: called with the rows read so far and in total; it may end the work by raising.
      name: the option that names the data, for messages.

    Raises:
      UserError: a row cannot be used, no prompt is left, or the folder cannot be written to.
    """
    job = _Job(parser=parser, encoding=encoding, tokenizer_path=tokenizer_path, validate=validate)
    parts = list(_divide(sources, max_samples))
    total = sum(part.end - part.start for part in parts)
    if not total:
        raise UserError(f"{name}: the files have no rows")
    common = _fingerprint(job)
    identities = [_hash([common, *_identity(part)]) for part in parts]
    cache_folder.remove_abandoned_files(folder)
    paths = cache_folder.find_intact_files(folder, identities)
    missing = [number for number, path in enumerate(paths) if path is None]
    # A complete cache may be on a read-only disk.
    if missing:
        _make_folder(folder)
    rows_read = total - sum(parts[number].end - parts[number].start for number in missing)
    on_progress(rows_read, total)
    if workers is None:
        workers = len(os.sched_getaffinity(0))
    tasks = [(parts[number], folder, identities[number]) for number in missing]
    for number, path in zip(missing, _fill(job, tasks, workers), strict=True):
        paths[number] = path
        rows_read += parts[number].end - parts[number].start
        on_progress(rows_read, total)
    examples = CachedExamples(
        [path for path in paths if path is not None], [part.source for part in parts], parser.parse
    )
    report_dropped(total - len(examples), total, encoding.max_prompt_length, name)
    return PromptDataset(
        examples=examples,
        tokens=CachedTokens(examples),
        max_prompt_length=encoding.max_prompt_length,
        name=name,
    )


def _make_folder(folder: Path) -> None:
    """Create the folder of the cache; raise `UserError` if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with cache_folder.open_unfinished(folder):
            pass
    except OSError as error:
        # The command explains a full disk.
        if disk_space.is_disk_full(error):
            raise
        raise UserError(
            f"config.data.cache_dir={str(folder)!r}: cannot be written to: {error.strerror}"
        ) from error


def _fill(job: _Job, tasks: Sequence[tuple[_Part, Path, str]], workers: int) -> Iterator[Path]:
    """Call `_write_part` with each task's arguments; yield the paths in order."""
    if not tasks:
        return
    if not workers:
        _set_job(job)
        yield from itertools.starmap(_write_part, tasks)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers, len(tasks)),
        mp_context=processes.WorkerContext(),
        initializer=_initialize_worker,
        initargs=(os.getpid(), job),
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


def _divide(sources: Sequence[SourceFiles], max_samples: int | None) -> Iterator[_Part]:
    """Yield the parts of all sources in their order, with at most `max_samples` rows."""
    remaining = max_samples
    for number, source in enumerate(sources):
        for part in _divide_source(source, number):
            if remaining is not None:
                part = dataclasses.replace(part, end=min(part.end, part.start + remaining))
                remaining -= part.end - part.start
            if part.start < part.end:
                yield part


def _divide_source(source: SourceFiles, number: int) -> Iterator[_Part]:
    """Yield the parts of one source that have rows of its slice."""
    rows_of_earlier_files = 0
    for path in source.paths:
        sizes = _group_sizes(path)
        first_row = 0
        for groups in _join_groups(sizes):
            rows = sum(sizes[group] for group in groups)
            offset = rows_of_earlier_files + first_row
            start = _clip(source.start - offset, rows)
            end = rows
            if source.end is not None:
                end = _clip(source.end - offset, rows)
            if start < end:
                yield _Part(
                    path=path,
                    row_groups=groups,
                    first_row=first_row,
                    start=start,
                    end=end,
                    source=number,
                )
            first_row += rows
        rows_of_earlier_files += first_row


def _clip(row: int, rows: int) -> int:
    """Return the number of a row, limited to 0..rows."""
    return min(max(row, 0), rows)


def _group_sizes(path: Path) -> list[int]:
    """Return the number of rows of each row group."""
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except Exception as error:
        raise files.parquet_error(path, 0, error) from error
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _join_groups(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield consecutive row groups that together have enough rows for a file of the cache."""
    joined: list[int] = []
    for group in range(len(sizes)):
        joined.append(group)
        if sum(sizes[other] for other in joined) >= _ROWS_PER_FILE or group + 1 == len(sizes):
            yield tuple(joined)
            joined = []


def _fingerprint(job: _Job) -> str:
    """Return a hash of the facts that determine the contents of all files of the cache."""
    tokenizer = tokenizer_lib.load_tokenizer(job.tokenizer_path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        definition = sorted(tokenizer.get_vocab().items())
    else:
        definition = backend.to_str()
    return _hash(
        [
            _FORMAT,
            dataclasses.asdict(job.parser),
            dataclasses.asdict(job.encoding),
            [type(tokenizer).__name__, definition, tokenizer.chat_template],
            [job.validate.func.__qualname__, repr(job.validate.keywords)],
        ]
    )


def _identity(part: _Part) -> list[Any]:
    """Return the facts that determine a part's contents; a changed file has a new time."""
    status = part.path.stat()
    file_version = [str(part.path.absolute()), status.st_size, status.st_mtime_ns]
    return [*file_version, part.row_groups, part.start, part.end]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


# The job of this worker process, set when it starts.
_job: _Job
_tokenizer: Any


def _initialize_worker(parent: int, job: _Job) -> None:
    """Prepare this process to write files of the cache."""
    # Ctrl-C reaches all processes of the command, but the run ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.end_with_parent(parent)
    _set_job(job)


def _set_job(job: _Job) -> None:
    global _job, _tokenizer
    _job = job
    _tokenizer = tokenizer_lib.load_tokenizer(job.tokenizer_path)


def _write_part(part: _Part, folder: Path, identity: str) -> Path:
    """Write the file of a part in an initialized worker; return its path."""
    columns = _columns_read(part.path, _job.parser.columns)
    row = 0  # counted within these row groups
    with cache_folder.open_unfinished(folder) as file:
        with RowWriter(file) as writer:
            for batch in files.read_parquet_batches(part.path, part.row_groups, columns):
                start = _clip(part.start - row, batch.num_rows)
                end = _clip(part.end - row, batch.num_rows)
                first = part.first_row + row + start
                row += batch.num_rows
                used = batch.slice(start, end - start)
                examples = [
                    _job.parser.parse(columns, f"{part.path}, row {number}")
                    for number, columns in enumerate(used.to_pylist(), first + 1)
                ]
                location = f"{part.path}, from row {first + 1}"
                try:
                    _job.validate(examples)
                except UserError as error:
                    raise UserError(f"{location}: {error}") from error
                writer.write(
                    used, list(encode_prompts(examples, _tokenizer, _job.encoding, location))
                )
        return cache_folder.publish_cache_file(file, identity)


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
