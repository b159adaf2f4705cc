"""Location of a checkpoint: a local folder, a bucket, or a repository of the Hugging Face hub."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from jax_ppo.errors import UserError, nearest_name
from jax_ppo.models.hf.files import gguf_error
from jax_ppo.storage import downloads, hub, paths, remote
from jax_ppo.storage.paths import expand_local_path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "adapter_model.safetensors",
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges*",
    "*.jinja",
]
TEMPLATE_SUFFIX = ".jinja"
# Files in folders of a repository, such as other formats of the weights, are left out unless they
# are chat templates: one pattern for each character in which the end of a name can differ.
IGNORED_HUB_FILES = [
    f"*/*[!{character}]{TEMPLATE_SUFFIX[i + 1 :]}" for i, character in enumerate(TEMPLATE_SUFFIX)
]


def resolve_model_folder(
    path: str,
    what: str = "config.model.path",
    holds: str = "config.json and model.safetensors",
    files: Sequence[str] = HUB_FILES,
) -> Path:
    """Return the folder of a checkpoint, downloading it unless it is local or cached.

    Args:
      path: A local folder, an address such as gs://BUCKET/FOLDER, or a hub name: OWNER/NAME, or
        OWNER/NAME@REVISION with a branch, tag or commit.
      what: name of the option, for error messages.
      holds: what such a folder holds, for error messages.
      files: patterns of the files to download.

    Raises:
      UserError: there is no such folder and the hub has no such repository, or does not answer
        within about `hub.TIMEOUT_SECONDS` seconds; or the bucket is not accessible.
    """
    if not path:
        raise UserError(f"{what}='': must be set to a Hugging Face folder or hub name")
    if remote.is_address(path):
        return downloads.download_folder(path, what, files)
    folder = expand_local_path(path, what)
    if folder.is_dir():
        _refuse_run(folder, f"{what}={path!r}")
        return folder
    problem = f"{what}={path!r}: "
    remedy = f"set {what} to a folder with {holds}"
    nearest = _nearest_folder(folder)
    if nearest:
        remedy += f" (the nearest one here is {nearest})"
    if folder.suffix == ".gguf" and folder.is_file():
        raise gguf_error(folder)
    if folder.is_file():
        raise UserError(f"{problem}this is a file; {remedy}")
    if not HUB_NAME.fullmatch(path):
        raise UserError(
            f"{problem}there is no such folder (looked from {Path.cwd()}), and the path "
            f"is not a hub name, OWNER/NAME; {remedy}"
        )
    name, revision = hub.split_revision(path)
    command = f"hf download {name} --revision {revision} --local-dir {name.rpartition('/')[2]}"
    try:
        return hub.download_snapshot(path, files, what, ignore=IGNORED_HUB_FILES)[0]
    except hub.HubError as error:
        raise UserError(
            f"{problem}there is no such folder (looked from {Path.cwd()}), and {error.reason}. "
            f"Either {remedy}; or get one, where the hub can be reached, with `{command}`"
        ) from error


def _refuse_run(folder: Path, setting: str) -> None:
    """Raise `UserError` for the work directory of a run, or a checkpoint in it: no models."""
    run = folder.parents[1] if folder.parent.name == paths.CHECKPOINTS else folder
    if not (run / "training_metrics.csv").exists() or any(folder.glob("*.safetensors")):
        return
    models = sorted(str(file.parent) for file in run.glob("*/config.json"))
    remedy = f"a model of it is {', '.join(models)}" if models else "it has exported no model"
    kind = "the work directory" if run == folder else "a checkpoint"
    raise UserError(f"{setting}: is {kind} of a run; {remedy}")


def shareable_model_name(path: str, folder: Path) -> tuple[str, str | None]:
    """Return the name by which others find a model, and its revision on the hub.

    The name is that of the hub, or an address or absolute path, which have `None` for a revision.
    `path` is the option as passed to `resolve_model_folder`, which returned `folder`, or "" for a
    folder of this run.
    """
    if remote.is_address(path):
        return path, None
    if not path or Path(path).expanduser().is_dir():
        return str(folder.resolve()), None
    return hub.split_revision(path)


def _nearest_folder(folder: Path) -> Path | None:
    """Return the existing folder whose path is most similar to that of a missing one."""
    parts = list(folder.parts)
    parent = Path(folder.anchor or ".")
    while parts and (parent / parts[0]).is_dir():
        parent /= parts.pop(0)
    if not parts:
        return None
    try:
        names = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    except OSError:
        return None
    nearest = nearest_name(parts[0], names)
    if not nearest:
        return None
    corrected = parent / nearest
    complete = corrected.joinpath(*parts[1:])
    if complete.is_dir():
        return complete
    return corrected
