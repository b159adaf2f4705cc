"""training_curves.png: the metrics of a run plotted over its steps."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_ppo.reporting.files import replace_file
from jax_ppo.reporting.sinks import read_metrics_csv

_PANELS_PER_ROW = 4
_EVALUATION_PREFIX = "eval/"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot of the training curves, whose vertical axis has the unit.

    `curves` are metric names by legend entry; those that begin with "eval/" are of evaluations.
    """

    title: str
    unit: str
    curves: dict[str, str]


def plot_curves(
    csv_path: Path, evaluations: list[dict[str, Any]], png_path: Path, panels: Sequence[Panel]
) -> None:
    """Plot the training curves to a PNG file, which is replaced atomically.

    Evaluations are dicts of step and metrics (accuracy, reward_mean, ...), each a number or None;
    the panels refer to them as eval/NAME.
    """
    # pyplot would keep every figure alive, and may look for a display.
    from matplotlib.figure import Figure

    steps = read_metrics_csv(csv_path)
    row_count = -(-len(panels) // _PANELS_PER_ROW)
    column_count = -(-len(panels) // row_count)
    figure = Figure(figsize=(4 * column_count, 3.5 * row_count), layout="constrained")
    all_axes = figure.subplots(row_count, column_count, squeeze=False).flat
    # The last row may have fewer panels than the others.
    for axes, panel in itertools.zip_longest(all_axes, panels):
        if panel is None:
            axes.set_axis_off()
            continue
        axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
        axes.grid(alpha=0.3)
        for legend, metric in panel.curves.items():
            is_evaluation = metric.startswith(_EVALUATION_PREFIX)
            rows = evaluations if is_evaluation else steps
            name = metric.removeprefix(_EVALUATION_PREFIX)
            has_value = [row for row in rows if row.get(name) not in (None, "")]
            if points := [(int(row["step"]), float(row[name])) for row in has_value]:
                # Evaluations are few.
                marker = "o" if is_evaluation else None
                line = zip(*points, strict=True)
                axes.plot(*line, label=legend, marker=marker, markersize=4, linewidth=1.2)
        if axes.lines:
            axes.legend(frameon=False)
    with replace_file(png_path) as temporary:
        figure.savefig(temporary, dpi=100, format="png")
