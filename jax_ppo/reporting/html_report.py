"""WORKDIR/report.html: outcome, curves, responses, options and warnings of a run in one file.

It needs no network: the plotting library is part of the file. `write_comparison` makes such a file
of several runs, from what each has written to its folder.
"""

import collections
import dataclasses
import functools
import html
import importlib.resources
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_ppo.config.config_files import shipped_folder
from jax_ppo.config.schema import all_options, flatten_options
from jax_ppo.errors import UserError
from jax_ppo.reporting import files
from jax_ppo.reporting.console import format_duration
from jax_ppo.reporting.files import collect_versions, replace_file, to_json_value
from jax_ppo.reporting.sinks import read_metrics_csv
from jax_ppo.training.progress import Progress

# Figures of tokens that responses can be colored by, and whether their signs matter; the first one
# is preferred.
TOKEN_FIGURES = {"advantages": True, "kl": True, "values": False, "rewards": True} | dict.fromkeys(
    ("returns", "entropies", "logprobs", "reference_logprobs", "sampled_logprobs"), False
)
# Responses and steps that the page holds; rollouts/*.jsonl has all that were logged.
SHOWN_STEPS = 12
SHOWN_SAMPLES = 16
MAX_POINTS = 2000  # of a curve; training_metrics.csv has all steps
STATE_FILE = "report.json"  # what the page says of a run and no other file has


def _known(better: Callable[..., Any]) -> Callable[..., Any]:
    """Return `max` or `min` without the points that are NaN, unless all are."""

    def choose(points: Sequence[Any], key: Callable[[Any], float] = float) -> Any:
        return better([x for x in points if not math.isnan(key(x))] or points, key=key)

    return choose


# What a run is judged by, the first metric that it has: its name, and what chooses the best point.
OUTCOMES = {
    "eval/accuracy": ("accuracy", _known(max)),
    "eval/reward_mean": ("reward", _known(max)),
    "eval/loss": ("loss", _known(min)),
    "eval/critic/explained_variance": ("explained variance", _known(max)),
    "reward/mean": ("training reward", _known(max)),
    "train/loss": ("training loss", _known(min)),
    "critic/explained_variance": ("training explained variance", _known(max)),
}
_PLACEHOLDERS = {"K": r"\d+", "NAME": r"[\w/@.-]+", "SOURCE": r"[\w/.-]+"}
_CRITIC_PARTS = re.compile(r"eval/critic/\w+_(tenth|bin)_\d+")
_BOUNDS = ("_low", "_high")  # of the interval of a metric
# Options in which runs of one configuration may differ.
_OF_ONE_RUN = ("seed", "experiment_name", "data.date")

Run = dict[str, Any]  # what the page holds of a run


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot of metrics over the steps."""

    title: str
    unit: str  # of the vertical axis
    curves: dict[str, str]  # metrics by legend entry; "eval/NAME" is of evaluations


class HTMLReport:
    """The contents of report.html that a run collects, and the file."""

    def __init__(self, workdir: Path, options: dict[str, Any], panels: Sequence[Panel]) -> None:
        self._workdir = workdir
        self._options = options
        self._panels = panels
        self._groups: list[dict[str, Any]] = []

    def add_logged_samples(self) -> None:
        """Show the responses in the run's folder."""
        for kind, step, records in files.read_samples(self._workdir):
            self.add_samples(kind, step, records)

    def add_samples(self, kind: str, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Show records of responses; `kind` is "training" or "evaluation"."""
        if records:
            self._groups.append(_make_group(f"{step} ({kind})", records[:SHOWN_SAMPLES]))
            # The first group is kept: it shows how the run started.
            del self._groups[1 : max(1, len(self._groups) - SHOWN_STEPS)]

    def write(self, status: str, progress: Progress) -> None:
        """Replace report.html and report.json; `status` says how far the run has come."""
        state = self.describe_state(status, progress.warning_texts(), progress.changed_options)
        with replace_file(self._workdir / STATE_FILE) as temporary:
            temporary.write_text(json.dumps(state, indent=2) + "\n")
        _write_page(self._workdir / "report.html", state["name"], [self.describe(state)])

    def write_scores(
        self, status: str, notes: Sequence[str], records: Sequence[dict[str, Any]]
    ) -> None:
        """Write a page without curves of responses whose tokens have figures, and of the notes."""
        self._groups.append(_make_group("scored", records))
        state = self.describe_state(status, notes)
        title = f"{state['name']}: scores"
        _write_page(self._workdir / "report.html", title, [self.describe(state)])

    def describe_state(
        self, status: str, warnings: Sequence[str], changed_options: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return what the page says of a run and no other file has."""
        return {
            "name": self._options["experiment_name"],
            "status": status,
            "warnings": list(warnings),
            "changed_options": list(changed_options),
            "panels": [dataclasses.asdict(panel) for panel in self._panels],
            "environment": [{"cells": [x, str(y)]} for x, y in collect_versions().items()],
        }

    def describe(self, state: dict[str, Any]) -> Run:
        """Return what the page holds of a run in this state, with the outcome for its top."""
        values = flatten_options(self._options)
        run = {
            **state,
            **_describe_metrics(read_metrics_csv(self._workdir / "training_metrics.csv")),
            "environment": dict(row["cells"] for row in state["environment"]),
            "samples": self._groups[::-1],
            # An option that is younger than the run had its default.
            "options": {x.name: _as_text(values.get(x.name, x.default)) for x in all_options()},
        }
        headline, facts = "", []
        if metric := _find_outcome([run]):
            name, better = OUTCOMES[metric]
            points, interval = _find_points(run, metric)
            ends = [f"{value:.3g}" for value, _, _ in (points[0], points[-1])][-len(points) :]
            headline = f"{name} {' → '.join(ends)}{interval}"
            best, step, _ = better(points, key=lambda point: point[0])
            facts = [f"best {best:.3g} after step {step}"] * (len(points) > 1)
        if run["tokens"]:
            seconds = run["hours"][-1] * 3600
            facts += [f"{format_duration(seconds)} of training"]
            facts += [f"{run['tokens'] / seconds:,.0f} tokens per second"]
        facts += [" × ".join(run["environment"].get(f"device_{x}", "?") for x in ("count", "kind"))]
        return run | {"headline": headline, "facts": facts}


def write_comparison(workdirs: Sequence[Path], path: Path) -> None:
    """Write one page about runs; the names of their folders, or else the paths, name them.

    Raise `UserError` if a folder is not a work directory, or the file cannot be written.
    """
    runs = []
    names = [workdir.resolve().name for workdir in workdirs]  # that of "." is empty
    for workdir, name in zip(workdirs, names, strict=True):
        try:
            state = json.loads((workdir / STATE_FILE).read_text())
            options = json.loads((workdir / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{workdir}: expected the work directory of a run, which has {STATE_FILE} and "
                f"config.json after its first step: {error}"
            ) from error
        report = HTMLReport(workdir, options, ())
        report.add_logged_samples()
        is_unique = names.count(name) == 1
        runs.append(report.describe(state | {"name": name if is_unique else str(workdir)}))
    try:
        _write_page(path, ", ".join(run["name"] for run in runs), runs)
    except OSError as error:
        raise UserError(f"--out={path}: cannot be written: {error.strerror}") from error


def _make_group(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return records that the page shows together, with the ends of each figure's color scale.

    A signed figure ends at the 95th percentile of its magnitudes, without zeros, and another at its
    extremes.
    """
    scales = {}
    for figure, is_signed in TOKEN_FIGURES.items():
        values = np.array([x for record in records for x in record.get(figure) or ()], float)
        values = values[np.isfinite(values)]
        if values.any():
            size = np.percentile(np.abs(values[values != 0]), 95)
            low, high = (-size, size) if is_signed else (values.min(), values.max())
            scales[figure] = {"low": low, "high": high, "signed": is_signed}
    return {"name": name, "records": list(records), "scales": scales}


@functools.cache
def read_metrics_table() -> dict[str, tuple[str, str]]:
    """Return unit and meaning of each metric by the name that docs/metrics.md has for it."""
    path = shipped_folder("docs") / "metrics.md"
    table: dict[str, tuple[str, str]] = {}
    # A copy of the package alone has no pages: its reports lack the meanings.
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("| `"):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line)
            _, names, *facts = re.split(r" *(?<!\\)\| *", plain)
            unit, meaning = (re.sub(r"[`\\]", "", x) for x in facts[:2])
            table |= dict.fromkeys(re.findall("`([^`]+)`", names), (unit, meaning))
    return table


@functools.cache
def describe_metric(name: str) -> tuple[str, str] | None:
    """Return unit and meaning of a metric; `None` if docs/metrics.md does not have it."""
    # The name itself precedes those that stand for others.
    for known, facts in sorted(read_metrics_table().items(), key=lambda item: item[0] != name):
        pattern = re.sub("[A-Z]+", lambda word: _PLACEHOLDERS[word[0]], re.escape(known))
        if re.fullmatch(pattern, name):
            return facts
    return None


def _describe_metrics(rows: Sequence[dict[str, str]]) -> Run:
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
    seconds = [float(row.get("seconds/step") or 0.0) for row in rows]
    speeds = [float(row.get("tokens_per_second") or 0.0) for row in rows]
    totals = itertools.accumulate(seconds)
    hours = {row["step"]: total / 3600 for row, total in zip(rows, totals, strict=True)}
    # The newest evaluation of the critic, in each of ten parts.
    critic = collections.defaultdict(list)
    for name in sorted(filter(_CRITIC_PARTS.fullmatch, names), key=lambda x: (len(x), x)):
        figure = name.removeprefix("eval/critic/").rpartition("_")[0]
        critic[figure].append([x for x in values[name] if x is not None][-1])
    return {
        "steps": [int(row["step"]) for row in kept],
        "hours": [hours[row["step"]] for row in kept],
        "tokens": float(np.dot(seconds, speeds)),
        "metrics": values,
        "critic": critic,
    }


def known_outcomes(last_rows: Mapping[str, int], trains_critic: bool) -> list[str]:
    """Return those of a run's metrics that it may be judged by, the preferred one first.

    `last_rows` has the last row of each metric: of evaluations, the newest one counts.
    """
    found = [x for x in OUTCOMES if x in last_rows and trains_critic == ("critic/" in x)]
    newest = max((last_rows[x] for x in found if x.startswith("eval/")), default=0)
    return [x for x in found if last_rows[x] == newest or not x.startswith("eval/")]


def _find_outcome(runs: Sequence[Run]) -> str | None:
    """Return the metric that all runs are judged by, or most of them; `None` without one."""
    counts = collections.Counter[str]()
    for run in runs:
        trains_critic = run["options"]["trainer.critic_only"] == "True"
        last_rows = {
            name: row
            for name, values in run["metrics"].items()
            for row, value in enumerate(values)
            if value is not None
        }
        counts.update(known_outcomes(last_rows, trains_critic))
    return max(OUTCOMES, key=lambda name: counts[name]) if counts else None


def _find_points(run: Run, metric: str) -> tuple[list[tuple[float, int, float]], str]:
    """Return value, step and seconds of training of each row with the metric; the last interval."""
    columns = [run["metrics"].get(metric + end, []) for end in ("", *_BOUNDS)]
    rows = zip(columns[0], run["steps"], run["hours"], strict=bool(columns[0]))
    points = [(value, step, hours * 3600) for value, step, hours in rows if value is not None]
    ends = [f"{[x for x in column if x is not None][-1]:.3g}" for column in columns[1:] if column]
    between = " to " if "-" in "".join(ends) else "–"
    return points, f" (95\u00a0% {between.join(ends)})" if ends else ""


def _compare_runs(runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows of a table of the runs' outcomes, the header first.

    The level is 90 % of the way from the first figure to the best of all runs.
    """
    metric = _find_outcome(runs)
    name, better = OUTCOMES.get(metric or "", ("", max))
    found = [_find_points(run, metric or "") for run in runs]
    level = 0.0
    if values := [x for points, _ in found for x, _, _ in points if not math.isnan(x)]:
        level = float(f"{values[0] + 0.9 * (better(values) - values[0]):.2g}")
    marks = [f"steps to {level:g}", f"time to {level:g}"]
    table = [["run", f"first {name}", "best", "last", *marks, "tokens", "state"]]
    for run, (points, interval) in zip(runs, found, strict=True):
        cells = ["–"] * 5
        if points:
            best, step, _ = better(points, key=lambda point: point[0])
            cells[:2] = [f"{points[0][0]:.3g}", f"{best:.3g} after step {step}"]
            cells[2] = f"{points[-1][0]:.3g}{interval}"
        reached = [point for point in points if better((point[0], level)) == point[0]]
        for _, step, seconds in reached[:1]:
            cells[3:] = [str(step), format_duration(seconds)]
        table.append([run["name"], *cells, f"{run['tokens']:,.0f}", run["status"]])
    return table


def _average_seeds(runs: Sequence[Run]) -> list[Run | int]:
    """Return the mean of the runs of each configuration, or the place of its one run."""
    groups = collections.defaultdict(list)
    for place, run in enumerate(runs):
        groups[str(run["options"] | dict.fromkeys(_OF_ONE_RUN))].append(place)
    return [
        _average_runs([runs[place] for place in places]) if len(places) > 1 else places[0]
        for places in groups.values()
    ]


def _average_runs(runs: Sequence[Run]) -> Run:
    """Return the means of runs in the steps that all have, with the extremes as their bounds."""
    steps = sorted(set.intersection(*(set(run["steps"]) for run in runs)))
    places = [[run["steps"].index(step) for step in steps] for run in runs]

    def gather(columns: list[list]) -> np.ndarray:
        rows = [[x[place] for place in at] for x, at in zip(columns, places, strict=True)]
        return np.array(rows, float)  # [runs, steps], `None` as NaN

    metrics: dict[str, np.ndarray] = {}
    for name in sorted(set.intersection(*(set(run["metrics"]) for run in runs))):
        if not name.endswith(_BOUNDS):
            values = gather([run["metrics"][name] for run in runs])
            columns = (values.mean(0), values.min(0), values.max(0))
            metrics |= {name + x: y for x, y in zip(("", *_BOUNDS), columns, strict=True)}
    return {
        "name": f"{runs[0]['name']} (mean of {len(runs)} seeds)",
        "steps": steps,
        "hours": gather([run["hours"] for run in runs]).mean(0),
        "metrics": metrics,
        "critic": {
            name: np.mean([run["critic"][name] for run in runs], axis=0)
            for name in runs[0]["critic"]
            if len({len(run["critic"][name]) for run in runs}) == 1
        },
    }


def _choose_panels(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Return the panels of the page, and name, unit and meaning of metrics that none of them shows.

    Curves that are 0 in all steps are left out, and of panels with equal curves the later is shown.
    """
    by_title = {panel["title"]: panel for run in runs for panel in run["panels"]}
    names = sorted({name for run in runs for name in run["metrics"]})
    shown = {*filter(_CRITIC_PARTS.fullmatch, names)}
    chosen: dict[str, dict[str, Any]] = {}
    for panel in by_title.values():
        curves, values = {}, []
        for key, metric in panel["curves"].items():
            column = [x for run in runs for x in run["metrics"].get(metric, ())]
            if any(column):
                curves[key] = metric
                # Equal but for rounding.
                values.append([x if x is None else f"{x:.5g}" for x in column])
                shown |= {metric + end for end in ("", *_BOUNDS)}
        if curves:
            twin = chosen.pop(str(values), None)
            title = f"{panel['title']} = {twin['title']}" if twin else panel["title"]
            chosen[str(values)] = panel | {"curves": curves, "title": title}
    further = [[name, *(describe_metric(name) or ("", ""))] for name in names if name not in shown]
    return list(chosen.values()), further


def _write_page(path: Path, title: str, runs: Sequence[Run]) -> None:
    panels, further = _choose_panels(runs)
    averages = _average_seeds(runs)
    last = max((step for run in runs for step in run["steps"]), default=1)
    ticks = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    bins = [x for run in runs for name in ("value_bin", "return_bin") for x in run["critic"][name]]
    data = {
        "title": title,
        "runs": runs,
        "averages": averages if len(averages) < len(runs) else None,
        "comparison": _compare_runs(runs),
        "panels": panels,
        "further": further,
        "tick": next(tick for tick in ticks if last <= 5 * tick),  # of steps
        "calibration": [min([0.0, *bins]), max([1.0, *bins])],
        "figures": list(TOKEN_FIGURES),
        "defaults": {x.name: [_as_text(x.default), x.facts.doc] for x in all_options()},
    }
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


def _as_text(value: Any) -> str:
    return "unset" if value is None else str(value)


def _read_resource(package: str, name: str) -> str:
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
