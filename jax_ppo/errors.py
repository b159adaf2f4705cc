"""User-correctable errors: commands print the message without a traceback."""

import codecs
import contextlib
import difflib
import functools
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LONGEST_MESSAGE = 2000  # longer ones, which quote a long input, are cut in the middle
closed_outputs: list[str] = []  # outputs whose reader has gone, until a run reports it
_ASCII_FORMS = {"→": "->", "…": "...", "⏎": "|", "·": "."}  # of characters in our own lines


class UserError(ValueError):
    """Invalid input.

    The message names the option, its value, the expectation and, if there is one, the nearest valid
    name. It is one line of printable characters, whatever input it quotes.
    """

    def __init__(self, message: str, details: str = "") -> None:
        """Make the message one printable line; `details` follow it, such as a traceback."""
        line = printable_lines(" ".join(message.splitlines()))
        if len(line) > LONGEST_MESSAGE:
            line = f"{line[: LONGEST_MESSAGE // 2]} ... {line[-LONGEST_MESSAGE // 2 :]}"
        self._arguments = (line, printable_lines(details))
        super().__init__("\n".join(text for text in self._arguments if text))

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        """Pickle message and details separately, to pass them between processes."""
        return type(self), self._arguments


def printable_lines(text: str) -> str:
    """Replace what is neither printable nor a line break, such as a terminal's escape sequence."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Exit with one line on `UserError` or Ctrl-C; print any text, and readable warnings."""
    print_any_text()
    # Before a library does it: with absl's format a warning would begin with the name of a module.
    logging.addLevelName(logging.WARNING, "warning")
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        sys.exit(130)


def print_any_text() -> None:
    """Keep output errors from ending the process.

    Print an ASCII form or "?" for characters that the output's encoding lacks, as under LC_ALL=C;
    stop printing to an output whose reader has gone (`| head`); drop what does not fit on a full
    disk, with a line on the standard error.
    """
    codecs.register_error("ascii_forms", _replace_character)
    for stream in (sys.stdout, sys.stderr):
        # Notebooks have other streams.
        if not isinstance(stream, io.TextIOWrapper) or "flush" in vars(stream):
            continue
        # A stream whose descriptor was a file and is a pipe by now cannot be sought.
        with contextlib.suppress(OSError):
            stream.reconfigure(errors="ascii_forms")
        for name in ("write", "flush"):
            setattr(stream, name, _without_error(stream, getattr(stream, name)))


def _replace_character(error: Any) -> tuple[str, int]:
    return _ASCII_FORMS.get(error.object[error.start], "?"), error.start + 1


def _without_error(
    stream: io.TextIOWrapper, method: Callable[..., object]
) -> Callable[..., object]:
    """Return a method of a stream that raises no error for a closed pipe or a full disk."""

    def call(*arguments: str) -> object:
        try:
            return method(*arguments)
        except BrokenPipeError:  # also at exit, when Python flushes
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            closed_outputs.append(str(stream.name))
        except OSError as error:
            if stream is not sys.stderr:
                _report_lost_output(str(error))
        return None

    return call


@functools.cache
def _report_lost_output(cause: str) -> None:
    print(f"warning: the standard output is lost: {cause}", file=sys.stderr)


@contextlib.contextmanager
def named_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in an `OSError` of the block, which that of a write does not do."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name closest to `name`, in upper or lower case, or "" if none is close."""
    by_lower = {other.lower(): other for other in known}
    return next((by_lower[x] for x in difflib.get_close_matches(name.lower(), by_lower, n=1)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or "" if none is close."""
    nearest = nearest_name(name, known)
    return f" Did you mean {nearest!r}?" if nearest else ""


def shorten(text: str, width: int = 80) -> str:
    """Return the text without surrounding white space, cut to `width` characters, for messages."""
    text = text.strip()
    return text if len(text) <= width else text[:width] + "..."


def counted(number: int, noun: str) -> str:
    """Return "1 prompt", "2 prompts"."""
    return f"{number} {noun}{'s' * (number != 1)}"
