"""Draw docs/sums_curves.png and docs/gsm8k_curves.png: `python benchmarks/curves_chart.py`.

The files in benchmarks/results/ hold metrics of every step; a few steps include an evaluation.
"""

import csv
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = "mean reward of the samples, temperature 1"
# Each chart's file in benchmarks/results/, and its metrics with their titles.
CHARTS = {
    "sums": (
        "smollm2_sums.csv",
        {"eval/accuracy": "accuracy, greedy, 128 held-out sums", "reward/mean": SAMPLES},
    ),
    "gsm8k": (
        "gsm8k_h200.csv",
        {
            "eval/accuracy": "accuracy, greedy, 256 test questions",
            "reward/mean": SAMPLES,
            "critic/explained_variance": "share of the variance that the critic explains",
        },
    ),
}
STYLES = {"all weights": "-", "LoRA": "--"}


def read_curves(file: str, metric: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return (step, value) of a metric for each (what was trained, seed)."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    with (ROOT / "benchmarks" / "results" / file).open(newline="") as lines:
        for row in csv.DictReader(lines):
            if row[metric]:
                name = (row.get("trained", "all weights"), row.get("seed", "0"))
                curves.setdefault(name, []).append((int(row["step"]), float(row[metric])))
    return curves


def draw_panel(axes: Axes, file: str, metric: str) -> None:
    """Draw one metric of all runs."""
    for (trained, seed), points in read_curves(file, metric).items():
        axes.plot(
            *zip(*points, strict=True),
            STYLES[trained],
            color=f"C{seed}",
            marker="o",
            markersize=3,
            label=f"{trained}, seed {seed}",
        )
    axes.grid(alpha=0.3)


def draw_chart(chart: str, path: Path) -> None:
    """Draw one panel per metric and save the chart as a PNG file."""
    file, panels = CHARTS[chart]
    figure = Figure(figsize=(4 * len(panels), 2.8), layout="constrained")
    grid = figure.subplots(1, len(panels), sharex=True, sharey=True)
    for axes, (metric, title) in zip(grid, panels.items(), strict=True):
        draw_panel(axes, file, metric)
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=9)
    grid[0].set_ylim(bottom=0)
    if chart == "sums":
        grid[-1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    for chart in CHARTS:
        draw_chart(chart, ROOT / "docs" / f"{chart}_curves.png")
