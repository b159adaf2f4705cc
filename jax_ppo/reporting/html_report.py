"""WORKDIR/report.html: curves, responses, options and warnings of a run in one file.

It needs no network: the plotting library is part of the file.
"""

import html
import importlib.resources
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_ppo.config.schema import Config, all_options
from jax_ppo.reporting import sample_files
from jax_ppo.reporting.atomic import replace_file
from jax_ppo.reporting.curves import Panel, panel_points
from jax_ppo.reporting.sinks import read_metrics_csv
from jax_ppo.reporting.summary import collect_versions, to_json_value
from jax_ppo.training.progress import Progress

# Figures of tokens that responses can be colored by; the first one is shown at the beginning.
TOKEN_FIGURES = ("advantages", "kl", "values", "returns", "logprobs", "sampled_logprobs")
# Responses and steps that the page holds; rollouts/*.jsonl has all that were logged.
SHOWN_STEPS = 12
SHOWN_SAMPLES = 16
PHASE_PREFIX = "seconds/"


class HTMLReport:
    """The contents of report.html that a run collects, and the file."""

    def __init__(self, workdir: Path, config: Config, panels: Sequence[Panel]) -> None:
        """Start a report.

        Args:
          workdir: the run's folder.
          config: all options.
          panels: the plots of metrics.
        """
        self._workdir = workdir
        self._config = config
        self._panels = panels
        self._groups: list[dict[str, Any]] = []
        self._distributions: list[dict[str, Any]] = []

    def add_logged_samples(self) -> None:
        """Show the responses in the run's folder, which were logged before an interruption."""
        for kind, step, records in sample_files.read_samples(self._workdir):
            self.add_samples(kind, step, records)

    def add_samples(self, kind: str, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Show responses; the scores and lengths of training are shown as distributions too.

        Args:
          kind: "training", "evaluation" or "evaluation_greedy".
          step: completed steps.
          records: as `ppo.sample_records` makes them.
        """
        if not records:
            return
        shown_records = list(records[:SHOWN_SAMPLES])
        self._groups.append({"name": f"{step} ({kind})", "records": shown_records})
        # The first group is kept: it shows how the run started.
        del self._groups[1 : max(1, len(self._groups) - SHOWN_STEPS)]
        # Evaluations are not comparable: they sample other prompts with other settings.
        if kind == "training":
            self._distributions.append(
                {
                    "step": step,
                    "score": [record["score"] for record in records],
                    "length": [len(record["response_ids"]) for record in records],
                }
            )

    def write(self, status: str, progress: Progress) -> None:
        """Write the file, which is replaced atomically.

        Args:
          status: one line about how far the run has come.
          progress: its evaluations, and the warnings and changed options, which are shown at the
            top.
        """
        evaluations = progress.evaluations
        rows = read_metrics_csv(self._workdir / "training_metrics.csv")
        data = {
            "title": self._config.experiment_name,
            "status": status,
            "warnings": progress.warning_texts(),
            "changed_options": progress.changed_options,
            "panels": [_describe_panel(panel, rows, evaluations) for panel in self._panels],
            "phases": _describe_phases(rows),
            "distributions": self._distributions,
            "samples": self._groups[::-1],
            "figures": TOKEN_FIGURES,
            "options": _describe_options(self._config),
            "environment": [
                {"cells": [name, str(value)]} for name, value in collect_versions().items()
            ],
        }
        # Escaped, so that no text of a model can end the script element.
        text = json.dumps(to_json_value(data), allow_nan=False).replace("<", "\\u003c")
        parts = {
            "TITLE": html.escape(self._config.experiment_name),
            "DATA": text,
            "PLOTLY": _read_resource("plotly", "package_data/plotly.min.js"),
        }
        template = _read_resource("jax_ppo.reporting", "report_template.html")
        page = re.sub("@@([A-Z]+)@@", lambda match: parts[match[1]], template)
        with replace_file(self._workdir / "report.html") as temporary:
            temporary.write_text(page, encoding="utf-8")


def _describe_panel(
    panel: Panel, rows: Sequence[dict[str, str]], evaluations: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return a plot with its points; curves without any are left out."""
    curves = [
        {
            "legend": curve.legend,
            "is_evaluation": curve.is_evaluation,
            "steps": [step for step, _ in curve.points],
            "values": [value for _, value in curve.points],
        }
        for curve in panel_points(panel, rows, evaluations)
    ]
    return {"title": panel.title, "unit": panel.unit, "curves": curves}


def _describe_phases(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the seconds of each phase by step."""
    names = sorted({name for row in rows for name in row if name.startswith(PHASE_PREFIX)})
    return [
        {
            "legend": name.removeprefix(PHASE_PREFIX),
            "steps": [int(row["step"]) for row in rows if row.get("seconds/step")],
            # A phase that did not occur in a step took no time.
            "values": [float(row.get(name) or 0.0) for row in rows if row.get("seconds/step")],
        }
        for name in names
        if name != "seconds/step"
    ]


def _describe_options(config: Config) -> list[dict[str, Any]]:
    """Return the rows of the table of options, changed ones first."""
    table = []
    for option in all_options():
        value: Any = config
        for part in option.name.split("."):
            value = getattr(value, part)
        cells = [option.name, _value_text(value), _value_text(option.default), option.facts.doc]
        table.append({"cells": cells, "changed": value != option.default})
    return sorted(table, key=lambda row: not row["changed"])


def _value_text(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value)


def _read_resource(package: str, name: str) -> str:
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
