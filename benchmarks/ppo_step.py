"""Compare seconds of a whole PPO step: jax_ppo, hand-written compiled torch, TRL and tunix.

    sh benchmarks/peers.sh peers
    python benchmarks/ppo_step.py --peers peers/bin/python
    python benchmarks/ppo_step.py --peers peers/bin/python --lengths verl
    python benchmarks/ppo_step.py --peers peers/bin/python --reward model

One response to each of 32 prompts of 64 tokens; actor, critic and reference of 4 layers and hidden
size 256; one epoch, one mini-batch, temperature 1, GAE with lambda 0.95, KL in the reward, AdamW at
1e-5 for actor and critic. Each side compiles before its measured turns. TRL supports only a reward
model; tunix uses the rule. The floor runs the step's matrix products and nothing else. With random
lengths torch runs twice: in micro-batches of similar length, and, as is common, in one batch padded
to the longest.
"""

import argparse
import json
import tempfile
from pathlib import Path

import harness
import workload

SIDES = {
    "ours": "ours_ppo.py",
    "torch": "torch_ppo.py",
    "torch-padded": "torch_ppo.py",
    "trl": "trl_ppo.py",
    "tunix": "tunix_ppo.py",
    "floor": "floor.py",
}
OF_REWARD = {"rule": "tunix", "model": "trl"}  # side that runs with this reward only
OF_LENGTHS = {"forced": [], "verl": ["torch-padded"]}  # additional sides for these lengths
LONGEST = {"forced": 64, "verl": workload.VERL["longest"]}


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        settings = make_settings(args, Path(folder))
        before = harness.machine()
        workers = [
            harness.Worker(
                side,
                SIDES[side],
                settings | {"by_length": side != "torch-padded"},
                None if side == "ours" else args.peers,
            )
            for side in args.sides
        ]
        first = {worker.name: worker.turn()["seconds"] for worker in workers}
        answers = harness.interleave(workers, args.turns, args.warm_up)
        split = harness.interleave(workers, args.split, 0)
        for worker in workers:
            worker.close()
    sides = {
        worker.name: {"first_turn_seconds": first[worker.name], "versions": worker.versions}
        | summary(answers[worker.name], split[worker.name])
        for worker in workers
    }
    show(sides)
    result = {
        "settings": settings,
        "machine": before,
        "turns": args.turns,
        "warm_up": args.warm_up,
        "sides": sides,
        "answers": answers,
        "split": split,
    }
    part = (
        ""
        if {"ours", "torch", OF_REWARD[args.reward]} <= set(args.sides)
        else "_" + "_".join(args.sides)
    )
    print("written:", harness.save(f"ppo_step_{args.lengths}_{args.reward}{part}", result))


def parse() -> argparse.Namespace:
    """Parse and validate the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers",
        help="Python of the environment that peers.sh made; required for every side except ours",
    )
    parser.add_argument(
        "--lengths",
        choices=LONGEST,
        default="forced",
        help="64 tokens each, or random lengths as in verl's published run on GSM8K: "
        "mean 307, at most 512",
    )
    parser.add_argument(
        "--reward",
        choices=OF_REWARD,
        default="rule",
        help="a host rule, or a model of the actor's size",
    )
    parser.add_argument(
        "--sides",
        type=lambda text: text.split(","),
        help=f"comma-separated, from {', '.join(SIDES)}",
    )
    parser.add_argument("--turns", type=int, default=9, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=3, help="unmeasured steps before them")
    parser.add_argument(
        "--split",
        type=int,
        default=3,
        help="steps after them, with every phase timed separately",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=JSON",
        help="override an option of our config",
    )
    args = parser.parse_args()
    known = ["ours", "torch", OF_REWARD[args.reward], *OF_LENGTHS[args.lengths], "floor"]
    args.sides = args.sides or known
    harness.check_sides(parser, args, known)
    return args


def make_settings(args: argparse.Namespace, folder: Path) -> dict:
    """Create the models and return the settings shared by all workers."""
    chance = workload.eos_chance(**workload.VERL) if args.lengths == "verl" else 0.0
    return {
        "model": str(workload.make_model(folder / "model", chance)),
        "reward_model": str(workload.make_model(folder / "reward", score=True, seed=1))
        if args.reward == "model"
        else "",
        "samples": 32,
        "prompt": 64,
        "response": LONGEST[args.lengths],
        "equal_lengths": args.lengths == "forced",
        "lr": 1e-5,
        "lam": 0.95,
        "kl_coef": 0.04,
        "plain_turns": 1 + args.warm_up + args.turns,
        "ours": {
            name: json.loads(value) for name, value in (change.split("=", 1) for change in args.set)
        },
    }


def summary(answers: list[dict], split: list[dict]) -> dict:
    """Summarise seconds and tokens per step, and median seconds of each phase when timed apart."""
    phases = {
        name: [turn["phases"].get(name, 0.0) for turn in split]
        for name in (split[0]["phases"] if split else ())
    }
    return {
        "seconds": harness.spread([turn["seconds"] for turn in answers]),
        "tokens": harness.spread([turn["tokens"] for turn in answers]),
        "milliseconds_per_token": harness.spread(
            [1000 * turn["seconds"] / turn["tokens"] for turn in answers]
        ),
        "phases": {name: harness.spread(seconds)["median"] for name, seconds in phases.items()},
    }


def show(sides: dict) -> None:
    """Print the results of every side."""
    ours = sides.get("ours")
    for name, side in sides.items():
        seconds, per_token = side["seconds"], side["milliseconds_per_token"]["median"]
        line = (
            f"{name:12s} {seconds['median']:.3f} s per step "
            f"({seconds['min']:.3f}-{seconds['max']:.3f}), "
            f"{side['tokens']['median']:.0f} tokens, {per_token:.3f} ms per token, "
            f"first {side['first_turn_seconds']:.1f} s"
        )
        if ours and name != "ours":
            line += (
                f"; {seconds['median'] / ours['seconds']['median']:.2f}x our step, "
                f"{per_token / ours['milliseconds_per_token']['median']:.2f}x per token"
            )
        print(line)
        print(
            " " * 12, ", ".join(f"{phase} {value:.3f}" for phase, value in side["phases"].items())
        )
    for name, side in sides.items():
        print(
            f"{name:12s}",
            " ".join(f"{package} {version}" for package, version in side["versions"].items()),
        )


if __name__ == "__main__":
    main()
