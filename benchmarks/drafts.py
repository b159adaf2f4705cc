"""Measure the tokens that drafts keep, and the time of rollouts with them (rollout.verify_drafts).

    python benchmarks/drafts.py MODEL DATA

MODEL is a Hugging Face folder with a chat template, DATA holds GSM8K's train.jsonl. GRPO trains all
weights on the share of digits in answers to the same questions in two epochs, in three ways, each
in a separate process, one after the other: without drafts; with drafts sampled one step ahead
(`rollout.max_staleness=1`); and with those of the earlier epoch. Prints, of the steps of the second
epoch, the share of tokens that drafts had, the mean length of responses and the median seconds of a
rollout. Where drafts are one step ahead, these include sampling the next drafts, except in the last
step, which needs none. Writes results/drafts.json. 512 tokens are the longest responses of verl's
published run on GSM8K.
"""

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import harness

ROOT = Path(__file__).parents[1]
WAYS = {
    "sampled": {},
    "one step ahead": {"rollout.verify_drafts": True, "rollout.max_staleness": 1},
    "earlier epoch": {"rollout.verify_drafts": True},
}
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(str.isdigit, solution_str)) / max(len(solution_str), 1)
"""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("data", type=Path, help="folder with GSM8K's train.jsonl")
    cases = "64:1e-5,64:1e-6,512:1e-6"
    parser.add_argument("--cases", default=cases, help="maximum tokens and learning rate of each")
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--samples", type=int, default=4, help="responses to a prompt")
    parser.add_argument("--steps", type=int, default=2, help="steps of an epoch")
    arguments = parser.parse_args()
    conditions = {
        "machine": harness.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax")},
        "settings": {name: getattr(arguments, name) for name in ("prompts", "samples", "steps")},
    }
    results = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reward.py").write_text(REWARD)
        for case in arguments.cases.split(","):
            response, _, lr = case.partition(":")
            for way, changes in WAYS.items():
                figures = {"response": int(response), "lr": float(lr), "way": way}
                figures |= run(arguments, Path(folder), response, lr, changes)
                print(", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
                results.append(figures)
    print("written:", harness.save("drafts", conditions | {"results": results}))


def run(
    arguments: argparse.Namespace, folder: Path, response: str, lr: str, changes: dict[str, object]
) -> dict[str, float]:
    """Train for two epochs in one way; return the figures of the second one."""
    prompts = arguments.steps * arguments.prompts
    options = {
        "model.path": arguments.model,
        "model.dtype": "float32",
        "model.gradient_checkpointing": False,
        "data.train_files": f"{arguments.data / 'train.jsonl'}[:{prompts}]",
        "data.val_files": "",
        "data.train_batch_size": arguments.prompts,
        "data.max_prompt_length": 256,
        "data.max_response_length": response,
        "reward.function": f"{folder / 'reward.py'}:score",
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_reference": False,
        "rollout.n": arguments.samples,
        "actor.ppo_mini_batch_size": arguments.prompts,
        "actor.ppo_micro_batch_size_per_device": 4,
        "actor.optim.lr": lr,
        "trainer.total_training_steps": 2 * arguments.steps,
        "trainer.test_freq": 0,
        "trainer.save_freq": 0,
        "trainer.val_before_train": False,
        "trainer.export": False,
        "trainer.logger": "",
    }
    workdir = folder / f"{response}_{lr}_{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "jax_ppo.train", "--config=gsm8k", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in (options | changes).items()]
    process = subprocess.Popen(
        harness.end_with_this_process(command),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=sys.stderr,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"exit status {os.waitstatus_to_exitcode(status)}: {' '.join(command)}")
    with (workdir / "training_metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) > arguments.steps]
    shares = [float(row.get("rollout/accepted_share") or 0) for row in rows]
    return {
        "kept": round(statistics.mean(shares), 3),
        "kept_least": round(min(shares), 3),
        "kept_most": round(max(shares), 3),
        "length": round(statistics.mean(float(row["response_length/mean"]) for row in rows), 1),
        "rollout_seconds": round(
            statistics.median(float(row["seconds/rollout"]) for row in rows), 2
        ),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
    }


if __name__ == "__main__":
    main()
