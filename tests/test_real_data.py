"""GSM8K's own file through the command with a small Qwen2, and TinyStories there and back.

TinyStories is the real pretrained model.
"""

import json

import numpy as np
import pytest

from llama_folder import write_llama
from real_data import DATA, needs
from whole_run import read_lines, run_command


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Write a small Qwen2 with random weights and a tokenizer trained on GSM8K's text."""
    folder = tmp_path_factory.mktemp("qwen")
    rows = read_lines(DATA / "gsm8k" / "train.jsonl")[:1000]
    texts = [row["question"] + row["answer"] for row in rows]
    options = {"family": "qwen2", "qkv_bias": True, "max_position_embeddings": 1024}
    write_llama(folder, texts, 1024, vocab_size=1024, **options)
    return folder / "llama"


@pytest.mark.slow
@needs("gsm8k")
def test_two_steps_of_gsm8k_with_evaluation(qwen, tmp_path):
    output = run_command(
        "train",
        "--config=configs/gsm8k.py",
        f"--config.model.path={qwen}",
        f"--config.data.train_files={DATA}/gsm8k/train.jsonl",
        f"--config.data.val_files={DATA}/gsm8k/test.jsonl",
        "--config.trainer.total_training_steps=2",
        "--config.data.train_batch_size=8",
        "--config.actor.ppo_mini_batch_size=4",
        "--config.data.val_batch_size=8",
        "--config.data.val_max_samples=16",
        "--config.data.max_prompt_length=256",
        "--config.data.max_response_length=48",
        "--config.model.dtype=float32",
        f"--workdir={tmp_path}",
    ).stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 2
    assert [entry["step"] for entry in summary["evaluations"]] == [0, 2]
    assert all(0 <= entry["accuracy"] <= 1 for entry in summary["evaluations"])
    assert "16 held-out prompts" in output and "step 2/2" in output


@needs("tinystories-260k")
@pytest.mark.parity
@pytest.mark.exhaustive
def test_ppo_on_tinystories_exports_what_transformers_continues(tmp_path):
    import torch
    import transformers

    run_command(
        "train",
        "--config=configs/tinystories.py",
        f"--config.model.path={DATA}/tinystories-260k",
        f"--workdir={tmp_path}",
        "--config.trainer.total_training_steps=2",
        "--config.trainer.critic_warmup=0",
        "--config.data.train_batch_size=16",
        "--config.actor.ppo_mini_batch_size=8",
        "--config.data.val_files=",
        "--config.data.max_response_length=16",
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "actor")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "actor", dtype=torch.float32
    )
    original = transformers.AutoModelForCausalLM.from_pretrained(
        DATA / "tinystories-260k", dtype=torch.float32
    )
    ids = tokenizer("Once upon a time, there was a little girl named Lily.", return_tensors="pt")
    story = tokenizer.decode(
        model.generate(**ids, max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True
    )
    assert story.startswith("Once upon a time, there was a little girl named Lily. She")
    moved = np.abs(
        model.model.embed_tokens.weight.detach().numpy()
        - original.model.embed_tokens.weight.detach().numpy()
    )
    assert 0 < moved.max() < 0.1
