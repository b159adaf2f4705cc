"""Commands of verl's, TRL's and OpenRLHF's documentation train here once they are translated."""

import json
import shlex

import jax
import pytest
import test_translated_examples as examples

import tiny
from jax_ppo.config import command_line
from jax_ppo.migrating.translation import translate
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.train import main
from llama_folder import write_llama

# The first example of verl's documentation.
QUICKSTART = """PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=512
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 critic.optim.lr=1e-5
    critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.ppo_micro_batch_size_per_gpu=4
    algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console trainer.val_before_train=False
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10
    trainer.total_epochs=15 2>&1 | tee verl_demo.log"""
# TRL's example without a summary as its end.
TRL_PPO = """python examples/scripts/ppo/ppo.py
    --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style
    --dataset_train_split descriptiveness --learning_rate 3e-6 --output_dir models/minimal/ppo
    --per_device_train_batch_size 64 --gradient_accumulation_steps 1 --total_episodes 10000
    --model_name_or_path EleutherAI/pythia-1b-deduped --missing_eos_penalty 1.0"""
COMMANDS = {
    "verl": ("verl", QUICKSTART),
    "TRL's ppo.py": ("trl", TRL_PPO),
    **examples.COMMANDS,
}
# Machines, models and data are replaced by small ones, and nothing else but the logger.
SIZES = {
    "data.train_batch_size": 8,
    "data.val_batch_size": 8,
    "data.val_max_samples": 8,
    "data.max_prompt_length": 16,
    "data.max_response_length": 4,
    "actor.ppo_mini_batch_size": 4,
    "packing.row_length": 40,
    "mesh.model": 1,
    "mesh.stage": 1,
    "mesh.expert": 1,
    "rollout.mesh.model": 1,
    "trainer.total_training_steps": 1,
    "trainer.logger": "console",
}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return a folder with both kinds of models, and rows with the columns of all frameworks."""
    folder = tmp_path_factory.mktemp("inputs")
    problem = "Tom has 3 apples and buys 2."
    write_llama(folder, [problem, "0123456789 #"] * 8, tokens=64)
    (folder / "llama" / "chat_template.jinja").write_text(CHAT)
    architecture = read_architecture(folder / "llama")
    params = tiny.init_params(Transformer(architecture), jax.random.key(1), "scalar")
    export_checkpoint(params, architecture, folder / "judge", source_folder=folder / "llama")
    chat = [{"role": "user", "content": problem}]
    row = {"messages": chat, "prompt": problem, "label": "5", "ground_truth": "5"}
    row |= {"data_source": "openai/gsm8k", "chosen": "5", "rejected": "4"}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "verl" else pytest.mark.exhaustive)
        for name in COMMANDS
    ],
)
def test_a_translated_command_trains(name, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    framework, text = COMMANDS[name]
    translated = translate(framework, text)
    words = shlex.split(translated.command().replace("\\\n", ""))
    config, _ = command_line.read_command_line(["train", *words[3:]])
    has_judge = bool(config.reward.model_path)
    small = SIZES | {
        "data.train_files": inputs / "rows.jsonl",
        "data.val_files": inputs / "rows.jsonl",
        "model.path": inputs / "llama",
        "critic.path": inputs / ("judge" if has_judge else "llama"),
        "reward.model_path": inputs / "judge" if has_judge else "",
    }
    small_words = [f"--config.{option}={value}" for option, value in small.items()]
    main(["train", *words[3:], *small_words, "--workdir=run"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
