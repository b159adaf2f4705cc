"""Files of the Hugging Face hub. Without a network the cache is used, or the error comes within seconds."""

from pathlib import Path

from jax_ppo.errors import UserError, did_you_mean

TIMEOUT = 10.0  # seconds that the hub may take to answer


def download_file(repo_id: str, path: str, option: str) -> Path:
    """The local path of one file of a data set repository, downloaded unless it is in the cache already.

    Raises:
      UserError: no such repository or file, or no network and not in the cache.
    """
    folder, names = download(repo_id, "dataset", "main", [path], option)
    if path not in names:
        raise UserError(f"{option}: the data set {repo_id} on the hub has no file {path}.{did_you_mean(path, names)}")
    if not (folder / path).is_file():
        raise _unreachable(f"{repo_id}/{path}", "data set file", option, "it is not in the cache")
    return folder / path


def download(repo_id: str, repo_type: str, revision: str, patterns: list[str], option: str) -> tuple[Path, list[str]]:
    """Downloads the files of a repository that match, to the hub's cache.

    The hub is asked once whether it is there, with a time-out and no retries, before anything that would retry begins.

    Args:
      repo_id: OWNER/NAME.
      repo_type: "model" or "dataset".
      revision: branch, tag or commit.
      patterns: file names, with * for any part.
      option: for the messages.

    Returns:
      The folder in the cache, and the names of all files of the repository (with no network: of those in the cache).

    Raises:
      UserError: no such repository or revision, no right to read it, or no network and not in the cache.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise UserError(f"{option}={repo_id!r}: needs the package huggingface_hub ({error}); "
                        "`pip install huggingface_hub`") from error
    kind = {"model": "model", "dataset": "data set"}[repo_type]
    wanted = {"repo_id": repo_id, "repo_type": repo_type, "allow_patterns": patterns}
    try:
        info = huggingface_hub.HfApi().repo_info(repo_id, repo_type=repo_type, revision=revision, timeout=TIMEOUT)
        names = [file.rfilename for file in info.siblings or ()]
        return Path(huggingface_hub.snapshot_download(revision=revision, etag_timeout=TIMEOUT, **wanted)), names
    except errors.HFValidationError as error:
        raise UserError(f"{option}: {repo_id!r} is no name of a {kind} on the hub (OWNER/NAME): {error}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise UserError(f"{option}: the hub has no {kind} {repo_id!r} at revision {revision!r}, or it may not be read "
                        "without logging in (`hf auth login`, or HF_TOKEN). Check the spelling") from error
    except Exception as error:
        try:
            folder = Path(huggingface_hub.snapshot_download(revision=revision, local_files_only=True, **wanted))
        except Exception:
            raise _unreachable(f"{repo_id} at revision {revision}", kind, option, _first_line(error)) from error
        return folder, [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _unreachable(what, kind, option, reason):
    return UserError(f"{option}: the {kind} {what} is not on this machine and the Hugging Face hub can not be reached "
                     f"({reason}). Give a local path in {option}, or run once with a network (`hf download` fills the "
                     "cache; HF_HOME says where it is)")


def _first_line(error):
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
