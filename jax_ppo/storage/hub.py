"""Downloads from the Hugging Face hub.

Without a network the local cache is used, or an error is raised within seconds.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jax_ppo.errors import UserError

TIMEOUT_SECONDS = 10.0  # for the hub to answer
# Kinds of repositories: the name in messages, and the prefix of the repositories in URLs.
_KINDS = {"model": ("model", ""), "dataset": ("data set", "datasets/")}


class Snapshot(NamedTuple):
    """A downloaded repository."""

    folder: Path  # its folder in the hub's cache
    names: list[str]  # of all files of the repository; without a network, of the cached ones


class HubError(UserError):
    """A repository could not be obtained from the hub."""

    def __init__(self, message: str, reason: str) -> None:
        """Take the message, and the reason alone, for callers that write their own message."""
        super().__init__(message)
        self.reason = reason


def download_snapshot(
    name: str,
    patterns: Sequence[str],
    option: str,
    *,
    repo_type: str = "model",
    ignore: Sequence[str] = (),
) -> Snapshot:
    """Download the matching files of a repository to the hub's cache.

    The hub is first queried once, with a time limit and without retries. If it does not answer, the
    cache is used, where at least one file must match. The hub's own environment variables apply
    (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE).

    `name` is OWNER/NAME, or OWNER/NAME@REVISION with a branch, tag or commit. In `patterns` and in
    `ignore`, which leaves out files, * matches any characters, including slashes. `repo_type` is
    "model" or "dataset"; messages name `option`. Raise `HubError` if the repository is gated, it or
    the revision does not exist, the name is invalid, a download failed, or there is neither a
    network nor a cached copy.
    """
    repo_id, revision = split_revision(name)
    kind, url_prefix = _KINDS[repo_type]

    import huggingface_hub  # imported late: local files do not need it

    if sys.stderr.isatty() and not sys.stdout.isatty():  # as with `| tee`: bars would tear lines
        huggingface_hub.utils.disable_progress_bars()
    endpoint = huggingface_hub.HfApi().endpoint
    url = f"{endpoint}/{url_prefix}{repo_id}"
    # Download by the name of the revision, not by the commit in `info`: otherwise the cache would
    # not know the name when there is no network.
    download = functools.partial(
        huggingface_hub.snapshot_download,
        repo_id,
        repo_type=repo_type,
        revision=revision,
        allow_patterns=list(patterns),
        ignore_patterns=list(ignore),
    )
    info = None
    try:
        info = huggingface_hub.HfApi().repo_info(
            repo_id, repo_type=repo_type, revision=revision, timeout=TIMEOUT_SECONDS
        )
        folder = download(etag_timeout=TIMEOUT_SECONDS)
    except Exception as error:  # without a network, it is one of the hub's HTTP library
        reason = _explain_refusal(error, endpoint, url, revision)
        cause = _format_error(error)
        if not reason and info is not None:
            reason = f"downloading it from {endpoint} failed ({cause})"
        elif not reason:
            if cached := _find_in_cache(download, patterns, ignore):
                return cached
            reason = f"{endpoint} cannot be reached ({cause}) and its cache has no copy"
        raise HubError(
            f"{option}: the {kind} {repo_id} at revision {revision} is unavailable: {reason}. Give "
            f"a local path in {option}, or a name that the hub has; or run once with a network "
            "(`hf download` fills the cache; HF_HOME says where it is)",
            reason,
        ) from error
    names = [file.rfilename for file in getattr(info, "siblings", None) or ()]
    return Snapshot(folder=Path(folder), names=names)


def split_revision(name: str) -> tuple[str, str]:
    """Return OWNER/NAME and the revision that may follow it after an @, by default "main"."""
    repo_id, _, revision = name.partition("@")
    return repo_id, revision or "main"


def _explain_refusal(error: Exception, endpoint: str, url: str, revision: str) -> str:
    """Return why the hub refused a request, or "" if it did not answer."""
    from huggingface_hub import errors

    # GatedRepoError is a RepositoryNotFoundError, so it comes first.
    if isinstance(error, errors.GatedRepoError):
        return f"{url} is gated: accept its terms there and set HF_TOKEN (or `hf auth login`)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{url} has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{endpoint} has no repository of this name (check the spelling; a private one needs "
            "HF_TOKEN, or `hf auth login`)"
        )
    if isinstance(error, errors.HFValidationError):
        return f"it is not a hub name, OWNER/NAME ({_format_error(error)})"
    return ""


def _find_in_cache(
    download: Callable[..., str], patterns: Sequence[str], ignore: Sequence[str]
) -> Snapshot | None:
    """Return what `download_snapshot` does from the cache alone; `None` if nothing matches."""
    from huggingface_hub.utils import filter_repo_objects

    try:
        folder = Path(download(local_files_only=True))
    except Exception:
        return None
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    matches = filter_repo_objects(
        names, allow_patterns=list(patterns), ignore_patterns=list(ignore)
    )
    return Snapshot(folder=folder, names=names) if any(matches) else None


def _format_error(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])
