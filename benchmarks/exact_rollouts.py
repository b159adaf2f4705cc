"""Count bits of log-probs that differ between rollouts and updates with `rollout.exact`.

    python benchmarks/exact_rollouts.py

Trains small random models of three families for 200 optimizer steps on about a million tokens
each in float32, and the first one as long in bfloat16, with various slots, packings, micro-batches,
responses to a prompt and epochs. A mini-batch is a whole rollout, so that all log-probs of the
sampler are compared with those that the update starts from. Prints the number of tokens, of those
that the forward pass drew again as another token, and of those with other bits, and writes
results/exact_rollouts.json. The exit code is 1 if any bit differs.
"""

import argparse
import contextlib
import dataclasses
import json
import platform
import resource
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_ppo.config.loading import load_config
from jax_ppo.data.sources import read_examples
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.heads import init_params
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.reporting.sinks import read_metrics_csv
from jax_ppo.run import ppo_training

sys.path.append(str(Path(__file__).parents[1] / "tests" / "harness"))
from trained_tokenizer import train_tokenizer  # noqa: E402

RESULTS = Path(__file__).parent / "results"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gemma2": {
        "post_norms": True,
        "norm_plus_one": True,
        "norm_in_float32": True,
        "activation": "gelu_pytorch_tanh",
        "scaled_embedding": True,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "sliding_window": 16,
        "local_layers": (True, False),
        "query_pre_attn_scalar": 8,
    },
}
MODELS = (*((family, "float32") for family in FAMILIES), ("llama", "bfloat16"))
SAMPLES = 120
# Each takes 50 optimizer steps, in rollouts of SAMPLES responses.
VARIANTS: dict[str, dict[str, Any]] = {
    "critic, two epochs, 16 slots": {
        "algorithm.adv_estimator": "gae",
        "rollout.max_num_seqs": 16,
        "actor.ppo_epochs": 2,
        "critic.ppo_epochs": 2,
    },
    "pairs, 37 slots, long rows, micro-batches of 1": {
        "rollout.n": 2,
        "rollout.max_num_seqs": 37,
        "packing.row_length": 250,
        "actor.ppo_micro_batch_size_per_device": 1,
    },
    "groups of 4, padded rows, micro-batches of 5": {
        "rollout.n": 4,
        "packing.enabled": False,
        "actor.ppo_micro_batch_size_per_device": 5,
    },
    "groups of 6, recomputation": {
        "rollout.n": 6,
        "actor.ppo_micro_batch_size_per_device": 3,
        "model.gradient_checkpointing": True,
    },
}
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of each variant")
    parser.add_argument("--models", nargs="*", default=[f"{x}:{y}" for x, y in MODELS])
    arguments = parser.parse_args()
    totals = {}
    for name in arguments.models:
        family, _, dtype = name.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            totals[name] = measure(Path(folder), family, dtype, arguments.steps)
        print(f"{name}: {totals[name]}", flush=True)
    versions = {name: version(name) for name in ("jax", "flax")}
    result = {"python": platform.python_version(), "versions": versions, "models": totals}
    (RESULTS / "exact_rollouts.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(total["inexact"] for total in totals.values()))


def measure(folder: Path, family: str, dtype: str, steps: int) -> dict[str, float]:
    """Train a model in each variant; return the totals."""
    write_model(folder, family)
    (folder / "reward.py").write_text(REWARD)
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    total = dict.fromkeys(("optimizer_steps", "tokens", "redrawn", "inexact"), 0)
    largest = 0.0
    for number, (variant, changes) in enumerate(VARIANTS.items()):
        rows = run(folder, number, steps, {"model.dtype": dtype} | changes)
        figures = {
            "optimizer_steps": len(rows) * changes.get("actor.ppo_epochs", 1),
            "tokens": round(sum(SAMPLES * row["response_length/mean"] for row in rows)),
            "redrawn": round(sum(row["rollout/redrawn_tokens"] for row in rows)),
            "inexact": round(sum(row["actor/inexact_logprobs"] for row in rows)),
        }
        print(f"  {family}, {dtype}, {variant}: {figures}", flush=True)
        total = {name: total[name] + figures[name] for name in total}
        largest = max(largest, *(row["actor/log_ratio_max"] for row in rows))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    return total | {"largest_log_ratio": largest, "processor_seconds": round(seconds)}


def write_model(folder: Path, family: str) -> None:
    """Write a random model whose distributions are far from uniform, and its tokenizer."""
    texts = [str(example.prompt) for example in read_examples("arithmetic:64")]
    tokenizer = train_tokenizer(texts, 256, folder / "tokenizer")
    architecture = Architecture(
        family="llama",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tied=True,
        max_position_embeddings=128,
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
    )
    architecture = dataclasses.replace(architecture, family=family, **FAMILIES[family])
    params = init_params(Transformer(architecture), jax.random.key(0), "lm")
    scaled = jax.tree.map(lambda x: np.asarray(x) * (12 if x.ndim > 1 else 1), params)
    export_checkpoint(scaled, architecture, folder / "model", source_folder=folder / "tokenizer")


def run(folder: Path, number: int, steps: int, changes: dict[str, Any]) -> list[dict[str, float]]:
    """Train in one variant; return the metrics of its steps."""
    prompts = SAMPLES // changes.get("rollout.n", 1)
    options = {
        "model.path": str(folder / "model"),
        "model.gradient_checkpointing": False,
        "data.train_files": "arithmetic:2048",
        "data.train_batch_size": prompts,
        "data.max_prompt_length": 48,
        "data.max_response_length": 56,
        "reward.function": f"{folder}/reward.py:score",
        "reward.workers": 0,
        "rollout.exact": True,
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_reference": False,
        "actor.ppo_mini_batch_size": prompts,
        "actor.optim.lr": 1e-3,
        "seed": number,
        "trainer.total_training_steps": steps // changes.get("actor.ppo_epochs", 1),
        "trainer.test_freq": 0,
        "trainer.save_freq": 0,
        "trainer.export": False,
        "trainer.logger": "",
    }
    workdir = folder / f"run{number}"
    with contextlib.redirect_stdout(sys.stderr):
        ppo_training.train_ppo(load_config(None, options | changes), workdir)
    table = read_metrics_csv(workdir / "training_metrics.csv")
    names = (
        *("response_length/mean", "rollout/redrawn_tokens"),
        *("actor/inexact_logprobs", "actor/log_ratio_max"),
    )
    return [{name: float(row[name]) for name in names} for row in table if row[names[0]]]


if __name__ == "__main__":
    main()
