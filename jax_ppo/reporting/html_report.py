"""WORKDIR/report.html: curves, responses, options and warnings of a run in one file.

It needs no network: the plotting library is part of the file. `write_comparison` makes such a file
of several runs, from what each has written to its folder.
"""

import dataclasses
import html
import importlib.resources
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_ppo.config.schema import all_options, flatten_options
from jax_ppo.errors import UserError
from jax_ppo.reporting import files
from jax_ppo.reporting.files import collect_versions, replace_file, to_json_value
from jax_ppo.reporting.sinks import read_metrics_csv
from jax_ppo.training.progress import Progress

# Figures of tokens that responses can be colored by; the first one is preferred.
TOKEN_FIGURES = (
    *("advantages", "kl", "values", "rewards", "returns", "entropies"),
    *("logprobs", "reference_logprobs", "sampled_logprobs"),
)
# Responses and steps that the page holds; rollouts/*.jsonl has all that were logged.
SHOWN_STEPS = 12
SHOWN_SAMPLES = 16
MAX_POINTS = 2000  # of a curve; training_metrics.csv has all steps
STATE_FILE = "report.json"  # what the page says of a run and no other file has


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot of metrics over the steps."""

    title: str
    unit: str  # of the vertical axis
    curves: dict[str, str]  # metrics by legend entry; "eval/NAME" is of evaluations


class RunSamples:
    """The responses of a run that the page shows."""

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []
        self._distributions: list[dict[str, Any]] = []

    def add_logged(self, workdir: Path) -> None:
        """Show the responses in a run's folder."""
        for kind, step, records in files.read_samples(workdir):
            self.add(kind, step, records)

    def add(self, kind: str, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Show records of responses; of training, also distributions of scores and lengths.

        `kind` is "training" or "evaluation".
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

    def describe(self) -> dict[str, Any]:
        """Return what the page shows, the newest group first."""
        return {"samples": self._groups[::-1], "distributions": self._distributions}


class HTMLReport:
    """The contents of report.html that a run collects, and the file."""

    def __init__(self, workdir: Path, options: dict[str, Any], panels: Sequence[Panel]) -> None:
        self.samples = RunSamples()
        self._workdir = workdir
        self._options = options
        self._panels = panels

    def write(self, status: str, progress: Progress) -> None:
        """Replace report.html and report.json; `status` says how far the run has come."""
        name = self._options["experiment_name"]
        state = {
            "name": name,
            "status": status,
            "warnings": progress.warning_texts(),
            "changed_options": progress.changed_options,
            "panels": [dataclasses.asdict(panel) for panel in self._panels],
            "environment": _describe_versions(),
        }
        with replace_file(self._workdir / STATE_FILE) as temporary:
            temporary.write_text(json.dumps(state, indent=2) + "\n")
        run = _describe_run(self._workdir, state, self._options, self.samples)
        _write_page(self._workdir / "report.html", name, [run])


def write_comparison(workdirs: Sequence[Path], path: Path) -> None:
    """Write one page about runs; the names of their folders, or else the paths, name them.

    Raise `UserError` if a folder is not a work directory, or the file cannot be written.
    """
    runs = []
    for workdir in workdirs:
        try:
            state = json.loads((workdir / STATE_FILE).read_text())
            options = json.loads((workdir / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{workdir}: expected the work directory of a run, which has {STATE_FILE} and "
                f"config.json after its first step: {error}"
            ) from error
        samples = RunSamples()
        samples.add_logged(workdir)
        run = _describe_run(workdir, state, options, samples)
        is_unique = [other.name for other in workdirs].count(workdir.name) == 1
        runs.append(run | {"name": workdir.name if is_unique else str(workdir)})
    try:
        _write_page(path, ", ".join(run["name"] for run in runs), runs)
    except OSError as error:
        raise UserError(f"--out={path}: cannot be written: {error.strerror}") from error


def write_scores_page(
    path: Path,
    options: dict[str, Any],
    status: str,
    notes: Sequence[str],
    records: Sequence[dict[str, Any]],
) -> None:
    """Write a page of responses whose tokens have figures, without curves.

    `options` are all options, as config.json has them; `status` is one line about the responses,
    `notes` are further ones. The records are as `run.sample_reports` makes them.
    """
    name = options["experiment_name"]
    run = {
        "name": name,
        "status": status,
        "warnings": list(notes),
        "changed_options": [],
        "panels": [],
        "environment": _describe_versions(),
        **_describe_metrics(()),
        "samples": [{"name": "scored", "records": list(records)}],
        "distributions": [],
        "options": _describe_options(options),
    }
    _write_page(path, f"{name}: scores", [run])


def _describe_run(
    workdir: Path, state: dict[str, Any], options: dict[str, Any], samples: RunSamples
) -> dict[str, Any]:
    rows = read_metrics_csv(workdir / "training_metrics.csv")
    return {
        **state,
        **_describe_metrics(rows),
        **samples.describe(),
        "options": _describe_options(options),
    }


def _describe_metrics(rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the steps, and the values of each metric, `None` in steps without it."""
    # Evaluations are rare: a row that has one is kept.
    stride = -(-len(rows) // MAX_POINTS) or 1
    kept = [
        row
        for place, row in enumerate(rows)
        if (len(rows) - 1 - place) % stride == 0
        or any(name.startswith("eval/") and value for name, value in row.items())
    ]
    names = sorted({name for row in kept for name, value in row.items() if value} - {"step"})
    values = {name: [float(row[name]) if row.get(name) else None for row in kept] for name in names}
    # Hours of training: evaluations and pauses between two starts are not counted.
    seconds = itertools.accumulate(float(row.get("seconds/step") or 0.0) for row in rows)
    hours = {row["step"]: total / 3600 for row, total in zip(rows, seconds, strict=True)}
    return {
        "steps": [int(row["step"]) for row in kept],
        "hours": [hours[row["step"]] for row in kept],
        "metrics": values,
    }


def _write_page(path: Path, title: str, runs: Sequence[dict[str, Any]]) -> None:
    data = {"title": title, "runs": runs, "figures": TOKEN_FIGURES}
    # Escaped, so that no text of a model can end the script element.
    text = json.dumps(to_json_value(data), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(title),
        "DATA": text,
        "PLOTLY": _read_resource("plotly", "package_data/plotly.min.js"),
    }
    template = _read_resource("jax_ppo.reporting", "report_template.html")
    page = re.sub("@@([A-Z]+)@@", lambda match: parts[match[1]], template)
    with replace_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")


def _describe_options(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the table of options, changed ones first."""
    table = []
    values = flatten_options(options)
    for option in all_options():
        # An option that is younger than the run had its default.
        value = values.get(option.name, option.default)
        texts = ["unset" if x is None else str(x) for x in (value, option.default)]
        cells = [option.name, *texts, option.facts.doc]
        table.append({"cells": cells, "changed": value != option.default})
    return sorted(table, key=lambda row: not row["changed"])


def _describe_versions() -> list[dict[str, Any]]:
    return [{"cells": [name, str(value)]} for name, value in collect_versions().items()]


def _read_resource(package: str, name: str) -> str:
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
