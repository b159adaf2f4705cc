"""Where a checkpoint is: a local folder, or a repository of the Hugging Face hub, fetched once."""

import difflib
import os
import re
from pathlib import Path

from jax_ppo.errors import UserError

HUB_TIMEOUT_S = 5.0
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.model", "vocab*", "merges*", "*.jinja"]


def find(path: str, revision: str = "main", what: str = "config.model.path") -> Path:
    """The folder of a checkpoint: `path` itself, or what the hub holds under this name, downloaded or from its cache.

    The hub's own environment variables count (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE). `what` is the option's
    name, for the message of the UserError that is raised where nothing is found: at once, or where the hub is silent
    after about 2 x HUB_TIMEOUT_S seconds.
    """
    if not path:
        raise UserError(f"{what}='': must be set to a Hugging Face folder or hub name")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    problem = f"{what}={path!r}: "
    nearest = _nearest_folder(folder)
    remedy = f"set {what} to a folder with config.json and model.safetensors"
    remedy += f" (the nearest one here is {nearest})" if nearest else ""
    if folder.is_file():
        raise UserError(f"{problem}this is a file; {remedy}")
    if not HUB_NAME.fullmatch(path):
        raise UserError(f"{problem}there is no such folder (and it is no hub name, OWNER/NAME); {remedy}")
    command = f"hf download {path} --revision {revision} --local-dir {path.rpartition('/')[2]}"
    try:
        return _from_hub(path, revision)
    except _NotOnHub as error:
        raise UserError(f"{problem}there is no such folder, and {error}. Either {remedy}; or get one, where the hub "
                        f"can be reached, with `{command}`") from error


class _NotOnHub(Exception):
    """Says why the hub did not give a repository."""


def _from_hub(name, revision):
    import huggingface_hub as hub  # late: a local folder needs neither it nor the network
    from huggingface_hub import errors

    api, offline = hub.HfApi(), ""
    endpoint = api.endpoint
    try:
        # One question with a time limit: snapshot_download would wait minutes for a host that is silent. It gets the
        # revision's name, not the commit that this answers, or its cache would not know the name when offline.
        api.model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except errors.GatedRepoError as error:
        raise _NotOnHub(f"{endpoint}/{name} is gated: accept its terms there and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise _NotOnHub(f"{endpoint}/{name} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise _NotOnHub(f"{endpoint} has no repository of this name (a private one needs HF_TOKEN)") from error
    except errors.HFValidationError as error:
        raise _NotOnHub(f"it is no hub name ({error})") from error
    except Exception as error:  # whatever the HTTP library of the day raises when there is no network
        offline = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=["*/*"],
                                          local_files_only=bool(offline), etag_timeout=HUB_TIMEOUT_S))
    except Exception as error:
        if offline:
            raise _NotOnHub(f"{endpoint} cannot be reached ({offline}) and its cache has no whole copy") from error
        raise _NotOnHub(f"downloading it from {endpoint} failed ({type(error).__name__}: {error})") from error


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
