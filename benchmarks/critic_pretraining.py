"""Does PPO learn in fewer steps with a critic that was trained before?

    python benchmarks/critic_pretraining.py

Runs the embedded default with several seeds in three ways: with a critic that starts with PPO; with
`trainer.critic_warmup` of STEPS steps; and with a critic that `jax_ppo.critic` has trained for as
many steps. Prints the steps of the actor until the mean reward of a step's samples reaches TARGET,
and the mean reward over the actor's first steps, and writes results/critic_pretraining.json.
"""

import argparse
import csv
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.8


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="steps in which only a critic learns")
    parser.add_argument("--actor-steps", type=int, default=12)
    arguments = parser.parse_args()
    steps, actor_steps = arguments.steps, arguments.actor_steps
    rewards: dict[str, list[list[float]]] = {"from the start": [], "warm-up": [], "trained": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            base = Path(folder) / f"seed{seed}"
            run("critic", base / "critic", seed, steps)
            model = f"--config.model.path={base}/critic/model"
            critic = f"--config.critic.path={base}/critic/critic"
            ways = {
                "from the start": (0, [model]),
                "warm-up": (steps, [model]),
                "trained": (0, [model, critic]),
            }
            for name, (warmup, options) in ways.items():
                workdir = base / name.replace(" ", "_")
                options = [*options, f"--config.trainer.critic_warmup={warmup}"]
                run("train", workdir, seed, warmup + actor_steps, *options)
                rewards[name].append(step_rewards(workdir)[warmup:])
                print(
                    f"seed {seed}, {name}: {[round(x, 2) for x in rewards[name][-1]]}", flush=True
                )
    versions = {name: version(name) for name in ("jax", "flax", "optax")}
    print(f"Python {platform.python_version()}, {versions}; {steps} steps of the critic alone")
    for name, of_seeds in rewards.items():
        reached = [steps_until_target(x) for x in of_seeds]
        means = [statistics.mean(x[: actor_steps // 2]) for x in of_seeds]
        print(
            f"{name}: actor's steps until {TARGET}: {reached}; mean reward of its first "
            f"{actor_steps // 2} steps {statistics.mean(means):.3f} "
            f"({min(means):.3f}-{max(means):.3f})"
        )
    result = {"versions": versions, "arguments": vars(arguments), "rewards": rewards}
    (ROOT / "benchmarks/results/critic_pretraining.json").write_text(json.dumps(result, indent=1))


def run(command: str, workdir: Path, seed: int, steps: int, *options: str) -> None:
    """Run a command of jax_ppo for some steps, without evaluations."""
    arguments = {
        "workdir": workdir,
        "config.seed": seed,
        "config.trainer.total_training_steps": steps,
        "config.trainer.val_before_train": False,
        "config.trainer.test_freq": -1,
        "config.trainer.save_freq": -1,
    }
    words = [f"--{name}={value}" for name, value in arguments.items()]
    module = [sys.executable, "-m", f"jax_ppo.{command}", "--config=arithmetic"]
    subprocess.run([*module, *words, *options], check=True, cwd=ROOT, capture_output=True)


def step_rewards(workdir: Path) -> list[float]:
    """Return the mean reward of each step's samples."""
    with (workdir / "training_metrics.csv").open() as file:
        return [float(row["reward/mean"]) for row in csv.DictReader(file) if row["reward/mean"]]


def steps_until_target(rewards: list[float]) -> int | None:
    """Return the first step whose samples reach the target; `None` if none does."""
    return next((step for step, x in enumerate(rewards, start=1) if x >= TARGET), None)


if __name__ == "__main__":
    main()
