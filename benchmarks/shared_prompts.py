"""Measure the time that shared prompts save (packing.share_prompts).

    python benchmarks/shared_prompts.py

Two PPO steps take turns in one process: a small model (2 layers, hidden size 256, vocabulary 4,096,
float32) as actor, critic and reference, and 8 sampled responses of full length to each prompt, with
one copy of the prompt per response or one per row. The rollout is the same program on both sides.
Prints the median seconds of each phase, processor seconds and their ratios, and writes
results/shared_prompts.json. Takes about three minutes of processor time, mostly to compile.
"""

import argparse
import importlib.metadata
import os
import statistics
from collections.abc import Iterator

import harness
import programs

RESPONSES = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="prompts per step")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response")
    parser.add_argument("--repeats", type=int, default=5, help="steps, after one that compiles")
    args = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    conditions = {
        "machine": harness.machine(),
        "load before": os.getloadavg()[0],
        "versions": versions,
        "settings": vars(args) | {"responses to a prompt": RESPONSES},
    }
    for name, value in conditions.items():
        print(f"{name}: {value}", flush=True)
    sides = {"own copies": measure(args, False), "shared": measure(args, True)}
    results = compare(sides, args.repeats)
    for phase, figures in results.items():
        print(f"{phase}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    print("written:", harness.save("shared_prompts", conditions | {"results": results}))


def measure(args: argparse.Namespace, share_prompts: bool) -> Iterator:
    """Return an iterator over the seconds of a step's phases."""
    step = programs.Step(
        programs.qwen2(layers=2),
        samples=args.prompts * RESPONSES,
        responses=RESPONSES,
        share_prompts=share_prompts,
        prompt=args.prompt,
        response=args.response,
    )
    return step.steps(step.full_lengths())


def compare(sides: dict[str, Iterator], repeats: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each phase on both sides, and their ratio.

    Args:
      sides: for each side its steps' seconds by phase (`programs.Step.steps`).
      repeats: steps of each side, after one that compiles.
    """
    taken = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, steps in sides.items():
            cpu_start = harness.cpu_seconds()
            phases = next(steps)[0]
            cpu = harness.cpu_seconds() - cpu_start
            phases["score + update"] = phases["score"] + phases["update"]
            taken[name].append(phases | {"step, processor": cpu})
    figures = {}
    for phase in taken["shared"][0]:
        figures[phase] = {
            name: statistics.median(step[phase] for step in steps[1:])
            for name, steps in taken.items()
        }
        figures[phase]["ratio"] = figures[phase]["own copies"] / figures[phase]["shared"]
    return figures


if __name__ == "__main__":
    main()
