"""Files of the Hugging Face hub. Without a network the cache is used, or the error comes within seconds."""

from collections.abc import Sequence
from pathlib import Path

from jax_ppo.errors import UserError

TIMEOUT_SECONDS = 10.0  # seconds that the hub may take to answer

_KINDS = {
    "model": ("model", ""),
    "dataset": ("data set", "datasets/"),
}  # in messages, and before the name in a URL


class HubError(UserError):
    """The hub did not give a repository. `reason` says why and names no option, for a caller with its own message."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


def download_snapshot(
    name: str,
    patterns: Sequence[str],
    option: str,
    *,
    repo_type: str = "model",
    ignore: Sequence[str] = (),
) -> tuple[Path, list[str]]:
    """Downloads the files of a repository that match, to the hub's cache.

    The hub is asked once whether it is there, with a time limit and no retries, before anything that would retry begins.
    Where it is silent, what the cache holds counts. The hub's own environment variables apply (HF_TOKEN, HF_ENDPOINT,
    HF_HOME, HF_HUB_OFFLINE).

    Args:
      name: OWNER/NAME, or OWNER/NAME@REVISION: a branch, tag or commit in the place of main.
      patterns: file names, with * for any part, slashes too.
      option: for the message.
      repo_type: "model" or "dataset".
      ignore: patterns of what is left out of that.

    Returns:
      The folder in the cache, and the names of all files of the repository (with no network: of those in the cache,
      of which at least one matches).

    Raises:
      HubError: gated, no such revision or repository, no name of one, a download that broke off, or no network and
        nothing in the cache.
    """
    kind, prefix = _KINDS[repo_type]
    repo_id, revision = split_revision(name)
    asked, endpoint = False, "the Hugging Face hub"
    wanted = {
        "repo_type": repo_type,
        "revision": revision,
        "allow_patterns": list(patterns),
        "ignore_patterns": list(ignore),
    }
    try:
        import huggingface_hub  # late: local files need neither it nor the network

        api = huggingface_hub.HfApi()
        endpoint = api.endpoint
        # The download gets the revision's name, not the commit that this answers, or the cache would not know the name
        # when there is no network.
        info = api.repo_info(
            repo_id, repo_type=repo_type, revision=revision, timeout=TIMEOUT_SECONDS
        )
        asked = True
        folder = Path(
            huggingface_hub.snapshot_download(repo_id, etag_timeout=TIMEOUT_SECONDS, **wanted)
        )
        return folder, [file.rfilename for file in info.siblings or ()]
    except (
        Exception
    ) as error:  # among them whatever the HTTP library of the day raises when there is no network
        reason = _refusal(error, endpoint, f"{endpoint}/{prefix}{repo_id}", revision)
        if not reason and asked:
            reason = f"downloading it from {endpoint} failed ({_brief(error)})"
        if not reason:
            if cached := _cached(repo_id, wanted):
                return cached
            reason = f"{endpoint} cannot be reached ({_brief(error)}) and its cache has no copy"
        raise HubError(
            f"{option}: the {kind} {repo_id} at revision {revision} cannot be had: {reason}. Give a local path in {option}, "
            "or a name that the hub has; or run once with a network (`hf download` fills the cache; HF_HOME says where it "
            "is)",
            reason,
        ) from error


def split_revision(name: str) -> tuple[str, str]:
    """OWNER/NAME and the revision that may stand behind it, after an @."""
    repo_id, _, revision = name.partition("@")
    return repo_id, revision or "main"


def _refusal(error, endpoint, url, revision):
    """Why the hub was not asked or said no; empty where it was silent."""
    if isinstance(error, ImportError):
        return f"the hub needs the package huggingface_hub ({error}); `pip install huggingface_hub`"
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):  # before what it is a kind of
        return f"{url} is gated: accept its terms there and set HF_TOKEN (or `hf auth login`)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{url} has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{endpoint} has no repository of this name (check the spelling; a private one needs HF_TOKEN, or "
            "`hf auth login`)"
        )
    if isinstance(error, errors.HFValidationError):
        return f"it is no hub name, OWNER/NAME ({_brief(error)})"
    return ""


def _cached(repo_id, wanted):
    """The same as `download_snapshot` returns, from the cache alone; None where no file that is wanted is there."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    try:
        folder = Path(huggingface_hub.snapshot_download(repo_id, local_files_only=True, **wanted))
    except Exception:
        return None
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    patterns = {key: wanted[key] for key in ("allow_patterns", "ignore_patterns")}
    return (folder, names) if any(filter_repo_objects(names, **patterns)) else None


def _brief(error):
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])
