"""Mistakes that the user can mend: the message says all, and the command shows it without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input. The message names the option, its value, what was expected and, where there is one, the nearest name."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?" with the nearest of the known names, or "" where none is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
