"""What goes wrong with data, said so that the reader knows what to change."""

import difflib


class DataError(ValueError):
    """Data that can not be used. The message names the option, what was given and what was expected."""


def did_you_mean(given: str, known) -> str:
    """" Did you mean 'x'?" with the nearest of the known names, or "" where none is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
