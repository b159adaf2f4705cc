"""Does PPO learn in fewer steps with a critic that was trained before?

    python benchmarks/critic_pretraining.py
    python benchmarks/critic_pretraining.py --config smollm2_sums --digits 1,2,3 --parallel 5 \\
        --config.model.path=FOLDER --config.data.train_batch_size=256

Runs a configuration with several seeds in three ways: with a critic that starts with PPO; with
`trainer.critic_warmup` of STEPS steps; and with a critic that `jax_ppo.critic` has trained for as
many steps. Prints the steps of the actor until the mean reward of a step's samples reaches TARGET,
the mean reward over the first half of the actor's steps, and the critic's explained variance when
the actor begins, and writes results/critic_pretraining_CONFIG.json. --digits replaces the training
data by sums of numbers with these many digits, so that a prompt says something about its reward.
Further arguments are options of every run.
"""

import argparse
import csv
import itertools
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("from the start", "warm-up", "trained")
METRICS = ("reward/mean", "critic/explained_variance")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="arithmetic")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="steps in which only a critic learns")
    parser.add_argument("--actor-steps", type=int, default=12)
    parser.add_argument("--target", type=float, default=0.8, help="mean reward to reach")
    parser.add_argument("--digits", help="of the numbers to add, such as 1,2,3")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    arguments, options = parser.parse_known_args()
    steps = arguments.steps
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.parallel) as pool:
        folder = Path(name)
        if arguments.digits:
            write_sums(folder / "sums.jsonl", [int(x) for x in arguments.digits.split(",")])
            options.append(f"--config.data.train_files={folder}/sums.jsonl")
        trained = [
            pool.submit(run, "critic", folder / f"critic{seed}", arguments, seed, steps, options)
            for seed in range(arguments.seeds)
        ]
        critics = [future.result() for future in trained]

        def run_way(seed_and_way: tuple[int, str]) -> dict[str, list[float]]:
            seed, way = seed_and_way
            warmup = steps if way == "warm-up" else 0
            own = [*options, f"--config.trainer.critic_warmup={warmup}"]
            if way == "trained":
                own.append(f"--config.critic.path={folder}/critic{seed}/critic")
            workdir = folder / f"{way}{seed}".replace(" ", "_")
            figures = run("train", workdir, arguments, seed, warmup + arguments.actor_steps, own)
            figures = {name: values[warmup:] for name, values in figures.items()}
            for metric, values in figures.items():
                print(f"seed {seed}, {way}, {metric}: {round_all(values)}", flush=True)
            return figures

        pairs = list(itertools.product(range(arguments.seeds), WAYS))
        results = dict(zip(pairs, pool.map(run_way, pairs), strict=True))
    versions = {name: version(name) for name in ("jax", "flax", "optax")}
    print(f"Python {platform.python_version()}, {versions}; {steps} steps of the critic alone")
    for seed, figures in enumerate(critics):
        print(
            f"critic alone, seed {seed}: explained variance "
            f"{round_all(figures['critic/explained_variance'])}"
        )
    half = max(1, arguments.actor_steps // 2)
    for way in WAYS:
        of_seeds = [results[seed, way] for seed in range(arguments.seeds)]
        reached = [steps_until(arguments.target, x["reward/mean"]) for x in of_seeds]
        means = [statistics.mean(x["reward/mean"][:half]) for x in of_seeds]
        explained = [x["critic/explained_variance"][0] for x in of_seeds]
        print(
            f"{way}: actor's steps until {arguments.target}: {reached}; mean reward of its first "
            f"{half} steps {statistics.mean(means):.3f} ({min(means):.3f}-{max(means):.3f}); "
            f"explained variance at its first step {round_all(explained)}"
        )
    result = {
        "versions": versions,
        "arguments": vars(arguments),
        "options": options,
        "critic": critics,
        "ways": {way: [results[seed, way] for seed in range(arguments.seeds)] for way in WAYS},
    }
    path = ROOT / f"benchmarks/results/critic_pretraining_{arguments.config}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


def write_sums(path: Path, digits: list[int]) -> None:
    """Write 8,192 sums of two numbers, in turn with each of these numbers of digits."""
    numbers = random.Random(0)
    with path.open("w") as file:
        for _, count in zip(range(8192), itertools.cycle(digits), strict=False):
            a, b = (numbers.randrange(10 ** (count - 1), 10**count) for _ in range(2))
            question = f"What is {a} + {b}? Answer with the number only."
            row = {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            }
            file.write(json.dumps(row) + "\n")


def run(
    command: str,
    workdir: Path,
    arguments: argparse.Namespace,
    seed: int,
    steps: int,
    options: list[str],
) -> dict[str, list[float]]:
    """Run a command of jax_ppo for some steps, without evaluations; return metrics by step."""
    own = {
        "workdir": workdir,
        "config": arguments.config,
        "config.seed": seed,
        "config.trainer.total_training_steps": steps,
        "config.trainer.val_before_train": False,
        "config.trainer.test_freq": -1,
        "config.trainer.save_freq": -1,
        "config.trainer.export": command == "critic",
    }
    words = [f"--{name}={value}" for name, value in own.items()]
    process = subprocess.run(
        [sys.executable, "-m", f"jax_ppo.{command}", *words, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(process.stdout[-3000:] + process.stderr[-3000:])
    with (workdir / "training_metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["reward/mean"]]
    return {name: [float(row[name] or "nan") for row in rows] for name in METRICS}


def steps_until(target: float, rewards: list[float]) -> int | None:
    """Return the first step whose samples reach the target; `None` if none does."""
    return next((step for step, x in enumerate(rewards, start=1) if x >= target), None)


def round_all(values: list[float]) -> list[float]:
    """Round for printing."""
    return [round(value, 3) for value in values]


if __name__ == "__main__":
    main()
