"""User-correctable errors: commands print the message without a traceback."""

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator

# Longer messages, which quote a long input, are cut in the middle.
LONGEST_MESSAGE = 2000


class UserError(ValueError):
    """Invalid input.

    The message names the option, its value, the expectation and, if there is one, the nearest valid
    name. It is one line of printable characters, whatever input it quotes.
    """

    def __init__(self, message: str, details: str = "") -> None:
        """Replace unprintable characters; line breaks of the message become spaces.

        `details` are further lines below it, such as a traceback or commands to copy.
        """
        line = printable_lines(" ".join(message.splitlines()))
        if len(line) > LONGEST_MESSAGE:
            line = f"{line[: LONGEST_MESSAGE // 2]} ... {line[-LONGEST_MESSAGE // 2 :]}"
        self._arguments = (line, printable_lines(details))
        super().__init__("\n".join(text for text in self._arguments if text))

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        """Pickle message and details separately, to pass them between processes."""
        return type(self), self._arguments


def printable_lines(text: str) -> str:
    """Replace the characters that are neither printable nor line breaks.

    A message may quote text of a model, and an escape sequence must not reach a terminal.
    """
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Exit with one line if the block raises `UserError`; print any text, as `print_any_text`."""
    print_any_text()
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")


def print_any_text() -> None:
    """Let this process print "?" for a character that the encoding of its output lacks.

    Otherwise a model's response, or a character of our output, would end a run under LC_ALL=C.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # notebooks have other streams
        if reconfigure is not None:
            # A stream whose descriptor was a file and is a pipe by now cannot be sought.
            with contextlib.suppress(OSError):
                reconfigure(errors="replace")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or "" if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def shorten(text: str, width: int = 80) -> str:
    """Return the text without surrounding white space, cut to `width` characters, for messages."""
    text = text.strip()
    return text if len(text) <= width else text[:width] + "..."


def counted(number: int, noun: str) -> str:
    """Return "1 prompt", "2 prompts"."""
    return f"{number} {noun}{'s' * (number != 1)}"
