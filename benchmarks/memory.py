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
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import workload

from jax_ppo import load_config
from jax_ppo.kernels import logprobs
from jax_ppo.kernels.vocabulary_chunks import LogitOptions
from jax_ppo.memory.abstract_step import build_abstract_step
from jax_ppo.ppo.programs import take_step_on_shapes
from jax_ppo.runtime import meshes, sharding
from jax_ppo.runtime.compiled_programs import run_on_shapes

MIB = 2**20
ROW = 512  # tokens
PROGRAMS = {"forward_policy": "score", "update_actor": "update"}


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


def temporary_bytes(args: argparse.Namespace, vocabulary: int, rows: int) -> dict[str, int]:
    """Return the temporary bytes of the programs whose micro-batches have `rows` rows."""
    shape = {"tie_word_embeddings": True, "num_key_value_heads": 2}
    model = workload.config(args.layers, 896, vocabulary, **shape)
    found = {}

    def compile_program(name: str, lowered: jax.stages.Lowered, arguments: tuple[Any, ...]) -> Any:
        if name in PROGRAMS:
            analysis = lowered.compile().memory_analysis()
            found[PROGRAMS[name]] = analysis.temp_size_in_bytes
        place = sharding.replicated(mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), lowered.out_info
        )

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        config = load_config(
            None,
            {
                "model.path": folder,
                "model.dtype": args.dtype,
                "model.gradient_checkpointing": True,
                "data.train_files": "-",
                "data.train_batch_size": 16,
                "data.max_prompt_length": ROW // 2,
                "data.max_response_length": ROW // 2,
                "actor.ppo_mini_batch_size": 16,
                "actor.ppo_micro_batch_size_per_device": rows,
                "rollout.logprob_micro_batch_size_per_device": rows,
                "algorithm.adv_estimator": "reinforce_plus_plus",
            },
        )
        mesh = meshes.make_mesh(config.mesh, jax.devices()[:1])
        with jax.set_mesh(mesh), run_on_shapes(compile_program):
            step = build_abstract_step(config, mesh)
            take_step_on_shapes(step, step.state, step.batches())
    return found


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
    for vocabulary, rows in itertools.product(args.vocabularies, args.rows):
        found = {}
        for name, function in (("ours", ours), ("whole_logits", whole_logits)):
            logprobs.token_logprobs = function
            jax.clear_caches()
            found[name] = temporary_bytes(args, vocabulary, rows)
        for program in PROGRAMS.values():
            row = {"program": program, "vocabulary": vocabulary, "tokens": rows * ROW}
            row |= {name: of_side[program] for name, of_side in found.items()}
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
