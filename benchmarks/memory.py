"""Compare temporary memory of forward passes and update with a log_softmax over whole logits.

    python benchmarks/memory.py

Hidden size 896 as in Qwen2.5-0.5B, few layers, vocabularies up to its 151,936, rows of 512 tokens.
These are the programs that a run compiles for the reference and the actor; they are compiled for
this machine and not executed. The reported figure is the memory that the compiler reserves in
addition to arguments and results. Ours should grow with the number of tokens T and with the
vocabulary V (the embedding's gradient and optimizer), never with their product: the bytes per
additional token should not depend on V. Takes four minutes on two cores; writes
results/memory.json.
"""

import argparse

import harness
import jax
import jax.numpy as jnp
import programs

from jax_ppo.kernels import logprobs
from jax_ppo.kernels.vocabulary_chunks import LogitOptions

MIB = 2**20
ROW = 512  # tokens


def whole_logits(
    hidden_GxNxD: jax.Array,
    unembedding_VxD: jax.Array,
    targets_GxN: jax.Array,
    mask_GxN: jax.Array,
    options: LogitOptions,
    with_entropy: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the result of `kernels.logprobs.token_logprobs` from materialised logits."""
    assert options.softcap is None, "whole_logits does not support a logit softcap"
    unembedding = unembedding_VxD.astype(hidden_GxNxD.dtype)
    logits_GxNxV = jnp.einsum(
        "gnd,vd->gnv", hidden_GxNxD, unembedding, preferred_element_type=jnp.float32
    )
    all_GxNxV = jax.nn.log_softmax(logits_GxNxV / options.temperature)
    logprobs_GxN = jnp.take_along_axis(all_GxNxV, targets_GxN[..., None], axis=-1)[..., 0]
    entropy_GxN = -jnp.sum(jnp.exp(all_GxNxV) * all_GxNxV, axis=-1)
    masked_entropy_GxN = jnp.where(mask_GxN, entropy_GxN, 0.0) if with_entropy else None
    return jnp.where(mask_GxN, logprobs_GxN, 0.0), masked_entropy_GxN


def temporary_bytes(program: str, args: argparse.Namespace, vocabulary: int, rows: int) -> int:
    """Return the temporary bytes of a program whose micro-batches have `rows` rows."""
    step = programs.Step(
        programs.qwen2(args.layers, 896, vocabulary, tied=True, kv_heads=2),
        samples=16,
        prompt=ROW // 2,
        response=ROW // 2,
        rows=rows,
        dtype=args.dtype,
        remat=True,
    )
    return step.lower(program).compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 32000, 151936])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[2, 4, 8], help="rows per micro-batch"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    ours, measurements = logprobs.token_logprobs, []
    print(
        f"{'program':8s} {'V':>7s} {'T':>5s} {'ours MiB':>9s} "
        f"{'whole logits MiB':>17s} {'ratio':>8s}"
    )
    for program in ("score", "update"):
        for vocabulary in args.vocabularies:
            for rows in args.rows:
                row = {"program": program, "vocabulary": vocabulary, "tokens": rows * ROW}
                for name, function in (("ours", ours), ("whole_logits", whole_logits)):
                    logprobs.token_logprobs = function
                    jax.clear_caches()
                    row[name] = temporary_bytes(program, args, vocabulary, rows)
                measurements.append(row)
                print(
                    f"{program:8s} {vocabulary:7,d} {row['tokens']:5,d} {row['ours'] / MIB:9,.0f} "
                    f"{row['whole_logits'] / MIB:17,.0f} {row['ours'] / row['whole_logits']:8.0%}",
                    flush=True,
                )
    logprobs.token_logprobs = ours
    per_token = slopes(measurements, min(args.rows) * ROW, max(args.rows) * ROW)
    for line in per_token:
        print(
            f"{line['program']:8s} V {line['vocabulary']:7,d}: {line['ours']:9,.0f} bytes per "
            f"additional token, {line['whole_logits']:9,.0f} with whole logits"
        )
    print(
        "written:",
        harness.save(
            "memory",
            {
                "machine": harness.machine(),
                "settings": vars(args),
                "temporary_bytes": measurements,
                "bytes_per_token": per_token,
            },
        ),
    )


def slopes(measurements: list[dict], fewest: int, most: int) -> list[dict]:
    """Return the bytes per additional token for each program and vocabulary."""
    at = {(row["program"], row["vocabulary"], row["tokens"]): row for row in measurements}
    return [
        {"program": program, "vocabulary": vocabulary}
        | {
            name: (at[program, vocabulary, most][name] - row[name]) / (most - fewest)
            for name in ("ours", "whole_logits")
        }
        for (program, vocabulary, tokens), row in at.items()
        if tokens == fewest
    ]


if __name__ == "__main__":
    main()
