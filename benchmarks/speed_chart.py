"""Draw docs/speed.png from the PPO-step benchmarks: `python benchmarks/speed_chart.py`.

One bar per implementation: median milliseconds per response token of a whole PPO step, lower is
better. Lines show the fastest and slowest turn. Every number is read from benchmarks/results/.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend must be chosen first)

ROOT = Path(__file__).resolve().parent.parent
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


def read_panel(name: str) -> list[tuple[str, float, float, float]]:
    """Return (label, median, fastest, slowest) in ms per token for each side of one benchmark."""
    sides = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["sides"]
    bars = []
    for side, label in LABELS.items():
        if side in sides:
            figure = sides[side]["milliseconds_per_token"]
            bars.append((label, figure["median"], figure["min"], figure["max"]))
    return bars


def draw_chart(path: Path) -> None:
    """Draw one panel per benchmark and save the chart as a PNG file."""
    figure, grid = pyplot.subplots(2, 2, figsize=(11, 4.8), constrained_layout=True)
    for axes, (title, name) in zip(grid.T.flat, PANELS, strict=True):
        bars = read_panel(name)
        medians = [median for _, median, _, _ in bars]
        spread = [
            [median - fastest for _, median, fastest, _ in bars],
            [slowest - median for _, median, _, slowest in bars],
        ]
        colors = ["#3f51b5"] + ["#b0b7c3"] * (len(bars) - 1)
        axes.barh([label for label, *_ in bars], medians, xerr=spread, color=colors)
        for row, (_, median, _, slowest) in enumerate(bars):
            axes.annotate(
                f"{median:.2f}",
                (slowest, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axes.set_title(title, fontsize=10)
        axes.set_xlim(0, max(slowest for *_, slowest in bars) * 1.15)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("milliseconds per response token of a PPO step on 2 CPU cores", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw_chart(ROOT / "docs" / "speed.png")
