"""docs/troubleshooting.md names every diagnostic, and only metrics that exist."""

import re

import pytest

import doc_pages
import metrics_page
from jax_ppo.run.diagnostics import DIAGNOSTICS

PAGE = doc_pages.ROOT / "docs" / "troubleshooting.md"
SECTIONS = PAGE.read_text().split("\n## ")


@pytest.mark.parametrize("name", [diagnostic.name for diagnostic in DIAGNOSTICS])
def test_each_diagnostic_stands_in_the_table_and_in_a_section_that_says_what_to_change(name):
    table, *sections = SECTIONS
    (row,) = [line for line in table.splitlines() if f"`{name}`" in line]
    (anchor,) = re.findall(r"\(#([\w-]+)\)", row)
    by_anchor = {
        section.partition("\n")[0].lower().replace(" ", "-"): section for section in sections
    }
    assert f"`{name}`" in by_anchor[anchor]


def test_the_table_names_no_warning_that_does_not_exist():
    rows = [line.split("|") for line in SECTIONS[0].splitlines() if "(#" in line]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[3])}
    assert named == {diagnostic.name for diagnostic in DIAGNOSTICS}


def test_the_table_of_reports_has_each_diagnostic_under_its_name():
    _, table = (doc_pages.ROOT / "docs" / "reports.md").read_text().split("| warning |")
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(names) == sorted(diagnostic.name for diagnostic in DIAGNOSTICS)


def test_metrics_that_the_page_names_are_logged():
    named = set(re.findall(r"`([a-z_]+/[a-z_]+)`", PAGE.read_text()))
    assert len(named) > 20
    assert metrics_page.unknown(named) == set()
