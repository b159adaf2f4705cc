"""Compare the time until SmolLM2-135M adds two-digit numbers: ours and TRL's GRPOTrainer.

    python benchmarks/time_to_sums.py --model FOLDER --peers PATH/bin/python [--seeds 3]

Every side answers 64 times per step (GRPO: groups of responses), takes four optimizer steps of 16
responses, and ends when greedy responses solve half of the 128 held-out sums, evaluated after every
step, or after LIMITS. Prompts, chat template, rule, response length and temperature are the same.
Each run is a process of its own, without caches of compiled programs; runs alternate seed by seed
on the same two cores. Reading the model and compiling count, imports and evaluations do not.
Results are written after every run, to results/time_to_sums.json; runs that are there are kept.
"""

import argparse
import json
import os

import harness

LIMITS = {"target": 0.5, "max_steps": 24, "max_cpu_seconds": 1200, "first": 2}
# Threads of torch that wait for each other sleep. By default they spin, which costs four times the
# processor seconds while other programs use the cores.
QUIET = {"OMP_WAIT_POLICY": "passive"}
GRPO = {
    "algorithm.adv_estimator": "grpo",
    "rollout.n": 4,
    "data.train_batch_size": 16,
    "actor.ppo_mini_batch_size": 4,
}
SIDES = {
    "ours, PPO": {"algorithm.use_reference": False},
    "ours, GRPO": GRPO | {"algorithm.use_reference": False},
    "TRL, GRPO": {
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 4,
        "learning_rate": 1e-5,
    },
}


def run(side: str, options: dict, seed: int, arguments: argparse.Namespace) -> dict:
    """Run one side once; return its figures and versions."""
    settings = {"limits": LIMITS, "model": arguments.model, "options": options | {"seed": seed}}
    if side.startswith("ours"):
        settings["options"] |= {"model.path": arguments.model, "model.dtype": "float32"}
        worker = harness.Worker(side, "ours_sums.py", settings)
    else:
        worker = harness.Worker(side, "trl_grpo.py", settings, arguments.peers, variables=QUIET)
    figures = worker.turn() | {"settings": settings, "versions": worker.versions}
    worker.close()
    return figures


def format_run(side: str, seed: int, figures: dict) -> str:
    """Format the result of one run."""
    end = "" if figures["accuracy"] >= LIMITS["target"] else " (not reached)"
    return (
        f"{side}, seed {seed}: {figures['cpu_seconds']:.0f} processor seconds, "
        f"{figures['seconds']:.0f} s, {figures['steps']} steps, accuracies "
        f"{' '.join(f'{row[2]:.3f}' for row in figures['curve'])}{end}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--peers", required=True, help="python with TRL")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="SIDE")
    parser.add_argument("--set", type=json.loads, default={}, help="other options, as JSON")
    parser.add_argument("--name", default="time_to_sums", help="of the file in results/")
    arguments = parser.parse_args()
    # XLA starts as many threads as it sees cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: harness.THREADS])
    path = harness.RESULTS / f"{arguments.name}.json"
    result = {"machine": harness.machine(), "limits": LIMITS, "runs": {}}
    result |= json.loads(path.read_text()) if path.exists() else {}
    for seed in range(arguments.seeds):
        for side in arguments.sides:
            runs = result["runs"].setdefault(side, [])
            if len(runs) <= seed:
                runs.append(run(side, SIDES[side] | arguments.set, seed, arguments))
                harness.save(arguments.name, result)
            print(format_run(side, seed, runs[seed]), flush=True)


if __name__ == "__main__":
    main()
