"""Model and tokenizer loading shared by the tunix workers."""

import json
from pathlib import Path

import jax
from transformers import AutoTokenizer
from tunix.models.qwen2 import model as model_lib
from tunix.models.qwen2 import params


def one_device_mesh():
    return jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def load_model(folder: str, mesh):
    """Load the model of a Hugging Face folder and its configuration."""
    c = json.loads((Path(folder) / "config.json").read_text())
    config = model_lib.ModelConfig(
        num_layers=c["num_hidden_layers"],
        vocab_size=c["vocab_size"],
        embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        head_dim=64,
        num_kv_heads=c["num_key_value_heads"],
        rope_theta=c["rope_parameters"]["rope_theta"],
        norm_eps=c["rms_norm_eps"],
        use_tied_embedding=c["tie_word_embeddings"],
    )
    return params.create_model_from_safe_tensors(folder, config, mesh), config


def count_tokens(responses, longest: int) -> int:
    """Count the response tokens, including each EOS, which tunix strips."""
    return sum(min(len(response) + 1, longest) for response in responses)


class Tokenizer:
    """The tokenizer with tunix's interface; ours has no BOS."""

    def __init__(self, folder: str):
        self._tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")

    def encode(self, text, **options):
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens, **options):
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def bos_id(self):
        return 0  # falsy, so that no BOS is prepended to the prompt

    def eos_id(self):
        return self._tokenizer.eos_token_id

    def pad_id(self):
        return self._tokenizer.pad_token_id
