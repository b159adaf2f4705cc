"""Hide messages of Orbax and its libraries that repeat an error already reported."""

import logging
import sys

from jax_ppo.storage import disk_space

_show_uncaught = sys.unraisablehook


def hide_repeated_errors() -> None:
    """Filter the logs and the uncaught errors of Orbax, asyncio and tensorstore."""
    for library in ("absl", "asyncio"):
        logging.getLogger(library).addFilter(_is_worth_showing)
    sys.unraisablehook = _show_unless_of_closed_loop


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """Return whether to show a log record of Orbax.

    A full disk is reported by `Checkpointer`. Orbax's threads fail if the command ends before them,
    after an error that has been reported. Directories of other runs are read only on purpose.
    """
    error = record.exc_info[1] if record.exc_info else None
    text = record.getMessage()
    is_of_full_disk = disk_space.is_disk_full(error) or disk_space.is_disk_full(Exception(text))
    expected = ("cannot schedule new futures", "Given directory is read only")
    return not is_of_full_disk and not any(part in text for part in expected)


def _show_unless_of_closed_loop(report: "sys.UnraisableHookArgs") -> None:
    """Show an error that no caller can catch, unless it follows from a save that failed.

    After the first error tensorstore reports here, from its threads, each array that was still
    being written: that nothing waits for it any more.
    """
    if str(report.exc_value) != "Event loop is closed":
        _show_uncaught(report)
