"""Draw docs/sums_curves.png from the runs of smollm2_sums: `python benchmarks/sums_chart.py`.

benchmarks/results/smollm2_sums.csv holds metrics of every step; those after step 0, 4 and 8 include
an evaluation.
"""

import csv
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_sums.csv"
PANELS = {
    "eval/accuracy": "accuracy, greedy, 128 held-out sums",
    "reward/mean": "mean reward of the samples, temperature 1",
}
STYLES = {"all weights": "-", "LoRA": "--"}


def read_curves(metric: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return (step, value) of a metric for each (what was trained, seed)."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row[metric]:
                points = curves.setdefault((row["trained"], row["seed"]), [])
                points.append((int(row["step"]), float(row[metric])))
    return curves


def draw_panel(axes: Axes, metric: str) -> None:
    """Draw one metric of all runs."""
    for (trained, seed), points in read_curves(metric).items():
        axes.plot(
            *zip(*points, strict=True),
            STYLES[trained],
            color=f"C{seed}",
            marker="o",
            markersize=3,
            label=f"{trained}, seed {seed}",
        )
    axes.set(title=PANELS[metric], xlabel="step", ylim=(0, 1))
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)


def draw_chart(path: Path) -> None:
    """Draw one panel per metric and save the chart as a PNG file."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        draw_panel(axes, metric)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    draw_chart(ROOT / "docs" / "sums_curves.png")
