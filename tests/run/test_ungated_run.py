"""Two steps from folders as transformers writes them, and back: other blocks than Llama's."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

import recorded
import tiny
from jax_ppo.demonstration import arithmetic
from jax_ppo.models import heads
from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding

ROOT = pathlib.Path(__file__).parents[2]
END = "<|endoftext|>"  # the only special token of both tokenizers, id 0 in Pythia's
CONFIG = """
from jax_ppo.config import default_config

def get_config(arg=None):
    config = default_config()
    config.model.path, config.model.dtype = {model!r}, "float32"
    config.data.train_files, config.data.val_files = "arithmetic:16", ""
    config.data.train_batch_size, config.actor.ppo_mini_batch_size = 8, 4
    config.data.max_prompt_length, config.data.max_response_length = 64, 8
    config.rollout.n = 1
    config.actor.optim.lr = config.critic.optim.lr = 1e-3
    config.trainer.total_training_steps = 2
    config.trainer.critic_warmup = 0
    config.reward.function = {reward!r}
    config.reward.workers = 0
    return config
"""
REWARD = '''
def reward(data_source, solution_str, ground_truth, extra_info):
    """The share of digits."""
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
'''


def write_tokenizer(folder):
    """Write a byte-level BPE without a pad token, and return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [
        prompt + response for prompt, response in arithmetic.generate_worked_solutions(100, 0.5, 0)
    ]
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    pieces.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token=END, eos_token=END, unk_token=END
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def write_model(folder, family, vocab_size):
    ids = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": vocab_size}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80}
        recorded.write_checkpoint(folder, "GPT2LMHeadModel", sizes | ids, std=0.2)
        return
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 80}
    if family == "qwen3_5_text":
        sizes |= {"head_dim": 16, "num_key_value_heads": 2}
        sizes |= {"layer_types": ["linear_attention", "full_attention"]}
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
        recorded.write_checkpoint(folder, "Qwen3_5ForCausalLM", sizes | ids, std=0.2)
        return
    recorded.write_checkpoint(folder, "GPTNeoXForCausalLM", sizes | ids, std=0.2)


def our_logits(folder, ids):
    architecture = read_architecture(folder)
    model = Transformer(architecture)
    params = heads.init_params(model, jax.random.key(0), "lm")
    where = sharding.tree_shardings(tiny.make_mesh(), params, sharding.TRAIN_RULES)
    params = load_checkpoint(folder, architecture, where)
    hidden = model.apply({"params": params}, ids, jnp.arange(ids.shape[1])[None]).hidden
    return heads.compute_logits(architecture, params, hidden)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("gpt2", marks=pytest.mark.exhaustive),
        pytest.param("gpt_neox", marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parity
def test_two_steps_from_a_folder_of_transformers(family, tmp_path):
    import torch

    source, workdir = tmp_path / "source", tmp_path / "run"
    write_model(source, family, write_tokenizer(source) + 5)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "config.py").write_text(
        CONFIG.format(model=str(source), reward=f"{tmp_path}/reward.py:reward")
    )
    command = [sys.executable, "-m", "jax_ppo.train"]
    process = subprocess.run(
        [*command, f"--config={tmp_path}/config.py", f"--workdir={workdir}"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert json.loads((workdir / "summary.json").read_text())["steps"] == 2
    before, after = (load_file(x / "model.safetensors") for x in (source, workdir / "actor"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # Each number moves, by 0.001 in a step at most, except the embeddings of unused tokens.
        moved = np.abs(after[name] - tensor)
        assert 0 < moved.max() < 0.01, name
    tokenizer = transformers.AutoTokenizer.from_pretrained(workdir / "actor")
    ids = np.array(tokenizer(["Tom has 3 apples. He buys 2 more."])["input_ids"])
    model = recorded.Checkpoint(workdir / "actor").load()
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(our_logits(workdir / "actor", ids), expected, rtol=1e-4, atol=1e-4)
