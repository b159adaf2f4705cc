"""Compare seconds of a whole PPO step: jax_ppo, hand-written compiled torch, TRL and tunix.

    sh benchmarks/peers.sh peers
    python benchmarks/ppo_step.py --peers peers/bin/python
    python benchmarks/ppo_step.py --peers peers/bin/python --response 128
    python benchmarks/ppo_step.py --peers peers/bin/python --lengths verl
    python benchmarks/ppo_step.py --peers peers/bin/python --reward model

One response to each of 32 prompts of 64 tokens; actor, critic and reference of 4 layers and hidden
size 256; one epoch, one mini-batch, temperature 1, GAE with lambda 0.95, KL in the reward, AdamW at
1e-5 for actor and critic. All sides are compiled where their library offers it, and compile before
their measured turns. TRL supports only a reward model; tunix uses the rule. The floor runs the
step's matrix products and nothing else. With random lengths torch runs twice: sorted by length in
micro-batches with their own width, and, as is common, padded to the longest.

Before the measurement, a short search tunes the micro-batches of each peer at this shape and prints
its results: every size is run for a few steps, and each setting takes the size with the fewest
seconds per token in the phases that it affects. jax_ppo runs with its defaults.

Each measured step is followed by one that waits after each phase, so that both happen at the same
speed of the machine. The medians of the phases, including `other`, must add up to the median step
within 10 %, or the exit status is 1.
"""

import argparse
import json
import sys
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
REWARD_SIDES = {"rule": "tunix", "model": "trl"}  # library that runs with this reward
LENGTH_SIDES = {"forced": [], "verl": ["torch-padded"]}  # additional sides for these lengths
RESPONSE = {"forced": 64, "verl": workload.VERL["longest"]}

FLEXIBLE_SIDES = ("ours", "trl")  # also on a GPU, in bfloat16, with adapters
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}

SCORING = ("reference", "values", "reward")
TORCH_SETTINGS = {"train_rows": ("update",), "forward_rows": SCORING}
# Micro-batch settings of each peer, with the phases whose time they affect.
MICRO_BATCH_SETTINGS = {
    "torch": TORCH_SETTINGS,
    "torch-padded": TORCH_SETTINGS,
    "trl": {"train_rows": ("update",), "forward_rows": ("rollout", *SCORING)},
    "tunix": {
        "train_rows": ("update",),
        "forward_rows": ("reference", "old_logprobs", "values"),
        "rollout_rows": ("rollout",),
    },
}
# Sizes that the search tries. Generating two responses at a time is never fast, and TRL and tunix
# would need minutes per step for it.
SEARCHED_ROWS = {
    "torch": (2, 4, 8, 16, 32),
    "torch-padded": (4, 8, 16, 32),
    "trl": (4, 8, 16, 32),
    "tunix": (4, 8, 16, 32),
}


def main() -> int:
    """Run the comparison and return the exit status."""
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        settings = make_settings(args, Path(folder))
        before = harness.machine()
        search = {
            side: search_micro_batches(side, settings, args)
            for side in args.sides
            if side in MICRO_BATCH_SETTINGS
        }
        workers = [
            start_worker(side, settings, args, search[side]["chosen"] if side in search else {})
            for side in args.sides
        ]
        first = {worker.name: worker.turn() for worker in workers}
        answers, split = harness.interleave(workers, args.turns, args.warm_up, split=True)
        for worker in workers:
            worker.close()
    sides = {
        worker.name: {
            "first_turn_seconds": first[worker.name]["seconds"],
            "micro_batches": search.get(worker.name, {}).get("chosen"),
            "versions": worker.versions,
        }
        | summarize(answers[worker.name], split[worker.name])
        for worker in workers
    }
    show(sides)
    result = {
        "settings": settings,
        "machine": before,
        "turns": args.turns,
        "warm_up": args.warm_up,
        "search": search,
        "sides": sides,
        "answers": answers,
        "split": split,
    }
    print("written:", harness.save(result_name(args), result))
    return report_splits(sides)


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
        choices=RESPONSE,
        default="forced",
        help="equal lengths, or random ones as in verl's published run on GSM8K: "
        "mean 307, at most 512",
    )
    parser.add_argument(
        "--response",
        type=int,
        help="tokens of a response, or with --lengths verl the limit, with the mean in proportion; "
        "default: 64, or 512",
    )
    parser.add_argument(
        "--size", choices=workload.SIZES, default="small", help="of all models; random weights"
    )
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: one GPU, matrix products in bfloat16, weights in float32; sides ours and trl; "
        "peak memory is the GPU's",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the matrix products; default: float32 on a CPU, bfloat16 on a GPU; weights are in "
        "float32; bfloat16 on a CPU: sides ours and trl",
    )
    parser.add_argument(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="train adapters of this rank on all matrices of actor and critic; sides ours and trl",
    )
    parser.add_argument("--samples", type=int, default=32, help="prompts per step")
    parser.add_argument(
        "--reward",
        choices=REWARD_SIDES,
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
        "--search-turns", type=int, default=2, help="steps per micro-batch size, after a warm-up"
    )
    parser.add_argument(
        "--search-rows",
        type=lambda text: [int(rows) for rows in text.split(",")],
        metavar="ROWS,...",
        help="micro-batch sizes that the search tries; default: "
        + ", ".join(f"{side} {format_rows(rows)}" for side, rows in SEARCHED_ROWS.items()),
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="do not compile torch: at SmolLM2's size that takes over ten minutes per size",
    )
    parser.add_argument(
        "--sizes-from",
        type=Path,
        metavar="RESULT",
        help="result file of an earlier run at this shape; its peers are not searched again",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="ROWS",
        help="skip the search and use this micro-batch size for all settings of all peers",
    )
    args = parser.parse_args()
    known = ["ours", "torch", REWARD_SIDES[args.reward], *LENGTH_SIDES[args.lengths]]
    if args.size == "small":
        known.append("floor")
    if args.platform == "cuda" or args.dtype == "bfloat16" or args.lora:
        known = [side for side in known if side in FLEXIBLE_SIDES]
    args.dtype = args.dtype or DTYPES[args.platform]
    args.sides = args.sides or known
    args.response = args.response or RESPONSE[args.lengths]
    harness.validate_sides(parser, args, known)
    return args


def format_rows(rows: tuple[int, ...]) -> str:
    """Return sizes as the command line takes them."""
    return ",".join(map(str, rows))


def result_name(args: argparse.Namespace) -> str:
    """Return the name of the result file; runs at other than the default sizes get their own."""
    name = f"ppo_step_{args.lengths}_{args.reward}"
    if args.platform != "cpu":
        name += f"_{args.platform}"
    if args.dtype != DTYPES[args.platform]:
        name += f"_{args.dtype}"
    if args.lora:
        name += f"_lora{args.lora}"
    if args.size != "small":
        name += f"_{args.size}"
    if args.response != RESPONSE[args.lengths]:
        name += f"_{args.response}"
    if args.samples != 32:
        name += f"_{args.samples}_samples"
    if args.platform == "cpu" and not {"ours", "torch", REWARD_SIDES[args.reward]} <= set(
        args.sides
    ):
        name += "_" + "_".join(args.sides)
    return name


def make_settings(args: argparse.Namespace, folder: Path) -> dict:
    """Create the models and return the settings shared by all workers."""
    verl = workload.VERL
    size = workload.SIZES[args.size]
    mean = round(verl["mean"] * args.response / verl["longest"])
    chance = workload.eos_chance(mean, args.response) if args.lengths == "verl" else 0.0
    reward_model = ""
    if args.reward == "model":
        reward_model = str(workload.make_model(folder / "reward", score=True, seed=1, **size))
    return {
        "model": str(workload.make_model(folder / "model", chance, **size)),
        "reward_model": reward_model,
        "platform": args.platform,
        "dtype": args.dtype,
        "lora": args.lora,
        "samples": args.samples,
        "prompt": 64,
        "response": args.response,
        "mean_response": mean,
        "equal_lengths": args.lengths == "forced",
        "eager": args.eager,
        "lr": 1e-5,
        "lam": 0.95,
        "kl_coef": 0.04,
    }


def start_worker(
    side: str, settings: dict, args: argparse.Namespace, micro_batches: dict
) -> harness.Worker:
    """Start the worker of a side with its micro-batch sizes."""
    static_widths = micro_batches.get("static_widths", False)
    rows = {name: size for name, size in micro_batches.items() if name != "static_widths"}
    own_settings = {
        "micro_batches": rows,
        "static_widths": static_widths,
        "by_length": side != "torch-padded" and not settings["equal_lengths"],
    }
    python = None if side == "ours" else args.peers
    variables = {"TORCHDYNAMO_DISABLE": "1"} if args.eager else {}
    return harness.Worker(
        side, SIDES[side], settings | own_settings, python, args.platform, variables
    )


def search_micro_batches(side: str, settings: dict, args: argparse.Namespace) -> dict:
    """Find a peer's fastest micro-batch sizes at this shape.

    Each size is used for all settings of the peer at once. A setting then takes the size with the
    fewest seconds per token in the phases that it affects, as phases run one after another.

    Returns:
      `chosen`, the size of each setting, and `tried`, milliseconds per token by phase of each size.
    """
    names = MICRO_BATCH_SETTINGS[side]
    if args.sizes_from:
        earlier = json.loads(args.sizes_from.read_text())["search"]
        if side in earlier:
            return earlier[side]
    if args.micro_batch:
        return {"chosen": dict.fromkeys(names, args.micro_batch), "tried": []}
    sizes = [
        rows for rows in args.search_rows or SEARCHED_ROWS[side] if rows <= settings["samples"]
    ]
    candidates = [dict.fromkeys(names, rows) for rows in sizes]
    if side == "torch" and not settings["equal_lengths"]:
        # Programs compiled for each multiple of 64 tokens instead of any width.
        candidates.append(
            dict.fromkeys(names, min(8, settings["samples"])) | {"static_widths": True}
        )
    tried = []
    for candidate in candidates:
        tried.append({"candidate": candidate} | measure_candidate(side, settings, args, candidate))
        print(format_candidate(side, tried[-1]), flush=True)
    chosen = {}
    for width in (False, True):
        pool = [row for row in tried if row["candidate"].get("static_widths", False) == width]
        if not pool:
            continue
        best = {
            name: min(pool, key=lambda row, phases=phases: phase_sum(row, phases))
            for name, phases in names.items()
        }
        combined = {name: row["candidate"][name] for name, row in best.items()}
        cost = sum(phase_sum(row, names[name]) for name, row in best.items())
        if not chosen or cost < chosen["cost"]:
            chosen = {"cost": cost, "rows": combined | ({"static_widths": True} if width else {})}
    print(f"search {side}: chosen {chosen['rows']}", flush=True)
    return {"chosen": chosen["rows"], "tried": tried}


def measure_candidate(side: str, settings: dict, args: argparse.Namespace, candidate: dict) -> dict:
    """Run a few steps; return the fewest milliseconds per token of each phase."""
    worker = start_worker(side, settings, args, candidate)
    worker.turn(split=True)
    turns = [worker.turn(split=True) for _ in range(args.search_turns)]
    worker.close()
    return {
        "milliseconds_per_token": min(1000 * turn["seconds"] / turn["tokens"] for turn in turns),
        "phases": {
            name: min(1000 * turn["phases"][name] / turn["tokens"] for turn in turns)
            for name in turns[0]["phases"]
        },
    }


def phase_sum(row: dict, phases: tuple[str, ...]) -> float:
    """Return the milliseconds per token of these phases."""
    return sum(row["phases"].get(name, 0.0) for name in phases)


def format_candidate(side: str, row: dict) -> str:
    """Format the result of one micro-batch size."""
    sizes = ", ".join(f"{name} {size}" for name, size in row["candidate"].items())
    phases = ", ".join(f"{name} {value:.3f}" for name, value in row["phases"].items())
    return f"search {side}: {sizes}: {row['milliseconds_per_token']:.3f} ms per token ({phases})"


def summarize(answers: list[dict], split: list[dict]) -> dict:
    """Summarize seconds and tokens per step, and seconds and milliseconds per token of each phase.

    The step's figures come from the turns that do not wait after each phase.
    """
    figures = {
        name: harness.spread([turn[name] for turn in answers])
        for name in ("seconds", "cpu_seconds", "peak_gib", "tokens")
    }
    for name in ("padded_tokens_per_token", "row_steps_per_token"):
        if name in answers[0]:
            figures[name] = harness.spread([turn[name] for turn in answers])
    per_token = harness.spread([1000 * turn["seconds"] / turn["tokens"] for turn in answers])
    split_phases = [complete_phases(turn) for turn in split]
    phases = {
        name: harness.spread([seconds[name] for seconds in split_phases])
        for name in split_phases[0]
    }
    # Lengths are drawn anew in every turn, so the split must add up per token.
    phases_per_token = {
        name: harness.spread(
            [
                1000 * seconds[name] / turn["tokens"]
                for seconds, turn in zip(split_phases, split, strict=True)
            ]
        )
        for name in split_phases[0]
    }
    medians = {name: spread["median"] for name, spread in phases_per_token.items()}
    return figures | {
        "milliseconds_per_token": per_token,
        "phases": phases,
        "phases_milliseconds_per_token": phases_per_token,
        "split_error": sum(medians.values()) / per_token["median"] - 1,
    }


def complete_phases(turn: dict) -> dict[str, float]:
    """Return the seconds of each phase of a turn and of `other`, the time outside all phases."""
    other = turn["seconds"] - sum(turn["phases"].values())
    return turn["phases"] | {"other": other}


def show(sides: dict) -> None:
    """Print the results of every side: medians, with interquartile ranges in parentheses."""
    ours = sides.get("ours")
    for name, side in sides.items():
        seconds, per_token = side["seconds"]["median"], side["milliseconds_per_token"]
        line = (
            f"{name:12s} {harness.format_spread(side['seconds'], '.3f')} s per step, "
            f"CPU {harness.format_spread(side['cpu_seconds'], '.3f')} s, "
            f"peak {side['peak_gib']['max']:.2f} GiB, {side['tokens']['median']:.0f} tokens, "
            f"{harness.format_spread(per_token, '.3f')} ms per token, "
            f"first {side['first_turn_seconds']:.1f} s"
        )
        if ours and name != "ours":
            line += (
                f"; {seconds / ours['seconds']['median']:.2f}x our step, "
                f"{per_token['median'] / ours['milliseconds_per_token']['median']:.2f}x per token"
            )
        print(line)
        phases = ", ".join(
            f"{phase} {seconds['median']:.3f} s "
            f"({side['phases_milliseconds_per_token'][phase]['median']:.3f} ms per token)"
            for phase, seconds in side["phases"].items()
        )
        print(f"{'':12s} {phases}; together {side['split_error']:+.1%} of the step per token")
        if "padded_tokens_per_token" in side:
            print(
                f"{'':12s} {side['padded_tokens_per_token']['median']:.2f} padded tokens per token "
                f"in training, {side['row_steps_per_token']['median']:.2f} row-steps per token"
            )
    for name, side in sides.items():
        print(
            f"{name:12s}",
            " ".join(f"{package} {version}" for package, version in side["versions"].items()),
        )


def report_splits(sides: dict) -> int:
    """Return 1, with a message, if a side's phases do not add up to its step, and 0 otherwise."""
    wrong = [
        f"{name} {side['split_error']:+.1%}"
        for name, side in sides.items()
        if abs(side["split_error"]) > harness.SPLIT_TOLERANCE
    ]
    if wrong:
        print(
            f"the phases differ from the step by more than {harness.SPLIT_TOLERANCE:.0%}: "
            f"{', '.join(wrong)}; was the machine idle?",
            file=sys.stderr,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
