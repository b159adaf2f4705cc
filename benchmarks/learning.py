"""Train the embedded default with every policy loss, advantage estimator and KL placement.

    python benchmarks/learning.py [--only gspo "KL in both"] [--steps 30]

All runs start from the same model and take 128 samples per step: of 128 prompts, or 4 of each of 32
where responses are compared. Options beyond the method itself follow its authors where that matters
(GSPO's clip has a different scale, REINFORCE is meant for one optimizer step per rollout); nothing
else is tuned. Printed for each method: held-out accuracy, sampled at temperature 1, before and
after; mean training accuracy of the last five steps; final entropy and KL. Takes a minute per
method on two cores; writes results/learning.json and results/learning.png. Needs the extra `docs`.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
GROUPS = {"data.train_batch_size": 32, "rollout.n": 4, "actor.ppo_mini_batch_size": 8}
WITHOUT_CRITIC = {"trainer.critic_warmup": 0}
METHODS = {
    "vanilla, gae": {},
    "importance": {"actor.policy_loss": "importance"},
    "gspo": {
        "actor.policy_loss": "gspo",
        "actor.clip_ratio_low": 3e-4,
        "actor.clip_ratio_high": 4e-4,
        "actor.loss_agg_mode": "seq-mean-token-mean",
    },
    "gmpo": {
        "actor.policy_loss": "gmpo",
        "actor.clip_ratio": 0.4,
        "actor.loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {"actor.policy_loss": "cispo"},
    "reinforce": {
        "actor.policy_loss": "reinforce",
        "actor.ppo_mini_batch_size": 128,
        "actor.optim.lr": 1e-3,
    },
    "gae, lambda 1": {"algorithm.lam": 1.0},
    "gae, critic's lambda 1": {"algorithm.critic_lam": 1.0},
    "gae, lambda by length": {"algorithm.lam_length_alpha": 0.5, "algorithm.critic_lam": 1.0},
    "gae, normalised values": {"critic.normalize_values": True},
    "grpo": WITHOUT_CRITIC | GROUPS | {"algorithm.adv_estimator": "grpo"},
    "rloo": WITHOUT_CRITIC | GROUPS | {"algorithm.adv_estimator": "rloo"},
    "reinforce++": WITHOUT_CRITIC | {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "reinforce++ baseline": WITHOUT_CRITIC
    | GROUPS
    | {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "KL in reward": {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.01},
    "KL in reward, adaptive": {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.01,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.horizon": 1000,
    },
    "KL in loss, k2": {
        "actor.use_kl_loss": True,
        "actor.kl_loss_type": "k2",
        "actor.kl_loss_coef": 0.01,
    },
    "KL in loss, k3": {
        "actor.use_kl_loss": True,
        "actor.kl_loss_type": "k3",
        "actor.kl_loss_coef": 0.01,
    },
    "KL in loss, full": {
        "actor.use_kl_loss": True,
        "actor.kl_loss_type": "full",
        "actor.kl_loss_coef": 0.01,
    },
    "KL in both": {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.01,
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 0.01,
    },
}
FAMILIES = {
    "policy loss": (*("vanilla, gae", "importance", "gspo", "gmpo", "cispo", "reinforce"),),
    "with a critic": (
        "vanilla, gae",
        "gae, lambda 1",
        "gae, critic's lambda 1",
        "gae, lambda by length",
        "gae, normalised values",
    ),
    "without a critic": (
        "vanilla, gae",
        "grpo",
        "rloo",
        "reinforce++",
        "reinforce++ baseline",
    ),
    "KL": (
        "vanilla, gae",
        "KL in reward",
        "KL in reward, adaptive",
        "KL in loss, k2",
        "KL in loss, k3",
        "KL in loss, full",
        "KL in both",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=METHODS,
        metavar="METHOD",
        help="methods to run; the other rows are taken from the last run with the same steps "
        f"and seed. One of {'; '.join(METHODS)}",
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chosen = args.only or list(METHODS)
    before, runs = harness.machine(), read_last_runs(args.steps, args.seed) if args.only else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            runs[name], versions = run_method(Path(folder), METHODS[name], args.steps, args.seed)
            print(format_run(name, runs[name]), flush=True)
    path = harness.save(
        "learning",
        {
            "machine": before,
            "versions": versions,
            "steps": args.steps,
            "seed": args.seed,
            "runs": runs,
        },
    )
    print(" ".join(f"{name} {value}" for name, value in versions.items()))
    draw(runs)
    print("written:", path)


def read_last_runs(steps: int, seed: int) -> dict:
    """Return the rows of the last run if it had the same length and seed."""
    path = harness.RESULTS / "learning.json"
    last = json.loads(path.read_text()) if path.exists() else {}
    return last["runs"] if (last.get("steps"), last.get("seed")) == (steps, seed) else {}


def run_method(folder: Path, options: dict, steps: int, seed: int) -> tuple[dict, dict]:
    """Run the command once; return the results from its files and the package versions."""
    workdir = folder / f"run{len(list(folder.iterdir()))}"
    start = time.perf_counter()
    train(
        workdir,
        {
            "trainer.total_training_steps": steps,
            "trainer.save_freq": 0,
            "seed": seed,
        }
        | options,
    )
    seconds = time.perf_counter() - start
    with (workdir / "training_metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["reward/mean"]]
    summary = json.loads((workdir / "summary.json").read_text())
    evaluations = summary["evaluations"]
    return {
        "options": options,
        "seconds": seconds,
        "before": evaluations[0]["accuracy"],
        "after": evaluations[-1]["accuracy"],
        "accuracy": [float(row["reward/accuracy"]) for row in rows],
        "entropy": float(rows[-1]["actor/entropy"]),
        "kl": float(rows[-1]["kl/reference"]),
    }, summary["versions"]


def train(workdir: Path, options: dict) -> None:
    """Run `jax_ppo.train` with these options; exit with its output if it fails."""
    command = [
        sys.executable,
        "-m",
        "jax_ppo.train",
        f"--config={ROOT}/configs/arithmetic.py",
        f"--workdir={workdir}",
        "--config.trainer.logger=",
        "--config.trainer.export=False",
        *(f"--config.{name}={value}" for name, value in options.items()),
    ]
    process = subprocess.run(
        harness.end_with_this_process(command), cwd=ROOT, text=True, capture_output=True
    )
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{process.stdout[-2000:]}{process.stderr[-2000:]}")


def format_run(name: str, run: dict) -> str:
    """Format the results of one run."""
    last = statistics.mean(run["accuracy"][-5:])
    return (
        f"{name:24s} held-out {run['before']:.3f} -> {run['after']:.3f}  "
        f"training, last five {last:.3f}  entropy {run['entropy']:.3f}  "
        f"KL {run['kl']:.3f}  {run['seconds']:.0f} s"
    )


def draw(runs: dict) -> None:
    """Plot training accuracy by family to results/learning.png."""
    figure = Figure(figsize=(16, 4), layout="constrained")
    for axes, (family, names) in zip(
        figure.subplots(1, len(FAMILIES), sharey=True), FAMILIES.items(), strict=True
    ):
        for name in (name for name in names if name in runs):
            accuracy = runs[name]["accuracy"]
            axes.plot(
                range(1, len(accuracy) + 1),
                accuracy,
                label=name,
                color="black" if name == names[0] else None,
            )
        axes.set(title=family, xlabel="step", ylabel="training accuracy")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(harness.RESULTS / "learning.png", dpi=100)


if __name__ == "__main__":
    main()
