"""Measure how seconds and temporary bytes of a PPO step's phases grow with its sizes.

    python benchmarks/growth.py

The axes are response length, batch, vocabulary and layers, varied one at a time around a small
model (4 layers, hidden size 256, vocabulary 4,096) with 32 prompts of 64 tokens and 64 sampled
tokens each, in float32; every response has full length. All sizes take a step in turn, so that
changes in the machine's speed do not bend a curve. Seconds cover all roles; bytes cover the
policy's forward pass and the actor's update, the largest programs of each phase. For each axis the
log-log slope is printed, over the whole axis and over its last segment: 1 is proportional growth, 0
none; if the two differ, the curve bends. Takes about ten minutes on two cores; writes
results/growth.json and results/growth.png.
"""

import argparse
import math
import statistics
import sys
import tempfile

import harness
import programs
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from jax_ppo.runtime import compilation

BASE = {"response": 64, "samples": 32, "vocabulary": 4096, "layers": 4}
AXES = {
    "response": (32, 64, 256),
    "samples": (8, 32, 128),
    "vocabulary": (1024, 4096, 32768),
    "layers": (2, 4, 8),
}
CURVES = {
    "decode": "seconds",
    "score + update": "seconds",
    "score": "temporary MiB",
    "update": "temporary MiB",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument(
        "--repeats", type=int, default=5, help="measured steps, after one that compiles"
    )
    args = parser.parse_args()
    sizes = {
        str(size): size
        for axis in args.axes
        for size in (BASE | {axis: value} for value in AXES[axis])
    }
    before = harness.machine()
    with tempfile.TemporaryDirectory() as folder:
        # Programs compiled to read their memory are not compiled again to run them.
        compilation.enable_cache(folder, print)
        points = measure_sizes(sizes, args.repeats)
    for point in points.values():
        print("  ".join(f"{name} {value:g}" for name, value in point.items()))
    curves = {
        axis: [points[str(BASE | {axis: value})] for value in AXES[axis]] for axis in args.axes
    }
    slopes = {
        axis: {
            name: (slope(axis, name, rows), slope(axis, name, rows[-2:])) for name in curve_names()
        }
        for axis, rows in curves.items()
    }
    for axis, powers in slopes.items():
        for name, (whole, last) in powers.items():
            bend = "" if abs(whole - last) < 0.2 else f"  bends: {last:.2f} at the end"
            print(f"{axis:10s} {name:24s} grows with power {whole:.2f}{bend}")
    print(
        "written:",
        harness.save(
            "growth", {"machine": before, "base": BASE, "curves": curves, "slopes": slopes}
        ),
    )
    draw(curves, slopes)


def curve_names() -> list[str]:
    """Return the names of the curves with their units."""
    return [f"{curve}, {unit}" for curve, unit in CURVES.items()]


def measure_sizes(sizes: dict[str, dict], repeats: int) -> dict[str, dict]:
    """Measure each size; return the sizes with their seconds and temporary MiB."""
    mib, steps = {}, {}
    for name, size in sizes.items():
        step = programs.Step(
            programs.qwen2(size["layers"], vocabulary=size["vocabulary"]),
            samples=size["samples"],
            prompt=64,
            response=size["response"],
        )
        mib[name] = [
            step.lower(kind).compile().memory_analysis().temp_size_in_bytes / 2**20
            for kind in ("score", "update")
        ]
        steps[name] = step.steps(step.full_lengths())
        next(steps[name])
        print(f"compiled {len(steps)}/{len(sizes)}", file=sys.stderr, flush=True)
    rounds = [{name: next(more)[0] for name, more in steps.items()} for _ in range(repeats)]

    def median(name: str, *phases: str) -> float:
        return statistics.median(sum(taken[name][phase] for phase in phases) for taken in rounds)

    return {
        name: size
        | dict(
            zip(
                curve_names(),
                (median(name, "sample"), median(name, "score", "update"), *mib[name]),
                strict=True,
            )
        )
        for name, size in sizes.items()
    }


def slope(axis: str, name: str, rows: list[dict]) -> float:
    """Fit the power of growth by least squares on logarithms."""
    x, y = ([math.log(row[key]) for row in rows] for key in (axis, name))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def draw(curves: dict, slopes: dict) -> None:
    """Plot the curves to results/growth.png."""
    figure = Figure(figsize=(4.2 * len(curves), 7), layout="constrained")
    grid = figure.subplots(2, len(curves), squeeze=False)
    for column, (axis, rows) in zip(grid.T, curves.items(), strict=True):
        for axes, unit in zip(column, ("seconds", "temporary MiB"), strict=True):
            for name in (name for name in curve_names() if name.endswith(unit)):
                axes.loglog(
                    [row[axis] for row in rows],
                    [row[name] for row in rows],
                    marker="o",
                    label=f"{name.partition(',')[0]}: power {slopes[axis][name][0]:.2f}",
                )
            axes.set(xlabel=axis, ylabel=unit)
            axes.set_xticks([row[axis] for row in rows], [f"{row[axis]:,}" for row in rows])
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
    figure.savefig(harness.RESULTS / "growth.png", dpi=100)


if __name__ == "__main__":
    main()
