"""Files of a data set on the Hugging Face hub: a named file, or the files of a split.

    OWNER/NAME[@REVISION]/PATH/IN/REPO          a file
    OWNER/NAME[@REVISION][/FOLDER][:SPLIT]      the files of a split, by default `train`

The files of a split are recognized by the names that the hub's own conversion and most uploads
use: SPLIT.jsonl, SPLIT-00000-of-00002.parquet, or anything in a folder SPLIT.
"""

import re
from pathlib import Path, PurePosixPath

from jax_ppo.data.files import SUFFIXES, has_suffix
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.storage import hub

_DEFAULT_SPLIT = "train"
# Names of revisions such as refs/convert/... and refs/pr/... contain slashes.
_REPOSITORY = r"([^/@:]+/[^/@:]+(?:@(?:refs/convert/[^/:]+|refs/pr/[^/:]+|[^/:]+))?)"
_FILE = re.compile(rf"{_REPOSITORY}/(.+)")
_SPLIT = re.compile(rf"{_REPOSITORY}(?:/([^:]+?))?/?(?::([\w.-]+))?")
_SHARD = re.compile(r"-\d+-of-(\d+)(?:-[0-9a-f]+)?")
# Downloaded to learn the names of all files: without a network, of those in the cache. Every
# repository has the second one.
_SMALL_FILES = ["README.md", ".gitattributes"]


def fetch_hub_files(location: str, option: str) -> list[Path]:
    """Return the local paths of the files that a location names, downloaded if necessary.

    Raise `UserError` if the location has another form, or there is no such file or split, and
    `HubError` if the data set is unavailable.
    """
    if has_suffix(location):
        if match := _FILE.fullmatch(location):
            return [_fetch_file(match[1], match[2], option)]
    elif match := _SPLIT.fullmatch(location):
        repository, folder, split = match.groups()
        # A name with a suffix, such as README.md, is a file that no reader supports.
        if split or not re.search(r"\.[A-Za-z]{2,5}$", folder or ""):
            return _fetch_split(repository, folder or "", split or _DEFAULT_SPLIT, option)
    raise UserError(
        f"{option}='hf:{location}': expected hf:OWNER/NAME/FILE with a file that ends in "
        f"{', '.join(SUFFIXES)}, as in hf:openai/gsm8k/main/train-00000-of-00001.parquet, or "
        "hf:OWNER/NAME[/FOLDER][:SPLIT], as in hf:openai/gsm8k/main:test"
    )


def _fetch_file(repository: str, path: str, option: str) -> Path:
    snapshot = hub.download_snapshot(repository, [path], option, repo_type="dataset")
    if path not in snapshot.names:
        raise UserError(
            f"{option}: the data set {repository} on the hub has no file {path}; all files of a "
            f"split are hf:{repository}[/FOLDER][:SPLIT]."
            f"{did_you_mean(path, snapshot.names)}"
        )
    return snapshot.folder / path


def _fetch_split(repository: str, folder: str, split: str, option: str) -> list[Path]:
    names = hub.download_snapshot(repository, _SMALL_FILES, option, repo_type="dataset").names
    readable = [PurePosixPath(name) for name in sorted(names) if has_suffix(name)]
    inside = [path for path in readable if not folder or path.is_relative_to(folder)]
    chosen = [path for path in inside if _split_of(path) == split]
    if not chosen:
        known = sorted({_split_of(path) for path in inside})
        place = f" in the folder {folder}" if folder else ""
        raise UserError(
            f"{option}: the data set {repository} on the hub has no files of the split {split!r}"
            f"{place}; it has "
            f"{', '.join(known) or 'none that can be read'}.{did_you_mean(split, known)}"
        )
    _require_one_table(repository, split, chosen, option)
    patterns = [str(path) for path in chosen]
    root = hub.download_snapshot(repository, patterns, option, repo_type="dataset").folder
    return [root / path for path in chosen]


def _split_of(path: PurePosixPath) -> str:
    stem = path.name.partition(".")[0]
    if shard := _SHARD.search(stem):
        return stem[: shard.start()]
    # The hub's conversion numbers the files in a folder named after the split.
    if stem.isdecimal():
        return path.parent.name
    return stem


def _require_one_table(
    repository: str, split: str, paths: list[PurePosixPath], option: str
) -> None:
    folders = sorted({str(path.parent) for path in paths})
    if len(folders) > 1:
        choices = " or ".join(f"hf:{repository}/{name}:{split}" for name in folders)
        raise UserError(
            f"{option}: the data set {repository} on the hub has the split {split!r} in several "
            f"folders; expected {choices}"
        )
    # Without a network only the files in the cache are known.
    shards = [_SHARD.search(path.name) for path in paths]
    totals = {int(shard[1]) for shard in shards if shard}
    if totals and (len(totals) > 1 or totals.pop() != len(paths)):
        raise UserError(
            f"{option}: the split {split!r} of {repository} has only the files "
            f"{', '.join(path.name for path in paths)}; expected as many as their names state"
        )
