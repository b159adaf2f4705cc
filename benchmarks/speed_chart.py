"""Draw docs/speed.png from the results of the benchmarks: `python benchmarks/speed_chart.py`.

One bar per implementation: median milliseconds per response token of a whole PPO step, and
processor seconds until sums are solved; lower is better. Lines show the fastest and slowest turn or
seed. Every number is read from benchmarks/results/.
"""

import json
import statistics
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PANELS = (
    ("Rule reward, 64-token responses, Intel Xeon", "ppo_step_forced_rule"),
    ("Rule reward, 307 tokens on average, AMD EPYC", "ppo_step_verl_rule"),
    ("Reward model, 64-token responses, Intel Xeon", "ppo_step_forced_model"),
    ("Reward model, 307 tokens on average, Intel Xeon", "ppo_step_verl_model"),
)
LABELS = {
    "ours": "jax_ppo",
    "torch": "hand-written torch",
    "torch-padded": "the same, padded",
    "trl": "TRL 1.12.0",
    "tunix": "tunix 0.1.7",
}
SUMS = {"ours, PPO": "jax_ppo, PPO", "ours, GRPO": "jax_ppo, GRPO", "TRL, GRPO": "TRL 1.12.0, GRPO"}

Bar = tuple[str, float, float, float]  # label, median, fastest, slowest


def read_panel(name: str) -> list[Bar]:
    """Return the bars of a benchmark's sides, in ms per token."""
    sides = json.loads((RESULTS / f"{name}.json").read_text())["sides"]
    bars = []
    for side, label in LABELS.items():
        if side in sides:
            figure = sides[side]["milliseconds_per_token"]
            bars.append((label, figure["median"], figure["min"], figure["max"]))
    return bars


def read_sums() -> list[Bar]:
    """Return the bars of time_to_sums.py, in processor seconds."""
    runs = json.loads((RESULTS / "time_to_sums.json").read_text())["runs"]
    bars = []
    for side, label in SUMS.items():
        seconds = [run["cpu_seconds"] for run in runs[side]]
        bars.append((label, statistics.median(seconds), min(seconds), max(seconds)))
    return bars


def draw_panel(axes: Axes, title: str, bars: list[Bar], digits: int) -> None:
    """Draw the bars with their medians; ours are blue."""
    labels, medians, fastest, slowest = map(np.array, zip(*bars, strict=True))
    colors = ["#3f51b5" if label.startswith("jax_ppo") else "#b0b7c3" for label in labels]
    drawn = axes.barh(labels, medians, xerr=[medians - fastest, slowest - medians], color=colors)
    axes.bar_label(drawn, fmt=f"%.{digits}f", padding=4, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set_xlim(0, max(slowest) * 1.15)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def draw_chart(path: Path) -> None:
    """Draw one panel per benchmark and save the chart as a PNG file."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    steps, sums = figure.subfigures(2, 1, height_ratios=(4.8, 1.6))
    for axes, (title, name) in zip(steps.subplots(2, 2).T.flat, PANELS, strict=True):
        draw_panel(axes, title, read_panel(name), 2)
    steps.supxlabel("milliseconds per response token of a PPO step on 2 CPU cores", fontsize=10)
    title = "Two-digit sums with SmolLM2-135M to an accuracy of 0.5, AMD EPYC, three seeds"
    draw_panel(sums.subplots(), title, read_sums(), 0)
    sums.supxlabel("processor seconds", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw_chart(ROOT / "docs" / "speed.png")
