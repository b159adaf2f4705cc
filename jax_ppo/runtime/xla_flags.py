"""The flags in XLA_FLAGS, of which XLA aborts the process at the first that it does not know."""

import os
import shlex
import subprocess
import sys

from jax_ppo.errors import UserError
from jax_ppo.runtime import compat

# The value that has been tried already, for the processes that this one starts.
TRIED = "JAX_PPOTRIED_XLA_FLAGS"


def require_known() -> None:
    """Raise `UserError` if XLA_FLAGS has flags that the installed jaxlib refuses."""
    refused = refused_flags()
    if refused:
        raise UserError(
            f"XLA_FLAGS: the installed jaxlib does not know {shlex.join(refused)}, or not this "
            "value; leave it out, or install another jaxlib"
        )


def refused_flags() -> list[str]:
    """Return the flags at which a child process ends, tried once per value of XLA_FLAGS."""
    flags = os.environ.get("XLA_FLAGS", "")
    if not flags.strip() or os.environ.get(TRIED) == flags:
        return []
    refused: list[str] = []
    if not _parses(flags):
        # Anything else than a flag may be wrong: then jaxlib reports it when it is used.
        refused = [flag for flag in shlex.split(flags) if not _parses(flag)] if _parses("") else []
    if not refused:
        os.environ[TRIED] = flags
    return refused


def _parses(flags: str) -> bool:
    return not subprocess.run(
        [sys.executable, "-c", compat.PARSES_XLA_FLAGS],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
    ).returncode
