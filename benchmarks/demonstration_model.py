"""Make the small model that `jax_ppo.train` starts from where no `model.path` is set.

    python benchmarks/demonstration_model.py FOLDER        (jax_ppo/demonstration/model)

It writes a tokenizer and a random Llama of 0.4 million parameters, and runs `jax_ppo.sft` twice: on
worked solutions, which teach a skill, and on responses that seldom use it, which teach a habit.
Reinforcement learning can then discover what the skill is worth. Takes two minutes on two cores.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer

sys.path.append(str(Path(__file__).parents[1] / "tests" / "harness"))
from trained_tokenizer import train_tokenizer  # noqa: E402
from worked_solutions import generate_worked_solutions  # noqa: E402

EXAMPLES = 8_192
VOCABULARY = 176  # tokens, which a mesh of up to 16 devices can split
SKILL = {"lr": 6e-3, "lr_schedule": "linear", "min_lr_ratio": 0.05, "lr_warmup_steps": 15}
SKILL_STEPS = 300
HABIT = {"lr": 3e-4, "lr_warmup_steps": 10}
HABIT_STEPS = 60
CAREFUL_SHARE = 0.38  # of the habit's examples that are solved step by step
# Without the decay the model learns examples by heart; moments over a thousand steps would remember
# the start of a few hundred.
OPTIM = {"weight_decay": 0.5, "beta2": 0.95}

# Factors on the initial weights, whose standard deviation of 0.02 is that of wide models. Without
# them attention takes twice as many steps to find the operands. Kernels that write to the residual
# stream get a smaller one, as in GPT-2.
EMBEDDING_SCALE = 5
KERNEL_SCALE = 3
RESIDUAL_SCALE = 2
RESIDUAL_KERNELS = ("o_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="is replaced")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        skill = generate_worked_solutions(EXAMPLES, 1.0, arguments.seed)
        habit = generate_worked_solutions(EXAMPLES, CAREFUL_SHARE, arguments.seed)
        write_random_model(skill, folder / "random", arguments.seed)
        skilled = fine_tune(folder / "random", skill, SKILL, SKILL_STEPS, "float32")
        made = fine_tune(skilled, habit, HABIT, HABIT_STEPS, "bfloat16")
        shutil.rmtree(arguments.folder, ignore_errors=True)
        shutil.copytree(made, arguments.folder)
    print(sum(path.stat().st_size for path in arguments.folder.iterdir()), "bytes")


def write_random_model(pairs: list[tuple[str, str]], folder: Path, seed: int) -> None:
    """Write a tokenizer of the texts and a Llama with random weights."""
    texts = [prompt + response for prompt, response in pairs[:2_000]]
    tokenizer_folder = folder.with_name("tokenizer")
    tokenizer = train_tokenizer(texts, VOCABULARY, tokenizer_folder)
    architecture = Architecture(
        family="llama",
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tied=True,
        bos_id=tokenizer.bos_token_id,
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
    )
    params = heads.init_params(Transformer(architecture), jax.random.key(seed), head="lm")
    params = jax.tree_util.tree_map_with_path(scale, params)
    export_checkpoint(params, architecture, folder, tokenizer_folder=tokenizer_folder)


def scale(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if "embedding" in names:
        return EMBEDDING_SCALE * x
    if any(name in names for name in RESIDUAL_KERNELS):
        return RESIDUAL_SCALE * x
    return KERNEL_SCALE * x if "kernel" in names else x


def fine_tune(
    model: Path, pairs: list[tuple[str, str]], optim: dict[str, object], steps: int, dtype: str
) -> Path:
    """Run `jax_ppo.sft` on prompts with responses; return the folder of its result."""
    workdir = model.parent / f"{model.name}_tuned"
    rows = model.parent / f"{model.name}.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs))
    options = {
        "model.path": model,
        "data.train_files": rows,
        "data.val_files": "",
        "data.train_batch_size": 32,
        "trainer.total_training_steps": steps,
        "trainer.save_freq": 0,
        "trainer.export_dtype": dtype,
    }
    options |= {f"supervised.optim.{name}": value for name, value in (optim | OPTIM).items()}
    command = [sys.executable, "-m", "jax_ppo.sft", "--config=arithmetic", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in options.items()]
    subprocess.run(command, check=True)
    return workdir / "actor"


if __name__ == "__main__":
    main()
