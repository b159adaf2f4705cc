"""Compare `jax_ppo.evaluate` with transformers' `generate` on GSM8K's test questions.

    python benchmarks/gsm8k_evaluation.py MODEL DATA [--questions 256] [--response 512]

MODEL is a Hugging Face folder with a chat template, DATA holds GSM8K's test.jsonl. Both sides
answer the first questions greedily in float32, in separate processes that run one after the other,
each timed from its start to its end, imports, loading and compilation included. The prompts must be
equal token by token; the same rule scores both, taking the last number of a response as its answer.
`generate` gets its prompts sorted by length, padded on the left, in batches of the fastest of
--rows, found before with short prompts and not counted. Printed are accuracy, wall-clock and
processor seconds, response tokens per second of wall-clock time, and peak memory;
results/gsm8k_evaluation.json has them, too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

ROOT = Path(__file__).parents[1]


def main() -> None:
    args = parse()
    before = harness.machine()
    with tempfile.TemporaryDirectory() as folder:
        rows = find_rows(args, Path(folder))
        sides = {
            "ours": run(ours_command(args, Path(folder) / "ours")),
            "transformers": run(
                transformers_command(args, Path(folder) / "transformers", rows["chosen"])
            ),
        }
        responses = {
            "ours": read_rows(Path(folder) / "ours" / "rollouts" / "evaluation_000000.jsonl"),
            "transformers": read_rows(Path(folder) / "transformers"),
        }
        summary = json.loads((Path(folder) / "ours" / "summary.json").read_text())
    ours, theirs = responses.values()
    if [row["prompt_ids"] for row in ours] != [row["prompt_ids"] for row in theirs]:
        sys.exit("the sides got different prompts")
    for name, side in sides.items():
        side |= score(responses[name], [row["ground_truth"] for row in ours])
        side["tokens_per_second"] = side["tokens"] / side["seconds"]
        print(
            f"{name:13s} accuracy {side['accuracy']:.3f}, {side['seconds']:.0f} s, CPU "
            f"{side['cpu_seconds']:.0f} s, {side['tokens']} tokens, "
            f"{side['tokens_per_second']:.1f} tokens/s, peak {side['peak_gib']:.2f} GiB"
        )
    pairs = list(zip(ours, theirs, strict=True))
    equal = sum(a["response_ids"] == b["response_ids"] for a, b in pairs)
    print(f"{equal} of {len(pairs)} responses are equal token by token")
    result = {
        "machine": before,
        "questions": args.questions,
        "response": args.response,
        "rows": rows,
        "equal_responses": equal,
        "versions": summary["versions"],
        "compilations": summary["compilations"],
        "sides": sides,
    }
    print("written:", harness.save("gsm8k_evaluation", result))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("data", type=Path, help="folder with GSM8K's test.jsonl")
    parser.add_argument(
        "--peers", default=sys.executable, help="Python with torch; default: this one"
    )
    parser.add_argument("--questions", type=int, default=256, help="from the start of the file")
    parser.add_argument("--response", type=int, default=512, help="maximum tokens of a response")
    parser.add_argument(
        "--rows",
        type=lambda text: [int(rows) for rows in text.split(",")],
        default=[16, 32, 64, 128],
        help="batch sizes of generate to try, separated by commas",
    )
    return parser.parse_args()


def ours_command(args: argparse.Namespace, workdir: Path) -> list[str]:
    """Return the command of our side."""
    return [
        *(sys.executable, "-m", "jax_ppo.evaluate", "--config=gsm8k", f"--workdir={workdir}"),
        f"--config.model.path={args.model}",
        "--config.model.dtype=float32",
        f"--config.data.val_files={args.data / 'test.jsonl'}",
        f"--config.data.val_max_samples={args.questions}",
        f"--config.data.max_response_length={args.response}",
        "--config.reward.terms=gsm8k[flexible]:1",
    ]


def transformers_command(
    args: argparse.Namespace, output: Path, rows: int, **changes: int
) -> list[str]:
    """Return the command of transformers' side with batches of `rows` prompts."""
    sys.path.insert(0, str(ROOT))
    from jax_ppo import load_config

    settings = {
        "model": str(args.model),
        "questions_file": str(args.data / "test.jsonl"),
        "questions": args.questions,
        "prompt": None,
        "response": args.response,
        "instruction": load_config("gsm8k").data.instruction,
        "rows": rows,
        "output": str(output),
    }
    program = ROOT / "benchmarks" / "workers" / "transformers_evaluation.py"
    return [args.peers, str(program), json.dumps(settings | changes)]


def find_rows(args: argparse.Namespace, folder: Path) -> dict:
    """Return generate's fastest batch size, `chosen`, and the tokens per second of each."""
    speeds = {}
    if len(args.rows) > 1:
        for rows in args.rows:
            output = folder / f"rows_{rows}"
            few = {"questions": max(args.rows), "prompt": 16, "response": 16}
            run(transformers_command(args, output, rows, **few))
            lines = read_rows(output)
            speeds[rows] = sum(len(line["response_ids"]) for line in lines) / max(
                line["seconds"] for line in lines
            )
            print(f"generate in batches of {rows}: {speeds[rows]:.1f} tokens/s", flush=True)
    return {"chosen": max(speeds, key=speeds.get, default=args.rows[0]), "tried": speeds}


def run(command: list[str]) -> dict:
    """Run a process; return its wall-clock and processor seconds and peak memory in GiB."""
    environment = {
        "OMP_NUM_THREADS": str(harness.THREADS),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "benchmarks"), str(ROOT))),
    }
    start = time.perf_counter()
    process = subprocess.Popen(
        harness.end_with_this_process(command), env=os.environ | environment, stdout=sys.stderr
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"exit status {os.waitstatus_to_exitcode(status)}: {' '.join(command)}")
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_gib": usage.ru_maxrss / 2**20,
    }


def read_rows(path: Path) -> list[dict]:
    """Read a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def score(rows: list[dict], ground_truths: list[str]) -> dict:
    """Return the accuracy and the number of response tokens."""
    from jax_ppo.rewards.number_rules import score_gsm8k

    correct = [
        score_gsm8k(row["response"], truth, "flexible").correct
        for row, truth in zip(rows, ground_truths, strict=True)
    ]
    return {
        "accuracy": sum(correct) / len(correct),
        "tokens": sum(len(row["response_ids"]) for row in rows),
    }


if __name__ == "__main__":
    main()
