"""The sources that `data.train_files` and `data.val_files` can name, and their examples.

    a.jsonl, a.json, a.csv, a.parquet       files; JSONL may be gzipped
    data/*.parquet                          the files that match, sorted by name
    gs://BUCKET/a.jsonl, s3://BUCKET/...    such files in a bucket
    hf:OWNER/NAME[@REVISION]/PATH/IN/REPO   such a file in a dataset repository of the hub
    hf:OWNER/NAME[/FOLDER][:SPLIT]          the files of a split of it, by default `train`
    tfds:NAME/SPLIT                         TensorFlow Datasets; TensorFlow is not needed
    NAME:COUNT[:heldout]                    generated examples: `GENERATORS` has the names
    memory:KIND@DIGEST                      rows that a Python program has passed

Several sources are separated by commas and concatenated, or mixed: SOURCE*WEIGHT. FILE[START:END],
of any file, selects a slice of its rows, counted from 0 as in Python.
"""

import contextlib
import dataclasses
import importlib
import itertools
import logging
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jax_ppo.data import files, hub_files, row_formats
from jax_ppo.data.columns import Columns, find_label, ignored_columns, is_missing
from jax_ppo.data.messages import prompt_texts
from jax_ppo.errors import UserError, did_you_mean, shorten
from jax_ppo.registries import IN_MEMORY
from jax_ppo.storage import downloads, local_files, remote
from jax_ppo.types import Example

# The generated sources: a function of (count, split, seed) each, imported only when it is named.
GENERATORS = {
    "arithmetic": "jax_ppo.demonstration.arithmetic:generate_arithmetic_examples",
    "sums": "jax_ppo.demonstration.arithmetic:generate_sum_examples",
    "calculations": "jax_ppo.demonstration.arithmetic:generate_calculation_examples",
    "char_count": "jax_ppo.demonstration.arithmetic:generate_count_examples",
    "stories": "jax_ppo.demonstration.stories:generate_story_examples",
}
SCHEMES = (*GENERATORS, "hf", "tfds")
FORMS = (
    f"files ({', '.join(files.SUFFIXES)}; also as gs://BUCKET/FILE), "
    + "".join(f"`{name}:COUNT[:heldout]`, " for name in GENERATORS)
    + "`hf:OWNER/NAME[@REVISION]/FILE`, `hf:OWNER/NAME[/FOLDER][:SPLIT]` or `tfds:NAME/SPLIT`"
)
MAX_GENERATED_DIGITS = 7  # more examples would fill the memory of the host


log = logging.getLogger(__name__)

LocatedRows = Iterator[tuple[str, dict[str, Any]]]

# At most six digits on each side of the point.
_WEIGHT = re.compile(r"(.+)\*(\d{1,6}(?:\.\d{0,6})?|\.\d{1,6})")
_SLICE = re.compile(r"(.*)\[(\d{0,18}):(\d{0,18})\]")


def read_examples(
    spec: str,
    *,
    columns: Columns | None = None,
    instruction: str = "",
    seed: int = 0,
    option: str = "config.data.train_files",
) -> list[Example]:
    """Read or generate all examples of the sources that an option names, in their order.

    Weights are ignored here (`source_weights`); columns and instruction are as in `parse_row`. The
    seed is for generated stories. Raise `UserError` if a source does not exist, cannot be reached
    or read, or has rows of no known format.
    """
    sources = [source for source, _ in _split_weights(spec)]
    if not sources:
        raise UserError(f"{option}={spec!r}: expected {FORMS}")
    examples: list[Example] = []
    for number, source in enumerate(sources):
        loaded = _load_source(source, columns or Columns(), instruction, seed, option)
        examples += [dataclasses.replace(example, source=number) for example in loaded]
    return examples


def source_weights(spec: str, option: str) -> tuple[float, ...] | None:
    """Return the weights of the sources in a specification, `None` if they are concatenated.

    Raise `UserError` if only some of the sources have a weight, or a weight is 0.
    """
    weights = [weight for _, weight in _split_weights(spec)]
    known = [weight for weight in weights if weight is not None]
    if not known:
        return None
    if len(known) < len(weights) or not all(known):
        raise UserError(
            f"{option}={spec!r}: expected a weight above 0 for each source, as in "
            "a.jsonl*0.7,b.jsonl*0.3, or none at all"
        )
    return tuple(known)


def without_weights(spec: str) -> str:
    """Return a specification of the same sources, concatenated."""
    return ",".join(source for source, _ in _split_weights(spec))


def _split_sources(spec: str) -> Iterator[str]:
    """Yield the sources between commas; a comma in the path of an existing file separates none."""
    parts = spec.split(",")
    while parts:
        count = 1
        if not _is_complete(parts[0]):
            joined = (",".join(parts[:end]) for end in range(2, len(parts) + 1))
            matches = (end for end, name in enumerate(joined, 2) if _is_complete(name, exists=True))
            count = next(matches, 1)
        yield ",".join(parts[:count])
        del parts[:count]


def _is_complete(source: str, exists: bool = False) -> bool:
    """Return whether a text is the name of a source, and not the part before a comma in it."""
    if weighted := _WEIGHT.fullmatch(source.strip()):
        source = weighted[1]
    if sliced := _SLICE.fullmatch(source.strip()):
        source = sliced[1]
    name = source.strip()
    is_named = files.has_suffix(name) or _is_pattern(name)
    if exists:
        path = os.path.expanduser(name)
        return is_named and (os.path.isfile(path) or bool(files.expand_pattern(Path(path))))
    return is_named or name.partition(":")[0] in SCHEMES


def _split_weights(spec: str) -> list[tuple[str, float | None]]:
    pairs: list[tuple[str, float | None]] = []
    for source in filter(None, map(str.strip, _split_sources(spec))):
        if weighted := _WEIGHT.fullmatch(source):
            pairs.append((weighted[1].strip(), float(weighted[2])))
        else:
            pairs.append((source, None))
    return pairs


def _load_source(
    source: str, columns: Columns, instruction: str, seed: int, option: str
) -> list[Example]:
    scheme, colon, arguments = source.partition(":")
    if colon and scheme in GENERATORS:
        return _generate_examples(scheme, arguments, seed, option)
    # TFDS has another syntax of slices, in the name of the split.
    if source in IN_MEMORY:
        located_rows = files.parse_json_rows(IN_MEMORY[source], option)
    elif colon and scheme == "memory":
        raise UserError(f"{option}={source!r}: rows of another Python process; pass them again")
    elif colon and scheme == "tfds":
        located_rows = _read_tfds_rows(arguments, option)
    else:
        located_rows = _read_file_rows(source, option)
    examples = []
    layouts: dict[tuple[str, ...], None] = {}  # the columns with values, of each kind of row
    unwanted = 0
    for location, row in located_rows:
        example = row_formats.parse_row(row, location, columns=columns, instruction=instruction)
        if columns.reads_responses and example.response and example.rejected is None:
            label = find_label(row, columns)
            if label and str(row.pop(label)).lower() == "false":
                unwanted += 1
                continue
        examples.append(example)
        layouts[tuple(name for name, value in row.items() if not is_missing(value))] = None
    if unwanted:
        log.warning(
            "%s: %d of %d rows are left out: their label marks the response as a bad one",
            source,
            unwanted,
            unwanted + len(examples),
        )
    # An empty source is a mistake, even if others have rows.
    if not examples:
        raise UserError(f"{option}: {source} has no rows{' with a true label' * bool(unwanted)}")
    ignored = [name for layout in layouts for name in ignored_columns(layout, columns)]
    if ignored:
        is_verl = any({"reward_model", "reward_spec"} & set(layout) for layout in layouts)
        log.warning(
            "%s: ignored columns: %s (they are neither prompt, response nor reference answer%s)",
            source,
            ", ".join(dict.fromkeys(ignored)),
            "" if is_verl else "; a reward function gets them in extra_info",
        )
    prompts = (prompt_texts(example.prompt) for example in examples)
    if instruction and not any(texts[-1].endswith(instruction) for texts in prompts):
        log.warning(
            "%s: config.data.instruction is not added to these rows: their prompts contain more "
            "than a question",
            source,
        )
    return examples


def _generate_examples(scheme: str, arguments: str, seed: int, option: str) -> list[Example]:
    """Return the examples of COUNT[:heldout] of a generator."""
    count, colon, split = arguments.partition(":")
    is_count = count.isdecimal() and len(count) <= MAX_GENERATED_DIGITS and int(count) > 0
    if not is_count:
        raise UserError(
            f"{option}='{scheme}:{shorten(arguments)}': expected a count of at least 1 and at most "
            f"{MAX_GENERATED_DIGITS} digits after `{scheme}:`, got {shorten(count)!r}"
        )
    if colon and split != "heldout":
        raise UserError(
            f"{option}='{scheme}:{arguments}': expected `{scheme}:{count}` for training or "
            f"`{scheme}:{count}:heldout`, got {split!r}"
        )
    examples: list[Example] = pkgutil.resolve_name(GENERATORS[scheme])(
        int(count), split or "train", seed
    )
    return examples


def _read_file_rows(source: str, option: str) -> LocatedRows:
    name, start, end = source, "", ""
    if sliced := _SLICE.fullmatch(source):
        name, start, end = sliced.groups()
    paths = _locate_files(name, source, option)
    rows = itertools.chain.from_iterable(files.read_rows(path, option) for path in paths)
    # The slice is taken while reading, so that rows after the end are never parsed.
    return itertools.islice(rows, int(start or 0), int(end) if end else None)


def _locate_files(name: str, source: str, option: str) -> list[Path]:
    scheme, colon, arguments = name.partition(":")
    is_remote = remote.is_address(name)
    if colon and scheme == "hf":
        return hub_files.fetch_hub_files(arguments, option)
    if is_remote and _is_pattern(name):
        raise UserError(
            f"{option}={shorten(source)!r}: patterns match local files only; name each file of a "
            "bucket, separated by commas"
        )
    if is_remote and files.has_suffix(name):
        return [downloads.download_file(name, option)]
    if not is_remote:
        path = local_files.expand_local_path(name, option)
        # A file of this very name takes precedence.
        if _is_pattern(name) and not path.exists():
            return files.find_matching_files(path, option)
        if files.has_suffix(name) or _is_pattern(name):
            return [path]
        if path.is_dir():
            raise files.folder_error(path, option)
    raise UserError(
        f"{option}={shorten(source)!r}: expected {FORMS}.{did_you_mean(scheme, SCHEMES)}"
    )


def _is_pattern(name: str) -> bool:
    return "*" in name or "?" in name


def _read_tfds_rows(name_and_split: str, option: str) -> LocatedRows:
    """Yield (location, row) of a TFDS split, text decoded. Prepare the data set if necessary."""
    name, slash, split = name_and_split.rpartition("/")
    if not slash or not name or not split:
        raise UserError(
            f"{option}='tfds:{name_and_split}': expected tfds:NAME/SPLIT, as in tfds:gsm8k/train"
        )
    source = _open_tfds_source(name, split, option)
    # A split that is prepared incompletely would otherwise silently train on fewer rows.
    expected = source.dataset_info.splits[split].num_examples
    if len(source) != expected:
        raise UserError(
            f"{option}='tfds:{name_and_split}': {len(source)} rows can be read, but the data set's "
            f"metadata states {expected}. Prepare it again with file_format='array_record'"
        )
    for number, row in enumerate(source, 1):
        yield f"tfds:{name_and_split}, row {number}", _to_plain_python(row)


def _to_plain_python(value: Any) -> Any:
    """Convert a TFDS value to plain Python: bytes decoded as UTF-8, arrays as lists."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {key: _to_plain_python(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _to_plain_python(value.tolist())
    if isinstance(value, list | tuple):
        return [_to_plain_python(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _open_tfds_source(name: str, split: str, option: str) -> Any:
    setting = f"{option}='tfds:{name}/{split}'"
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UserError(
            f"{setting}: needs the package tensorflow-datasets ({error}); "
            "`pip install tensorflow-datasets array_record importlib_resources`"
        ) from error
    # TFDS itself reads this variable only when it is imported.
    folder = os.environ.get("TFDS_DATA_DIR")
    place = f"under {folder or '~/tensorflow_datasets'} (TFDS_DATA_DIR)"
    # Listing community data sets would access the network.
    known = tfds.list_builders(with_community_datasets=False)
    # A builder that TFDS ships but does not list before its import, such as GSM8K's.
    base_name = name.partition("/")[0].partition(":")[0]
    if base_name.isidentifier() and base_name not in known:
        with contextlib.suppress(ImportError):  # the data set may still be prepared on disk
            importlib.import_module(f"tensorflow_datasets.text.{base_name}.{base_name}")
    try:
        builder = tfds.builder(name, data_dir=folder)
        if not builder.is_prepared():
            builder = _prepare_tfds(tfds, name, folder)
        return builder.as_data_source(split)
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(
            f"{setting}: TFDS has no data set {name!r}, and none is prepared {place}."
            f"{did_you_mean(name, known)}"
        ) from error
    except Exception as error:
        raise UserError(
            f"{setting}: {error}. Expected a split of a data set that is prepared with "
            f"file_format='array_record' {place}, or that can be downloaded from here"
        ) from error


def _prepare_tfds(tfds: ModuleType, name: str, folder: str | None) -> Any:
    """Return a data set's builder, prepared by one process at a time: TFDS would fail otherwise."""
    lock = downloads.cache_folder("tfds") / "lock"
    with downloads.locked(lock):
        # TFDS's default format, TFRecord, can be neither written nor read without TensorFlow. A
        # builder made only now also finds what another process has prepared in the meantime.
        builder = tfds.builder(name, data_dir=folder, file_format="array_record")
        if not builder.is_prepared():
            builder.download_and_prepare()
    return builder
