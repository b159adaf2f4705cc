"""A random tiny Llama with a trained tokenizer, as a folder that the commands read."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

import tiny
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from trained_tokenizer import train_tokenizer
from worked_solutions import generate_worked_solutions


def write_llama(
    folder: Path, texts: Iterable[str], tokens: int, vocab_size: int = 192, **changes: Any
) -> Architecture:
    """Write the tokenizer to `folder/tokenizer` and the model with it to `folder/llama`.

    Args:
        folder: an existing folder.
        texts: what the tokenizer is trained on.
        tokens: size of the tokenizer.
        vocab_size: rows of the model's embedding.
        changes: fields of the architecture that differ.

    Returns:
        The model's architecture.
    """
    tokenizer = train_tokenizer(list(texts), tokens, folder / "tokenizer")
    architecture = Architecture(
        family="llama",
        vocab_size=vocab_size,
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
    architecture = dataclasses.replace(architecture, **changes)
    params = tiny.init_params(Transformer(architecture), jax.random.key(0), "lm")
    export_checkpoint(params, architecture, folder / "llama", source_folder=folder / "tokenizer")
    return architecture


def write_arithmetic_llama(folder: Path, problems: int = 100, **changes: Any) -> Path:
    """Write a Llama with a tokenizer of worked solutions; return its folder."""
    pairs = generate_worked_solutions(problems, 0.5, 0)
    write_llama(folder, ["".join(pair) for pair in pairs], 192, **changes)
    return folder / "llama"
