"""What `data.train_files` and `data.val_files` may say, and the examples behind it.

    a.jsonl, a.jsonl.gz, a.parquet          files
    hf:OWNER/NAME[@REVISION]/PATH/IN/REPO   one such file of a data set repository on the Hugging Face hub
    tfds:NAME/SPLIT                         TensorFlow Datasets, without TensorFlow
    arithmetic:COUNT[:heldout]              generated word problems
    stories:COUNT[:heldout]                 generated story openings, each with a joyful and a sad sentence to go on with

Several are separated by commas and come one after the other. FILE[START:END], of any file, takes those of its rows alone,
counted from 0 as in Python.
"""

import itertools
import os
import re
from pathlib import Path

from jax_ppo.data import arithmetic, files, row_formats, stories
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.storage import hub
from jax_ppo.types import Example

GENERATED = ("arithmetic", "stories")
SCHEMES = (*GENERATED, "hf", "tfds")
FORMS = (
    "files ("
    + ", ".join(files.SUFFIXES)
    + "), `arithmetic:COUNT[:heldout]`, `stories:COUNT[:heldout]`, "
    "`hf:OWNER/NAME[@REVISION]/FILE` or `tfds:NAME/SPLIT`"
)

# Of revisions these two kinds have slashes in their names.
_HUB_FILE = re.compile(r"([^/@]+/[^/@]+(?:@(?:refs/convert/[^/]+|refs/pr/[^/]+|[^/]+))?)/(.+)")
_SLICE = re.compile(r"(.*)\[(\d*):(\d*)\]")


def load_examples(
    spec: str,
    *,
    prompt_key: str = "prompt",
    instruction: str = "",
    response_key: str = "answer",
    seed: int = 0,
    option: str = "config.data.train_files",
) -> list[Example]:
    """Reads or generates every example that the specification names, in its order.

    Args:
      spec: the sources, separated by commas; see the top of this file.
      prompt_key: column of the prompt in rows of verl's form.
      instruction: text added after the question in rows of GSM8K's form, with a blank before it.
      response_key: column of the response in rows of verl's form, or its name in their extra_info.
      seed: of the generated stories. The arithmetic problems depend on their index alone.
      option: the option that holds the specification, for the messages.

    Raises:
      UserError: a source that does not exist, can not be reached or read, or has rows of no known form.
    """
    sources = [source.strip() for source in spec.split(",") if source.strip()]
    if not sources:
        raise UserError(f"{option}={spec!r}: expected {FORMS}")
    examples = []
    for source in sources:
        examples += _load(source, (prompt_key, instruction, response_key), seed, option)
    return examples


def _load(source, columns, seed, option):
    scheme, colon, rest = source.partition(":")
    if colon and scheme in GENERATED:
        count, split = _count_and_split(scheme, rest, option)
        return (
            arithmetic.generate_arithmetic_examples(count, split)
            if scheme == "arithmetic"
            else stories.generate_story_examples(count, split, seed)
        )
    if colon and scheme == "tfds":  # whose splits have slices of their own
        located = _tfds_rows(rest, option)
    else:
        located = _file_rows(source, option)
    examples = [row_formats.parse_row(row, where, *columns) for where, row in located]
    if not examples:
        raise UserError(f"{option}: {source} holds no rows")
    return examples


def _file_rows(source, option):
    """(where, row) of a file here or on the hub, or of the slice that is asked for."""
    sliced = _SLICE.fullmatch(source)
    name, *ends = sliced.groups() if sliced else (source, "", "")
    scheme, colon, rest = name.partition(":")
    if colon and scheme == "hf":
        path = _hub_file(rest, option)
    elif name.endswith(files.SUFFIXES):
        path = Path(name).expanduser()
    else:
        raise UserError(f"{option}={source!r}: expected {FORMS}.{did_you_mean(scheme, SCHEMES)}")
    start, end = (int(number) if number else None for number in ends)
    return itertools.islice(files.read_rows(path, option), start, end)


def _count_and_split(scheme, rest, option):
    count, colon, split = rest.partition(":")
    if not count.isdecimal() or not int(count):
        raise UserError(
            f"{option}='{scheme}:{rest}': expected a count of at least 1 after `{scheme}:`, got {count!r}"
        )
    if colon and split != "heldout":
        raise UserError(
            f"{option}='{scheme}:{rest}': expected `{scheme}:{count}` for training or "
            f"`{scheme}:{count}:heldout`, got {split!r}"
        )
    return int(count), split or "train"


def _hub_file(rest, option):
    found = _HUB_FILE.fullmatch(rest)
    if not found or not rest.endswith(files.SUFFIXES):
        raise UserError(
            f"{option}='hf:{rest}': expected hf:OWNER/NAME/FILE with a file that ends in "
            f"{', '.join(files.SUFFIXES)}, as in hf:openai/gsm8k/main/train-00000-of-00001.parquet"
        )
    name, path = found.groups()
    folder, names = hub.download_snapshot(name, [path], option, repo_type="dataset")
    if path not in names:
        raise UserError(
            f"{option}: the data set {name} on the hub has no file {path}.{did_you_mean(path, names)}"
        )
    return folder / path


def _tfds_rows(rest, option):
    """Yields (where, row) of a split, text decoded. The data set is prepared first if it is not there yet."""
    name, slash, split = rest.rpartition("/")
    if not slash or not name or not split:
        raise UserError(f"{option}='tfds:{rest}': expected tfds:NAME/SPLIT, as in tfds:gsm8k/train")
    source = _tfds_source(name, split, option)
    expected = source.dataset_info.splits[split].num_examples
    if len(source) != expected:
        raise UserError(
            f"{option}='tfds:{rest}': {len(source)} rows can be read, but the data set's own record says "
            f"{expected}. Prepare it again with file_format='array_record'"
        )
    for index in range(len(source)):
        yield f"tfds:{rest}, row {index + 1}", row_formats.to_plain_python(source[index])


def _tfds_source(name, split, option):
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UserError(
            f"{option}='tfds:{name}/{split}': needs the package tensorflow-datasets ({error}); "
            "`pip install tensorflow-datasets array_record`"
        ) from error
    folder = os.environ.get("TFDS_DATA_DIR")
    _register(tfds, name)
    try:
        return tfds.data_source(name, split=split, data_dir=folder)
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(
            f"{option}='tfds:{name}/{split}': TFDS knows no data set {name!r}, and none is prepared under "
            f"{folder or '~/tensorflow_datasets'} "
            f"(TFDS_DATA_DIR).{did_you_mean(name, _known(tfds))}"
        ) from error
    except Exception as error:
        raise UserError(
            f"{option}='tfds:{name}/{split}': {error}. Expected a split of a data set that is prepared "
            f"with file_format='array_record' under {folder or '~/tensorflow_datasets'} (TFDS_DATA_DIR), "
            "or that can be downloaded from here"
        ) from error


def _register(tfds, name):
    """TFDS ships builders that it lists only once their module was imported; GSM8K's is one."""
    import importlib

    base = name.partition("/")[0].partition(":")[0]
    if base.isidentifier() and base not in _known(tfds):
        try:
            importlib.import_module(f"tensorflow_datasets.text.{base}.{base}")
        except ImportError:
            pass  # not one of those: it may still be prepared on disk


def _known(tfds):
    return tfds.list_builders(with_community_datasets=False)  # those are asked for on the network
