"""Compare tokens per second of sampling alone: jax_ppo, hand-written torch, transformers and tunix.

    sh benchmarks/peers.sh peers
    python benchmarks/decode.py --peers peers/bin/python
    python benchmarks/decode.py --peers peers/bin/python --cases verl --sides ours,torch

The model has 4 layers, hidden size 256 and a vocabulary of 4,096, in float32; prompts have 64
tokens; the temperature is 1. Response tokens are counted including the EOS that ends a response.
jax_ppo, the hand-written torch decoder, tunix and `transformers-static` are compiled; `generate`
with its defaults is eager, as is `generate_batch` on a CPU. The torch decoder drops finished rows
from its batch. Sides that cannot refill the row of a finished response get the prompts in batches.
Printed are medians with interquartile ranges, in wall-clock and in processor time. The cases
`tight` and `roomy` have the same responses but limits of 128 and 1,024 tokens; their difference is
the cost of unused room.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path

import harness
import workload

SIDES = {
    "ours": "ours_decode.py",
    "torch": "torch_decode.py",
    "transformers": "transformers_decode.py",
    "transformers-static": "transformers_decode.py",
    "transformers-continuous": "transformers_decode.py",
    "tunix": "tunix_decode.py",
}
PROMPT = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload.

    Attributes:
      prompts: Prompts per turn.
      rows: Prompts decoded at a time.
      response: Maximum tokens of a response.
      chance: Probability of EOS at each token.
    """

    prompts: int
    rows: int
    response: int
    chance: float = 0.0


CASES = {
    "32x64": Case(32, 32, 64),
    "8x256": Case(8, 8, 256),
    "verl": Case(128, 32, workload.VERL["longest"], workload.eos_chance(**workload.VERL)),
    "tight": Case(32, 32, 128, 1 / 16),
    "roomy": Case(32, 32, 1024, 1 / 16),
}


def main() -> None:
    args = parse()
    before, results = harness.machine(), {}
    for name in args.cases:
        results[name] = measure(name, CASES[name], args)
    chosen = [
        names for names, known in ((args.cases, CASES), (args.sides, SIDES)) if names != list(known)
    ]
    part = "".join("_" + name for names in chosen for name in names)
    result = {
        "machine": before,
        "turns": args.turns,
        "warm_up": args.warm_up,
        "prompt": PROMPT,
        "cases": results,
    }
    print("written:", harness.save(f"decode{part}", result))


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
        "--cases",
        type=lambda text: text.split(","),
        default=list(CASES),
        help=f"comma-separated, from {', '.join(CASES)}",
    )
    parser.add_argument(
        "--sides",
        type=lambda text: text.split(","),
        default=list(SIDES),
        help=f"comma-separated, from {', '.join(SIDES)}",
    )
    parser.add_argument("--turns", type=int, default=7, help="measured turns")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=2,
        help="unmeasured turns before them, which compile nearly everything",
    )
    args = parser.parse_args()
    if wrong := [name for name in args.cases if name not in CASES]:
        parser.error(f"--cases {','.join(wrong)}: expected some of {', '.join(CASES)}")
    harness.validate_sides(parser, args, SIDES)
    return args


def measure(name: str, case: Case, args: argparse.Namespace) -> dict:
    """Measure all sides on one case and print their speeds."""
    with tempfile.TemporaryDirectory() as folder:
        model = workload.make_model(Path(folder) / "model", case.chance)
        settings = dataclasses.asdict(case) | {"model": str(model), "prompt": PROMPT}
        workers = [
            harness.Worker(
                side, SIDES[side], settings | {"side": side}, None if side == "ours" else args.peers
            )
            for side in args.sides
        ]
        answers, _ = harness.interleave(workers, args.turns, args.warm_up)
        for worker in workers:
            worker.close()
    print(
        f"{name}: {case.prompts} prompts in {case.rows} rows, at most {case.response} tokens, "
        f"EOS probability {case.chance:.4f}"
    )
    result = {}
    for worker in workers:
        turns = answers[worker.name]
        speeds = harness.spread([turn["tokens"] / turn["seconds"] for turn in turns])
        result[worker.name] = {
            "tokens_per_second": speeds,
            "seconds": harness.spread([turn["seconds"] for turn in turns]),
            "cpu_seconds": harness.spread([turn["cpu_seconds"] for turn in turns]),
            "versions": worker.versions,
            "answers": turns,
        }
        print(
            f"  {worker.name:24s}{harness.format_spread(speeds, '.0f')} tokens/s, "
            f"{harness.format_spread(result[worker.name]['seconds'], '.2f')} s, CPU "
            f"{harness.format_spread(result[worker.name]['cpu_seconds'], '.2f')} s"
        )
    return dataclasses.asdict(case) | {"sides": result}


if __name__ == "__main__":
    main()
