"""Where a checkpoint is: a local folder, or a repository of the Hugging Face hub, fetched once."""

import difflib
import os
import re
from pathlib import Path

from jax_ppo.errors import UserError
from jax_ppo.storage import hub

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


def resolve_model_folder(
    path: str, what: str = "config.model.path", holds: str = "config.json and model.safetensors"
) -> Path:
    """The folder of a checkpoint: `path` itself, or what the hub holds under this name, downloaded or from its cache.

    A name is OWNER/NAME, or OWNER/NAME@REVISION (a branch, tag or commit).
    `what` is the option's name, and `holds` what such a folder has in it, for the message of the UserError that is raised where
    nothing is found: at once, or where the hub is silent after hub.TIMEOUT seconds or a little more.
    """
    if not path:
        raise UserError(f"{what}='': must be set to a Hugging Face folder or hub name")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    problem = f"{what}={path!r}: "
    nearest = _nearest_folder(folder)
    remedy = f"set {what} to a folder with {holds}"
    remedy += f" (the nearest one here is {nearest})" if nearest else ""
    if folder.is_file():
        raise UserError(f"{problem}this is a file; {remedy}")
    if not HUB_NAME.fullmatch(path):
        raise UserError(
            f"{problem}there is no such folder (and it is no hub name, OWNER/NAME); {remedy}"
        )
    name, revision = hub.split_revision(path)
    command = f"hf download {name} --revision {revision} --local-dir {name.rpartition('/')[2]}"
    try:
        return hub.download(path, HUB_FILES, what, ignore=["*/*"])[0]
    except hub.HubError as error:
        raise UserError(
            f"{problem}there is no such folder, and {error.reason}. Either {remedy}; or get one, where the hub "
            f"can be reached, with `{command}`"
        ) from error


def shareable_model_name(path: str, folder: Path) -> tuple[str, str | None]:
    """What others can find a model by: a hub name and its revision, or an absolute path and None.

    `path`: as it was given to `find` ("" for a folder of ours), which gave `folder`.
    """
    if not path or Path(path).expanduser().is_dir():
        return str(folder.resolve()), None
    return hub.split_revision(path)


def _nearest_folder(folder: Path) -> Path | None:
    """The existing folder whose path is most like this one's, which does not exist."""
    parts, parent = list(folder.parts), Path(folder.anchor or ".")
    while parts and (parent / parts[0]).is_dir():
        parent /= parts.pop(0)
    try:
        there = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    except OSError:
        return None
    lower = {name.lower(): name for name in there}
    near = difflib.get_close_matches(parts[0].lower(), lower, n=1) if parts else []
    if not near:
        return None
    rest = Path(lower[near[0]], *parts[1:])
    return parent / (rest if (parent / rest).is_dir() else rest.parts[0])
