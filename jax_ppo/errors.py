"""User-correctable errors: commands print the message without a traceback."""

import difflib
from collections.abc import Iterable

# Longer messages are cut in the middle: they quote an input of that length.
LONGEST_MESSAGE = 2000


class UserError(ValueError):
    """Invalid input.

    The message names the option, its value, what was expected and, if there is one, the nearest
    valid name. It is one line of printable characters, whatever the input that it quotes.
    """

    def __init__(self, message: str, details: str = "") -> None:
        """Make the error.

        Args:
          message: its unprintable characters are replaced, and line breaks by spaces.
          details: further lines below the message, such as a traceback or commands to copy; only
            their unprintable characters are replaced.
        """
        line = printable_lines(" ".join(message.splitlines()))
        if len(line) > LONGEST_MESSAGE:
            line = f"{line[: LONGEST_MESSAGE // 2]} ... {line[-LONGEST_MESSAGE // 2 :]}"
        self._arguments = (line, printable_lines(details))
        super().__init__("\n".join(text for text in self._arguments if text))

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        """Keep message and details apart on the way between processes."""
        return type(self), self._arguments


def printable_lines(text: str) -> str:
    """Replace the characters that are neither printable nor line breaks.

    A message may quote what a model wrote, and an escape sequence must not reach a terminal.
    """
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or "" if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def shorten(text: str, width: int = 80) -> str:
    """Return the text without surrounding white space, cut to `width` characters, for messages."""
    text = text.strip()
    return text if len(text) <= width else text[:width] + "..."
