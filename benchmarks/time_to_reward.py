"""Compare seconds of PPO until a small model adds two-digit numbers: ours and hand-written torch.

    python benchmarks/time_to_reward.py --peers PATH/bin/python [--seeds 5]

All sides start from the data folder's `tinyadd`, which answers 34 % of the held-out sums greedily,
and stop at 90 %, evaluated every 5 steps. Evaluations are not timed. There are five rows: torch
without compilation; torch with torch.compile; ours with exactly torch's settings; and, as
`shared trunk`, torch.compile and ours with actor and critic on one trunk. jax_ppo is always
compiled, so its rows should be compared with the compiled torch of the same settings.

Each run first takes two steps on a state that it discards, without caches of compiled programs:
"warm-up", nearly all of it compilation. "With compilation" is the sum of warm-up and training: the
time that a single run takes to the target. Runs alternate seed by seed on the same two cores.
Printed are medians with interquartile ranges, in wall-clock and in processor time. "Slowest" is a
run's slowest five steps relative to its median five; a value far above 1 means that something else
used the cores and the figures are void. Takes about 20 minutes; writes results/time_to_reward.json.
"""

import argparse
import os
import statistics

import addition
import harness

TORCH = {  # its best known settings: 34 % to 90 % in 120 to 135 steps
    "data.train_batch_size": 256,
    "actor.ppo_mini_batch_size": 128,
    "actor.ppo_epochs": 1,
    "actor.clip_ratio": 0.2,
    "actor.grad_clip": 1.0,
    "actor.optim.lr": 3e-4,
    "actor.optim.lr_warmup_steps": 5,
    "actor.optim.beta2": 0.95,
    "actor.optim.weight_decay": 0.0,
    "critic.cliprange_value": 0.2,
    "critic.grad_clip": 1.0,
    "critic.optim.lr": 1e-3,
    "critic.optim.beta2": 0.95,
    "critic.optim.weight_decay": 0.0,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 0.95,
    "algorithm.whiten_advantages": True,
    "rollout.temperature": 0.7,
    "trainer.critic_warmup": 5,
}
SAME = TORCH | {
    "actor.clip_ratio_c": 0.0,  # torch's loss has no dual clip
    "algorithm.use_reference": False,  # it does not measure the KL either
    "packing.enabled": False,  # one sample per row: all have ten tokens
    "actor.ppo_micro_batch_size_per_device": 128,
    "rollout.logprob_micro_batch_size_per_device": 256,
}


def on_one_trunk(settings: dict) -> dict:
    """Return the settings with a shared trunk, without the options of a separate critic."""
    of_a_critic = ("critic.optim.", "critic.grad_clip", "trainer.critic_warmup")
    kept = {name: value for name, value in settings.items() if not name.startswith(of_a_critic)}
    return kept | {"critic.shared_trunk": True, "critic.value_loss_coef": 0.1}


SIDES = {
    "torch, eager": ("torch_addition.py", TORCH | {"compiled": False}),
    "torch.compile": ("torch_addition.py", TORCH | {"compiled": True}),
    "ours": ("ours_addition.py", SAME),
    "torch.compile, shared trunk": ("torch_addition.py", on_one_trunk(TORCH) | {"compiled": True}),
    "ours, shared trunk": ("ours_addition.py", on_one_trunk(SAME)),
}


def start_workers(sides: list[str], peers: str) -> list[harness.Worker]:
    """Start the workers of these sides; `peers` is the Python with torch."""
    workers = []
    for side in sides:
        program, settings = SIDES[side]
        python = peers if program == "torch_addition.py" else None
        workers.append(harness.Worker(side, program, settings, python))
    return workers


def summarise(runs: list[dict]) -> dict:
    """Summarise the runs of one side over the seeds.

    Seconds, steps and accuracy cover only the runs that reached the target.
    """
    reached = [run for run in runs if run["accuracy"] >= addition.TARGET]
    summary = {
        "runs": len(runs),
        "reached": len(reached),
        "seconds_per_step": harness.spread([run["seconds"] / run["steps"] for run in runs]),
        "slowest": harness.spread([_slowest(run["curve"]) for run in runs]),
        "warm_up_seconds": harness.spread([run["warm_up_seconds"] for run in runs]),
        "accuracy_before": harness.spread([run["curve"][0][2] for run in runs]),
    }
    if reached:
        summary |= {
            name: harness.spread([run[name] for run in reached])
            for name in ("seconds", "cpu_seconds", "steps", "accuracy")
        }
        summary["with_compilation"] = harness.spread(
            [run["seconds"] + run["warm_up_seconds"] for run in reached]
        )
    return summary


def _slowest(curve: list[list[float]]) -> float:
    """Return the slowest interval between evaluations relative to the median one."""
    seconds = [after[1] - before[1] for before, after in zip(curve, curve[1:], strict=False)]
    return max(seconds) / statistics.median(seconds)


def table(rows: dict[str, dict]) -> str:
    """Format one line per side: medians, with interquartile ranges in parentheses."""
    columns = {
        "seconds": ".1f",
        "cpu_seconds": ".1f",
        "steps": ".0f",
        "seconds_per_step": ".3f",
        "warm_up_seconds": ".1f",
        "with_compilation": ".1f",
        "slowest": ".2f",
    }

    def cell(figures: dict | None, form: str) -> str:
        return harness.format_spread(figures, form) if figures else "-"

    lines = [["", f"runs at {addition.TARGET:.0%}", *(name.replace("_", " ") for name in columns)]]
    lines += [
        [
            name,
            f"{row['reached']}/{row['runs']}",
            *(cell(row.get(column), form) for column, form in columns.items()),
        ]
        for name, row in rows.items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", required=True, help="python with torch and transformers")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES,
        default=list(SIDES),
        metavar="SIDE",
        help=f"one or more of: {'; '.join(SIDES)}",
    )
    parser.add_argument(
        "--max-steps", type=int, default=addition.MAX_STEPS, help="end a run after these steps"
    )
    arguments = parser.parse_args()
    if not addition.FOLDER.is_dir():
        parser.exit(
            0,
            f"skipped: no folder {addition.FOLDER}; set JAX_PPO_DATA to the folder that contains "
            "tinyadd\n",
        )
    # XLA starts as many threads as it sees cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: harness.THREADS])
    machine = harness.machine()
    os.environ["ADDITION_MAX_STEPS"] = str(arguments.max_steps)
    workers = start_workers(arguments.sides, arguments.peers)
    runs, _ = harness.interleave(workers, arguments.seeds, warm_up=0)
    for worker in workers:
        worker.close()
    rows = {name: summarise(side_runs) for name, side_runs in runs.items()}
    result = {
        "machine": machine,
        "versions": {worker.name: worker.versions for worker in workers},
        "settings": {side: SIDES[side][1] for side in arguments.sides},
        "summary": rows,
        "runs": runs,
    }
    whole = arguments.sides == list(SIDES) and arguments.max_steps == addition.MAX_STEPS
    path = harness.save("time_to_reward" if whole else "time_to_reward_part", result)
    print(table(rows))
    for name, settings in result["settings"].items():
        print(f"\n{name}: " + ", ".join(f"{option}={value}" for option, value in settings.items()))
    print(f"\n{result['versions']}\nwritten to {path}")


if __name__ == "__main__":
    main()
