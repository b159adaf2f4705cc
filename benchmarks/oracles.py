"""Compare our kernels with the functions of verl, TRL, tunix and OpenRLHF: values and gradients.

    sh benchmarks/peers.sh peers peers_verl
    python benchmarks/oracles.py --peers peers/bin/python --verl-peers peers_verl/bin/python

The inputs are random and masked. Everything runs in float64, so that a difference is one of formula
and not of rounding, except for values that a side computes in float32 regardless of its input. Each
row must match workers/expected_oracle.py: equal, or different for a listed reason. The reason is
tested too: our kernel with that difference applied must equal the peer's. If any row does not
match, the exit status is 1.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import harness
import jax
import numpy as np
from workers import expected_oracle

SIDES = {
    "verl": "verl_oracle.py",
    "trl": "trl_oracle.py",
    "tunix": "tunix_oracle.py",
    "openrlhf": "openrlhf_oracle.py",
}
IN_VERL_ENVIRONMENT = ("verl", "openrlhf")
GRADIENT = ", gradient"
SAMPLES, TOKENS, WIDTH, VOCABULARY = 12, 16, 8, 24
OPTIONS = {
    "n": 4,
    "gamma": 0.97,
    "lam": 0.9,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "value_clip": 0.3,
    "threshold": 2.0,
    "lower": 0.1,
    "tau_pos": 1.2,
    "tau_neg": 1.6,
    "cov_low": 0.1,
    "cov_high": 1.5,
    "cov_ratio": 0.2,
    "cov_kl_coef": 0.5,
    "temperature": 0.7,
    "scale": 16,
    "kl_coef": 0.05,
    "kl_target": 0.1,
    "kl_horizon": 200.0,
}


def make_case(seed: int) -> dict[str, np.ndarray]:
    """Return random inputs of one rollout, with arbitrary numbers in masked positions.

    Log-ratios are on both sides of the clips. Those to `wide_logprobs` exceed the clips by far,
    response by response, and some of those to `far_logprobs` reach the clamps at 20 and at 10;
    those to `shifted_logprobs` are equal. Only `valid_logprobs` are all of probabilities. In
    `absent_mask` two responses have no token. The first of the two scores in `components` is equal
    throughout the first group.
    """
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return scale * random.standard_normal(shape)

    shape = (SAMPLES, TOKENS)
    lengths = random.integers(2, TOKENS, SAMPLES)
    lengths[random.permutation(SAMPLES)[:2]] = 1, TOKENS
    mask = (np.arange(TOKENS) < lengths[:, None]).astype(np.int64)
    absent_mask = mask.copy()
    absent_mask[random.permutation(SAMPLES)[:2]] = 0
    scores = normal(SAMPLES)
    scores[: OPTIONS["n"]] = scores[0]
    logprobs = -random.exponential(1.5, shape)
    old_logprobs, ref_logprobs = (
        logprobs + normal(*shape, scale=0.3),
        logprobs + normal(*shape, scale=0.4),
    )
    ref_logprobs[:, 0] = logprobs[:, 0]
    far_logprobs = old_logprobs.copy()
    far_logprobs[:, ::3] = (logprobs - random.choice([-26.0, -12.0, 12.0, 26.0], shape))[:, ::3]
    old_values = normal(*shape)
    case = {
        "mask": mask,
        "absent_mask": absent_mask,
        "scores": scores,
        "rewards": normal(*shape),
        "old_values": old_values,
        "values": old_values + normal(*shape, scale=0.4),
        "returns": old_values + normal(*shape),
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "far_logprobs": far_logprobs,
        "wide_logprobs": old_logprobs + normal(SAMPLES, 1, scale=1.5),
        "advantages": normal(*shape),
        "response_advantages": normal(SAMPLES),
        "losses": normal(*shape),
        "cotangents": normal(*shape),
        "importance": random.uniform(0, 2, shape),
        "hidden": normal(*shape, WIDTH),
        "unembedding": normal(VOCABULARY, WIDTH),
        "targets": random.integers(0, VOCABULARY, shape),
        "kls": random.uniform(0, 0.3, 10),
        "components": normal(SAMPLES, 2),
        "ref_hidden": normal(*shape, WIDTH),
        "shifted_logprobs": logprobs + 0.1,
    }
    case["valid_logprobs"] = np.minimum(case["wide_logprobs"], -0.01)
    case["components"][: OPTIONS["n"], 0] = case["components"][0, 0]
    # Representable in float32, for functions that compute in float32 regardless of the input.
    return {
        name: x if x.dtype == np.int64 else x.astype(np.float32).astype(np.float64)
        for name, x in case.items()
    }


def run_peer(
    side: str, python: str, cases: list[dict], folder: Path
) -> tuple[dict[str, np.ndarray], dict]:
    """Return a peer's answers by name, stacked over the cases, and its package versions."""
    settings = {
        "cases": str(folder / "cases.npz"),
        "answers": str(folder / f"{side}.npz"),
        "options": OPTIONS,
    }
    np.savez(
        settings["cases"], **{name: np.stack([case[name] for case in cases]) for name in cases[0]}
    )
    worker = harness.Worker(side, SIDES[side], settings, python)
    worker.turn()
    worker.close()
    with np.load(settings["answers"], allow_pickle=False) as answers:
        return {name: answers[name] for name in answers.files}, worker.versions


def compare(side: str, answers: dict, cases: list[dict]) -> list[dict]:
    """Compare every row of a peer and return the rows with their verdicts."""
    table = {}

    @jax.jit
    def evaluate_rows(case):
        table.update(expected_oracle.ROWS[side](case, OPTIONS))
        return {name: (row.ours, row.theirs) for name, row in table.items()}

    ours = [evaluate_rows(case) for case in cases]
    answered = {name.removesuffix(GRADIENT) for name in answers}
    assert answered == set(table), (
        f"{side}: answered and expected rows differ: {answered ^ set(table)}"
    )
    return [
        {"peer": side, "function": name} | judge(name, row, [each[name] for each in ours], answers)
        for name, row in table.items()
    ]


def judge(name: str, row: expected_oracle.Row, results: list[tuple], answers: dict) -> dict:
    """Return the differences of a row and whether they are as expected.

    Args:
      name: Name of the row.
      row: Its tolerance and listed reason.
      results: `ours` and `theirs` of the row in each case.
      answers: The peer's answers by name.
    """
    plain = difference([ours for ours, _ in results], name, answers)
    equal = within_tolerance(plain, row.tolerance)
    result = {"difference": plain, "tolerance": row.tolerance}
    if not row.reason:
        return result | {"verdict": "equal" if equal else "DIFFERS", "as_expected": equal}
    explained = difference([theirs for _, theirs in results], name, answers)
    right = within_tolerance(explained, row.tolerance) and not equal
    wrong = (
        "EQUAL, though listed as different" if equal else "DIFFERS, and not for the reason listed"
    )
    return result | {
        "with_the_reason_put_in": explained,
        "verdict": f"differs: {row.reason}" if right else wrong,
        "as_expected": right,
    }


def difference(
    ours: list[expected_oracle.Result], name: str, answers: dict
) -> dict[str, dict[str, float]]:
    """Return the largest difference over all cases, of values and of gradients if any.

    Differences are absolute and relative to the peer's largest number.
    """
    differences = {}
    for part, key in (("values", name), ("gradient", name + GRADIENT)):
        mine = [getattr(each, part) for each in ours]
        assert (mine[0] is not None) == (key in answers), f"{key}: only one side has a gradient"
        if mine[0] is not None:
            mine, peers = np.stack(mine), answers[key]
            assert mine.shape == peers.shape, (key, mine.shape, peers.shape)
            absolute = float(np.max(np.abs(mine - peers)))
            differences[part] = {
                "absolute": absolute,
                "relative": absolute / float(np.max(np.abs(peers))),
            }
    return differences


def within_tolerance(differences: dict, tolerance: float) -> bool:
    """Return whether all relative differences are within the tolerance."""
    return all(part["relative"] <= tolerance for part in differences.values())


def show(rows: list[dict]) -> None:
    """Print the rows as a table."""
    width = max(len(row["function"]) for row in rows)
    for row in rows:
        parts = [
            f"{part['absolute']:.1e} {part['relative']:.1e}" for part in row["difference"].values()
        ]
        print(
            f"{row['peer']:8s} {row['function']:{width}s} {'  '.join(parts):33s} {row['verdict']}"
        )
    print(
        "columns: largest absolute and relative difference of the values, "
        "and of the gradient if training uses one"
    )


def parse() -> argparse.Namespace:
    """Parse and validate the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", help="Python of the environment with TRL and tunix")
    parser.add_argument("--verl-peers", help="Python of the environment with verl and OpenRLHF")
    parser.add_argument(
        "--sides",
        type=lambda text: text.split(","),
        help="comma-separated, from verl, trl, tunix, openrlhf",
    )
    parser.add_argument("--cases", type=int, default=5, help="random rollouts")
    parser.add_argument("--out", default="oracles", help="results/OUT.json; empty writes nothing")
    args = parser.parse_args()
    args.pythons = {
        side: args.verl_peers if side in IN_VERL_ENVIRONMENT else args.peers for side in SIDES
    }
    args.sides = args.sides or [side for side in SIDES if args.pythons[side]]
    if not args.sides or any(not args.pythons.get(side) for side in args.sides):
        parser.error(
            f"--sides: expected some of {', '.join(SIDES)}; trl and tunix require --peers, "
            "the others --verl-peers"
        )
    return args


def main() -> int:
    """Run the comparison and return the exit status."""
    args = parse()
    jax.config.update("jax_enable_x64", True)
    before = harness.machine()
    versions = {"ours": {"jax": jax.__version__, "numpy": np.__version__}}
    rows = []
    cases = [make_case(seed) for seed in range(args.cases)]
    with tempfile.TemporaryDirectory() as folder:
        for side in args.sides:
            answers, versions[side] = run_peer(side, args.pythons[side], cases, Path(folder))
            rows += compare(side, answers, cases)
    show(rows)
    wrong = [row for row in rows if not row["as_expected"]]
    counts = {
        side: {
            "equal": sum(row["verdict"] == "equal" for row in rows if row["peer"] == side),
            "different": sum(
                row["verdict"].startswith("differs") for row in rows if row["peer"] == side
            ),
        }
        for side in args.sides
    }
    for side, count in counts.items():
        print(
            f"{side}: {count['equal']} equal, {count['different']} different as listed;",
            " ".join(f"{package} {version}" for package, version in versions[side].items()),
        )
    print(f"{len(rows)} rows, {len(wrong)} not as expected")
    if args.out:
        settings = {
            "cases": args.cases,
            "samples": SAMPLES,
            "tokens": TOKENS,
            "width": WIDTH,
            "vocabulary": VOCABULARY,
        }
        print(
            harness.save(
                args.out,
                {
                    "settings": settings | OPTIONS,
                    "versions": versions,
                    "machine": before,
                    "counts": counts,
                    "rows": rows,
                },
            )
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
