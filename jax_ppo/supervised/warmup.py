"""Supervised warm-up: a small model and its tokenizer made from worked examples, written as a Hugging Face folder.

It gives the embedded arithmetic task something to start from without a download.
"""

import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.config.schema import Config, Create, CriticOptim, Supervised
from jax_ppo.data import arithmetic
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.families import CREATED_FAMILY
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding
from jax_ppo.supervised import step as fitting
from jax_ppo.training import packing as packing_lib
from jax_ppo.types import Sequences

EXAMPLES = 20_000
ROW_LENGTH = 144  # three worked examples


def make_model(config: Config, folder: Path, mesh, progress) -> None:
    """Trains a tokenizer and a model on worked arithmetic problems and writes both to `folder`; does nothing if it exists.

    Args:
      progress: called with a line of text now and then.
    """
    if (folder / "config.json").exists():
        return
    create = config.model.create
    careful = arithmetic.generate_worked_solutions(EXAMPLES, 1.0, config.seed)
    mostly_hasty = arithmetic.generate_worked_solutions(EXAMPLES, create.careful_share, config.seed)
    scratch = folder.with_name(f"{folder.name}_tokenizer_{jax.process_index()}")
    texts = [prompt + response for prompt, response in careful[:2000]]
    tokenizer = tokenizer_lib.train_tokenizer(texts, create.vocab_size, scratch)
    architecture = describe(create, tokenizer)
    model = Transformer(architecture, jnp.dtype(config.model.dtype))
    shapes = jax.eval_shape(
        functools.partial(heads.init_params, model, head="lm"), jax.random.key(0)
    )
    init = jax.jit(
        functools.partial(heads.init_params, model, head="lm"),
        out_shardings=sharding.tree_shardings(mesh, shapes, sharding.TRAIN_RULES),
    )
    params = init(jax.random.key(config.seed))
    # The skill first, then the habit: careful work is learned well before most examples stop showing it.
    for pairs, steps, lr in (
        (careful, create.steps, create.lr),
        (mostly_hasty, create.habit_steps, create.habit_lr),
    ):
        params = train(
            model,
            params,
            tokenize(pairs, tokenizer),
            create.batch_size,
            steps,
            lr,
            config.seed,
            mesh,
            progress,
        )
    export_checkpoint(params, architecture, folder, source_folder=scratch)
    shutil.rmtree(scratch)


def describe(create: Create, tokenizer) -> Architecture:
    """A Llama of the sizes of `model.create` for this tokenizer, its vocabulary rounded up so that a mesh can split it."""
    return Architecture(
        family=CREATED_FAMILY,
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=create.hidden_size,
        intermediate_size=create.intermediate_size,
        num_layers=create.num_layers,
        num_heads=create.num_heads,
        num_kv_heads=create.num_kv_heads,
        head_dim=create.hidden_size // create.num_heads,
        max_position_embeddings=512,
        tied=True,
        bos_id=tokenizer.bos_token_id,
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
    )


def tokenize(pairs, tokenizer) -> Sequences:
    """Prompt and response token ids joined, an EOS behind each response. Host arrays."""
    prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in pairs]
    responses = [
        tokenizer(r, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        for _, r in pairs
    ]
    tokens = np.zeros(
        (len(pairs), max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))),
        np.int32,
    )
    for row, prompt, response in zip(tokens, prompts, responses, strict=True):
        row[: len(prompt) + len(response)] = prompt + response
    lengths = np.array([len(r) for r in responses], np.int32)
    return Sequences(
        tokens=tokens,
        prompt_lengths=np.array([len(p) for p in prompts], np.int32),
        lengths=lengths,
        truncated=np.zeros(len(prompts), bool),
        action_mask=np.arange(lengths.max()) < lengths[:, None],
    )


def train(
    model: Transformer,
    params,
    sequences: Sequences,
    batch_size: int,
    steps: int,
    lr: float,
    seed: int,
    mesh,
    progress,
):
    """Minimises the mean negative log-likelihood of the response tokens over packed rows; AdamW, cosine to 0."""
    options = Supervised(
        CriticOptim(
            lr=lr, lr_warmup_steps=max(steps // 20, 1), lr_schedule="cosine", weight_decay=0.0
        )
    )
    init = fitting.optimizer(options).init
    total = sequences.prompt_lengths + sequences.lengths
    shards = sharding.row_shards(mesh)
    per_row = max(1, ROW_LENGTH // int(total.mean()))
    rows_at_once = -(-batch_size // (per_row * shards)) * shards
    plan, _ = packing_lib.plan_packing(
        total, np.arange(len(total))[None], 1, max(ROW_LENGTH, int(total.max()))
    )
    plan = jax.tree.map(lambda x: x[0, :, 0], plan)
    plan = jax.tree.map(lambda x: x[(plan.sample >= 0).any(1)], plan)
    where = sharding.tree_shardings(mesh, jax.eval_shape(init, params), sharding.TRAIN_RULES)
    opt_state = jax.jit(init, out_shardings=where)(params)
    sequences = sharding.place(sequences, sharding.replicated(mesh))
    rng, order = np.random.default_rng(seed), np.empty(0, np.int64)
    for i in range(steps):
        if (
            len(order) < rows_at_once
        ):  # packing sorts by length: batches are drawn from all rows, not cut from neighbours
            order = np.concatenate([order, rng.permutation(len(plan.sample))])
        taken, order = order[:rows_at_once], order[rows_at_once:]
        rows = sharding.place(
            jax.tree.map(lambda x, taken=taken: x[taken][None], plan), sharding.rows(mesh, axis=1)
        )
        params, opt_state, figures = fitting.step(
            fitting.LANGUAGE,
            options,
            model,
            steps,
            params,
            opt_state,
            np.int32(i),
            sequences,
            rows,
            np.int32(1),
        )
        if i % 100 == 99 or i + 1 == steps:
            progress(f"supervised warm-up: step {i + 1}/{steps}, loss {float(figures['loss']):.3f}")
    return params
