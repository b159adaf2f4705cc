"""Prompts of large Parquet files, tokenized once by worker processes and kept on a disk.

A file is read by row groups. The rows that stay, with the tokens of their prompts, are written to
Arrow files in `data.cache_dir`, of a few row groups each, and a batch looks its rows up there. So
the memory does not grow with the data, and order, dropped prompts and positions are those of the
same data in memory. A file of the cache is named after all that its contents follow from, so that
any run with the same data and tokenizer uses it, and one that was interrupted continues there. It
is verified before it is used.
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
from jax_ppo.data.cached_rows import CachedExamples, CachedRows, CachedTokens, RowWriter
from jax_ppo.data.columns import Columns
from jax_ppo.data.prompts import PromptDataset, PromptEncoding, encode_prompts, report_dropped
from jax_ppo.data.sources import ParquetSource
from jax_ppo.errors import UserError
from jax_ppo.storage import disk_space
from jax_ppo.types import Example

_FORMAT = 2  # of the cache; a new number makes every file anew
_ROWS_PER_FILE = 8192  # at least, unless the Parquet file has fewer
_SOURCE_COLUMN = "data_source"

# Raises `UserError` for the first example that cannot be used; a module's function and arguments.
Validate = functools.partial[None]


@dataclasses.dataclass(frozen=True)
class RowParser:
    """How rows become examples.

    Attributes:
      columns: names that options choose.
      instruction: text added to the question in rows of some forms.
      system_prompt: message in front of every chat; "" adds none.
      template: text around every prompt; "" leaves it as it is.
    """

    columns: Columns = dataclasses.field(default_factory=Columns)
    instruction: str = ""
    system_prompt: str = ""
    template: str = ""

    def parse(self, row: dict[str, Any], where: str) -> Example:
        """Return the example of a row; `where` is its location for messages."""
        example = row_formats.parse_row(row, where, self.columns, self.instruction)
        [shaped] = prompt_shaping.shape_prompts([example], self.system_prompt, self.template, where)
        return shaped


@dataclasses.dataclass(frozen=True)
class _Part:
    """Consecutive row groups of a Parquet file, and which of their rows to use.

    Attributes:
      path: the file.
      row_groups: their numbers.
      first_row: row of the file that the first group begins with, from 0.
      start: the first row to use, of these groups.
      end: the row after the last.
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
    """All that the contents of the cache follow from, besides the Parquet files."""

    parser: RowParser
    encoding: PromptEncoding
    tokenizer_path: str
    validate: Validate


def representative_examples(
    sources: Sequence[ParquetSource], parser: RowParser
) -> Iterator[Example]:
    """Yield an example of each `data_source` of each file, without reading all columns.

    Rows outside of a slice count, too.

    Raises:
      UserError: a file is not Parquet, or such a row has no known form.
    """
    for path in dict.fromkeys(path for source in sources for path in source.paths):
        seen: set[str | None] = set()
        for group in range(len(_group_sizes(path))):
            wanted = _sources_of_group(path, group) - seen
            seen |= wanted
            for batch in files.read_parquet_batches(path, [group]) if wanted else ():
                for row in batch.to_pylist():
                    data_source = row.get(_SOURCE_COLUMN)
                    if data_source in wanted:
                        wanted.remove(data_source)
                        yield parser.parse(row, f"{path}, row group {group + 1}")
                if not wanted:
                    break


def _sources_of_group(path: Path, group: int) -> set[str | None]:
    """Return the values of `data_source`; `None` stands for a file without it."""
    values: set[str | None] = set()
    for batch in files.read_parquet_batches(path, [group], [_SOURCE_COLUMN]):
        values.update(batch.column(0).unique().to_pylist() if batch.num_columns else [None])
    return values


def cache_prompts(
    folder: Path,
    sources: Sequence[ParquetSource],
    parser: RowParser,
    encoding: PromptEncoding,
    tokenizer_path: str,
    validate: Validate,
    *,
    max_samples: int | None = None,
    workers: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    name: str = "config.data.train_files",
) -> PromptDataset:
    """Return the prompts of Parquet files, looked up in a cache that is filled where it has gaps.

    Args:
      folder: the cache; it is created.
      sources: the files.
      parser: how rows become examples.
      encoding: how prompts become tokens.
      tokenizer_path: the tokenizer's folder, or another that `load_tokenizer` takes.
      validate: called with all examples, in a worker.
      max_samples: use that many rows, from the start; `None`: all.
      workers: number of processes; 0 uses this one, `None` one for each core.
      on_progress: called with the rows read so far and in total; what it raises ends the work.
      name: the option that names the data, for messages.

    Raises:
      UserError: a row cannot be used, no prompt is left, or the folder cannot be written to.
    """
    job = _Job(parser, encoding, tokenizer_path, validate)
    parts = list(_divide(sources, max_samples))
    total = sum(part.end - part.start for part in parts)
    if not total:
        raise UserError(f"{name}: the files hold no rows")
    common = _fingerprint(job)
    identities = [_hash([common, *_identity(part)]) for part in parts]
    cache_folder.remove_abandoned_files(folder)
    paths = cache_folder.find_intact_files(folder, identities)
    missing = [number for number, path in enumerate(paths) if path is None]
    # A complete cache may be on a disk that cannot be written to.
    if missing:
        _make_folder(folder)
    done = total - sum(parts[number].end - parts[number].start for number in missing)
    on_progress(done, total)
    if workers is None:
        workers = len(os.sched_getaffinity(0))
    tasks = [(parts[number], folder, identities[number]) for number in missing]
    for number, path in zip(missing, _fill(job, tasks, workers), strict=True):
        paths[number] = path
        done += parts[number].end - parts[number].start
        on_progress(done, total)
    rows = CachedRows([path for path in paths if path is not None], [part.source for part in parts])
    report_dropped(total - len(rows), total, encoding.max_prompt_length, name)
    return PromptDataset(
        examples=CachedExamples(rows, parser.parse),
        tokens=CachedTokens(rows),
        max_prompt_length=encoding.max_prompt_length,
        name=name,
    )


def _make_folder(folder: Path) -> None:
    """Create the cache and write to it; raise `UserError` where that is impossible."""
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
    """Write files, each with the arguments of `_write_part`; yield their paths in order."""
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
            f"out; {min(workers, len(tasks))} worked at once. Finished files are kept: start the "
            "run again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _divide(sources: Sequence[ParquetSource], max_samples: int | None) -> Iterator[_Part]:
    """Yield the parts of all sources, in their order."""
    left = max_samples
    for number, source in enumerate(sources):
        before = 0  # rows of the source's files before this one
        for path in source.paths:
            sizes = _group_sizes(path)
            first_row = 0
            for groups in _join_groups(sizes):
                rows = sum(sizes[group] for group in groups)
                offset = before + first_row
                start = min(max(source.start - offset, 0), rows)
                end = rows if source.end is None else min(max(source.end - offset, 0), rows)
                if left is not None:
                    end = min(end, start + left)
                if start < end:
                    yield _Part(path, groups, first_row, start, end, number)
                    left = left if left is None else left - (end - start)
                first_row += rows
            before += first_row


def _group_sizes(path: Path) -> list[int]:
    """Return the number of rows of each row group."""
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except Exception as error:
        raise files.parquet_error(path, 0, error) from error
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _join_groups(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield consecutive row groups that have enough rows for a file of the cache."""
    joined: list[int] = []
    for group in range(len(sizes)):
        joined.append(group)
        if sum(sizes[other] for other in joined) >= _ROWS_PER_FILE or group + 1 == len(sizes):
            yield tuple(joined)
            joined = []


def _fingerprint(job: _Job) -> str:
    """Return a hash of what all files of the cache follow from."""
    tokenizer = tokenizer_lib.load_tokenizer(job.tokenizer_path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    definition = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
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
    """Return what the contents of a part follow from: a file that was changed has a new time."""
    facts = part.path.stat()
    place = [str(part.path.absolute()), facts.st_size, facts.st_mtime_ns]
    return [*place, part.row_groups, part.start, part.end]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


# What a worker process works for, set when it starts.
_job: _Job
_tokenizer: Any


def _initialize_worker(parent: int, job: _Job) -> None:
    """Prepare this process to write files of the cache."""
    # Ctrl-C reaches all processes of the command; the run decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.end_with_parent(parent)
    _set_job(job)


def _set_job(job: _Job) -> None:
    global _job, _tokenizer
    _job, _tokenizer = job, tokenizer_lib.load_tokenizer(job.tokenizer_path)


def _write_part(part: _Part, folder: Path, identity: str) -> Path:
    """Write the file of a part in an initialized worker; return its path."""
    columns = _columns_read(part.path, _job.parser.columns)
    row = 0  # of these row groups
    with cache_folder.open_unfinished(folder) as file:
        with RowWriter(file) as writer:
            for batch in files.read_parquet_batches(part.path, part.row_groups, columns):
                start, end = (min(max(x - row, 0), batch.num_rows) for x in (part.start, part.end))
                first = part.first_row + row + start
                row += batch.num_rows
                used = batch.slice(start, end - start)
                examples = [
                    _job.parser.parse(columns, f"{part.path}, row {number}")
                    for number, columns in enumerate(used.to_pylist(), first + 1)
                ]
                where = f"{part.path}, from row {first + 1}"
                try:
                    _job.validate(examples)
                except UserError as error:
                    raise UserError(f"{where}: {error}") from error
                writer.write(used, list(encode_prompts(examples, _tokenizer, _job.encoding, where)))
        return cache_folder.publish(file, identity)


def _columns_read(path: Path, columns: Columns) -> list[str] | None:
    """Return the columns that rows of verl's form are read from; `None`: all of another form's."""
    import pyarrow.parquet

    names = pyarrow.parquet.read_schema(path).names
    needed = {_SOURCE_COLUMN, columns.prompt, "reward_model"}
    if not needed <= set(names):
        return None
    return [name for name in names if name in needed | {"extra_info", columns.response}]
