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
import json
import statistics
import tempfile
import time
from pathlib import Path

import harness
from matplotlib.figure import Figure

GROUPS = {"data.train_batch_size": 32, "rollout.n": 4, "actor.ppo_mini_batch_size": 8}
WITHOUT_CRITIC = {"trainer.critic_warmup": 0}
KL_IN_REWARD = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.01}
KL_IN_LOSS = {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01}
BASELINE = {"vanilla, gae": {}}
FAMILIES = {  # of methods, by what they vary; the baseline belongs to each
    "policy loss": {
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
    },
    "with a critic": {
        "gae, lambda 1": {"algorithm.lam": 1.0},
        "gae, critic's lambda 1": {"algorithm.critic_lam": 1.0},
        "gae, lambda by length": {"algorithm.lam_length_alpha": 0.5, "algorithm.critic_lam": 1.0},
        "gae, normalised values": {"critic.normalize_values": True},
    },
    "without a critic": {
        "grpo": WITHOUT_CRITIC | GROUPS | {"algorithm.adv_estimator": "grpo"},
        "rloo": WITHOUT_CRITIC | GROUPS | {"algorithm.adv_estimator": "rloo"},
        "reinforce++": WITHOUT_CRITIC | {"algorithm.adv_estimator": "reinforce_plus_plus"},
        "reinforce++ baseline": WITHOUT_CRITIC
        | GROUPS
        | {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    },
    "KL": {
        "KL in reward": KL_IN_REWARD,
        "KL in reward, adaptive": KL_IN_REWARD
        | {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.horizon": 1000},
        "KL in loss, k2": KL_IN_LOSS | {"actor.kl_loss_type": "k2"},
        "KL in loss, k3": KL_IN_LOSS | {"actor.kl_loss_type": "k3"},
        "KL in loss, full": KL_IN_LOSS | {"actor.kl_loss_type": "full"},
        "KL in both": KL_IN_REWARD | KL_IN_LOSS,
    },
}
METHODS = BASELINE | {name: x for family in FAMILIES.values() for name, x in family.items()}


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
    own = {
        "trainer.total_training_steps": steps,
        "trainer.save_freq": 0,
        "trainer.export": False,
        "trainer.logger": "",
        "seed": seed,
    }
    rows = harness.run_command("train", "arithmetic", workdir, own | options)
    seconds = time.perf_counter() - start
    rows = [row for row in rows if row["reward/mean"]]
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
        for name in (name for name in BASELINE | names if name in runs):
            accuracy = runs[name]["accuracy"]
            axes.plot(
                range(1, len(accuracy) + 1),
                accuracy,
                label=name,
                color="black" if name in BASELINE else None,
            )
        axes.set(title=family, xlabel="step", ylabel="training accuracy")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(harness.RESULTS / "learning.png", dpi=100)


if __name__ == "__main__":
    main()
