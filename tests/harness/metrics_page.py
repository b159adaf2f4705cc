"""Reads the names of metrics in docs/metrics.md, for tests of the page and of runs."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "metrics.md"
_PLACEHOLDERS = {"K": r"\d+", "NAME": r"[\w/@.-]+", "SOURCE": r"[\w/.-]+"}


def documented() -> list[str]:
    """Return the names in the first column of the page's tables, in their order."""
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def unknown(metrics: set[str]) -> set[str]:
    """Return the metrics that no name of the page stands for."""
    patterns = [
        re.sub("|".join(_PLACEHOLDERS), lambda match: _PLACEHOLDERS[match[0]], re.escape(name))
        for name in documented()
    ]
    return {name for name in metrics if not any(re.fullmatch(p, name) for p in patterns)}
