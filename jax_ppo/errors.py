"""User-correctable errors: commands print the message without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Invalid input.

    The message names the option, its value, what was expected and, if there is one, the nearest
    valid name.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or "" if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def shorten(text: str, width: int = 80) -> str:
    """Return the text without surrounding white space, cut to `width` characters, for messages."""
    text = text.strip()
    return text if len(text) <= width else text[:width] + "..."
