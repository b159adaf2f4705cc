"""Local paths that options name, and the names in a work directory."""

from pathlib import Path

from jax_ppo.errors import UserError, shorten

CHECKPOINTS = "checkpoints"  # the folder of checkpoints in a work directory


def expand_local_path(path: str, option: str) -> Path:
    """Return the path in an option, which need not exist, with `~` and `~USER` replaced.

    Raise `UserError` if there is no such user, or if the operating system refuses to look the path
    up, for example because it is too long. `Path.is_file` and `is_dir` do not raise for the result.
    """
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{option}={shorten(path)!r}: not a usable path: {reason}") from error
    return expanded
