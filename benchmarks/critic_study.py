r"""Does the critic pay: more epochs, frozen layers, training before PPO, or no critic at all?

    python benchmarks/critic_study.py
    python benchmarks/critic_study.py --config smollm2_sums --digits 1,2 --steps 8 --target 0.6 \
        --config.model.path=FOLDER

Runs a configuration with several seeds in each of SETTINGS, which differ from the first in one
thing. Prints medians and ranges over the seeds: steps and processor seconds until the mean reward
of a step's samples reaches TARGET, the mean reward over all steps, and the median of the critic's
explained variance until then. Steps that compile count as the median of the others; the processor
seconds of "pretrained" include BEFORE steps of the critic alone. "grpo" takes as many samples per
step, in groups. --digits replaces the training data by sums of numbers with these many digits, so
that a prompt says something about its reward. Results are written after every run, to
results/critic_study_CONFIG.json; runs that are there are kept. Further arguments are options of
every run.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path

import harness

from jax_ppo.config import read_config_file

METRICS = ("reward/mean", "critic/explained_variance", "seconds/compile", "cpu_seconds")
BEFORE = 10  # steps of the critic alone in "pretrained"
GROUP = 4  # responses to a prompt in "grpo"
SETTINGS = {
    "default": {},
    "2 epochs": {"critic.ppo_epochs": 2},
    "4 epochs": {"critic.ppo_epochs": 4},
    "12 epochs": {"critic.ppo_epochs": 12},
    "frozen attention": {"critic.freeze": "attention"},
    "no warm-up": {"trainer.critic_warmup": 0},
    "pretrained": {"trainer.critic_warmup": 0},
    "grpo": {"trainer.critic_warmup": 0, "algorithm.adv_estimator": "grpo", "rollout.n": GROUP},
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="arithmetic")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--target", type=float, default=0.95, help="mean reward to reach")
    parser.add_argument("--digits", help="of the numbers to add, such as 1,2,3")
    arguments, words = parser.parse_known_args()
    options = dict(word.removeprefix("--config.").split("=", 1) for word in words)
    path = harness.RESULTS / f"critic_study_{arguments.config}.json"
    result = {
        "machine": harness.machine(),
        "versions": {name: version(name) for name in ("jax", "flax", "optax")},
        "arguments": vars(arguments) | {"options": words},
        "runs": {},
    }
    result |= json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.digits:
            write_sums(folder / "sums.jsonl", [int(x) for x in arguments.digits.split(",")])
            options["data.train_files"] = folder / "sums.jsonl"
        for seed, setting in itertools.product(range(arguments.seeds), arguments.settings):
            runs = result["runs"].setdefault(setting, [])
            if len(runs) <= seed:
                runs.append(run_setting(setting, folder, arguments, seed, options))
                harness.save(path.stem, result)
            print(f"seed {seed}, {setting}: {format_runs(runs[seed:][:1], arguments)}", flush=True)
    for setting in arguments.settings:
        print(f"{setting}: {format_runs(result['runs'][setting], arguments)}")


def run_setting(
    setting: str, folder: Path, arguments: argparse.Namespace, seed: int, options: dict
) -> dict:
    """Run a setting once; return its figures by step, and those of the critic alone."""
    steps, before = "trainer.total_training_steps", {}
    changes = {steps: arguments.steps} | SETTINGS[setting]
    if setting == "pretrained":
        critic = folder / f"critic{seed}"
        before = run("critic", critic, arguments, seed, options | {steps: BEFORE})
        changes["critic.path"] = critic / "critic"
    if setting == "grpo":
        config = read_config_file(arguments.config)
        changes["data.train_batch_size"] = config.data.train_batch_size // GROUP
        changes["actor.ppo_mini_batch_size"] = config.actor.ppo_mini_batch_size // GROUP
    workdir = folder / f"{setting}{seed}".replace(" ", "_")
    figures = run("train", workdir, arguments, seed, options | changes)
    return figures | {"before": before}


def format_runs(runs: list[dict], arguments: argparse.Namespace) -> str:
    """Format medians and ranges over the runs of a setting."""
    reached = [steps_until(arguments.target, figures["reward/mean"]) for figures in runs]
    pairs = list(zip(runs, reached, strict=True))
    columns = {
        "steps until then": reached,
        "processor seconds": [processor_seconds(figures, steps) for figures, steps in pairs],
        "of all steps": [processor_seconds(figures, arguments.steps) for figures in runs],
        "mean reward": [statistics.mean(figures["reward/mean"]) for figures in runs],
        "explained variance until then": [
            statistics.median(figures["critic/explained_variance"][:steps])
            for figures, steps in pairs
        ],
    }
    return "; ".join(f"{name} {format_range(values)}" for name, values in columns.items())


def format_range(values: list[float | None]) -> str:
    """Format the median and the range; `None`, a target that was not reached, as infinite."""
    ordered = sorted(math.inf if value is None else value for value in values)
    return f"{statistics.median(ordered):.3g} ({ordered[0]:.3g}-{ordered[-1]:.3g})"


def processor_seconds(figures: dict, steps: int | None) -> float | None:
    """Return the processor seconds of the first steps, and of a critic's training before them.

    Steps that compile count as the median of the others.
    """
    if steps is None:
        return None
    pairs = list(zip(figures["cpu_seconds"], figures["seconds/compile"], strict=True))
    median = statistics.median(seconds for seconds, compiling in pairs if not compiling)
    own = sum(median if compiling else seconds for seconds, compiling in pairs[:steps])
    return own + (processor_seconds(figures["before"], BEFORE) if figures.get("before") else 0)


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
    command: str, workdir: Path, arguments: argparse.Namespace, seed: int, options: dict
) -> dict[str, list[float]]:
    """Run a command of jax_ppo without evaluations; return METRICS by step."""
    own = {
        "seed": seed,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.logger": "",
        "trainer.export": command == "critic",
    }
    rows = harness.run_command(command, arguments.config, workdir, own | options)
    return {name: [float(row.get(name) or 0) for row in rows] for name in METRICS}


def steps_until(target: float, rewards: list[float]) -> int | None:
    """Return the first step whose samples reach the target; `None` if none does."""
    return next((step for step, x in enumerate(rewards, start=1) if x >= target), None)


if __name__ == "__main__":
    main()
