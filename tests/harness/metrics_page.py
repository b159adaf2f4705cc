"""Reads the names of metrics in docs/metrics.md, for tests of the page and of runs."""

import pathlib
import re

from jax_ppo.reporting import html_report

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> list[str]:
    """Return the names in the first column of the page's tables, in their order."""
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def unknown(metrics: set[str]) -> set[str]:
    """Return the metrics that no name of the page stands for."""
    return {name for name in metrics if html_report.describe_metric(name) is None}
