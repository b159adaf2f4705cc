"""Supervised warm-up: a small model and its tokenizer, made from worked examples.

It gives the embedded arithmetic task something to start from without a download.
"""

import functools
import shutil
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import Config, Create, CriticOptim, Supervised
from jax_ppo.data import arithmetic
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.families import CREATED_FAMILY
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.supervised.step import LANGUAGE, train_step
from jax_ppo.training import packing as packing_lib
from jax_ppo.training.optimizer import make_optimizer
from jax_ppo.types import Packing, Params, Sequences

NUM_EXAMPLES = 20_000
TOKENIZER_EXAMPLES = 2_000
ROW_LENGTH = 144  # three worked examples


def make_model(config: Config, folder: Path, mesh: Mesh, report: Callable[[str], None]) -> None:
    """Train a tokenizer and a model on worked arithmetic problems, and write both.

    Does nothing if the folder already holds a model.

    Args:
      config: `model.create` describes the model and its training.
      folder: where the Hugging Face folder is written.
      mesh: the mesh to train on.
      report: called with lines for the user.

    Raises:
      UserError: the mesh cannot split the model.
    """
    if (folder / "config.json").exists():
        return
    create, seed = config.model.create, config.seed
    careful = arithmetic.generate_worked_solutions(NUM_EXAMPLES, 1.0, seed)
    mostly_hasty = arithmetic.generate_worked_solutions(NUM_EXAMPLES, create.careful_share, seed)
    # Each process writes a folder of its own: they may share a disk.
    tokenizer_folder = folder.with_name(f"{folder.name}_tokenizer_{jax.process_index()}")
    texts = [prompt + response for prompt, response in careful[:TOKENIZER_EXAMPLES]]
    tokenizer = tokenizer_lib.train_tokenizer(texts, create.vocab_size, tokenizer_folder)
    architecture = make_architecture(
        create,
        len(tokenizer),
        bos_id=tokenizer.bos_token_id,
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
    )
    meshes.validate_architecture(mesh, architecture)
    model = Transformer(architecture, jnp.dtype(config.model.dtype))
    init = functools.partial(heads.init_params, model, head="lm")
    shapes = jax.eval_shape(init, jax.random.key(0))
    shardings = sharding.tree_shardings(mesh, shapes, sharding.TRAIN_RULES)
    # Created in its shards, as weights from a checkpoint are.
    params = jax.jit(init, out_shardings=shardings)(jax.random.key(seed))
    # First the skill, then the habit: careful solutions are learned well before most examples no
    # longer show them.
    for pairs, steps, lr in (
        (careful, create.steps, create.lr),
        (mostly_hasty, create.habit_steps, create.habit_lr),
    ):
        params = train_on_responses(
            model,
            params,
            tokenize_pairs(pairs, tokenizer),
            batch_size=create.batch_size,
            steps=steps,
            lr=lr,
            seed=seed,
            mesh=mesh,
            report=report,
        )
    export_checkpoint(params, architecture, folder, source_folder=tokenizer_folder)
    shutil.rmtree(tokenizer_folder)


def make_architecture(create: Create, tokens: int, **token_ids: Any) -> Architecture:
    """Return a Llama of the sizes of `model.create`.

    Args:
      create: the sizes.
      tokens: size of the tokenizer; the vocabulary is rounded up so that a mesh can split it.
      **token_ids: `bos_id`, `eos_ids` and `pad_id` of the architecture.
    """
    return Architecture(
        family=CREATED_FAMILY,
        vocab_size=-(-tokens // 16) * 16,
        hidden_size=create.hidden_size,
        intermediate_size=create.intermediate_size,
        num_layers=create.num_layers,
        num_heads=create.num_heads,
        num_kv_heads=create.num_kv_heads,
        head_dim=create.hidden_size // create.num_heads,
        max_position_embeddings=512,
        tied=True,
        **token_ids,
    )


def tokenize_pairs(pairs: SequenceOf[tuple[str, str]], tokenizer: Any) -> Sequences:
    """Return prompts joined with their responses, each with an EOS at its end; host arrays."""
    # Whole lists: one call for each text would take ten times as long.
    texts = [list(part) for part in zip(*pairs, strict=True)]
    prompts = tokenizer(texts[0])["input_ids"]
    endless = tokenizer(texts[1], add_special_tokens=False)["input_ids"]
    responses = [[*ids, tokenizer.eos_token_id] for ids in endless]
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    tokens = np.zeros((len(rows), max(len(row) for row in rows)), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    lengths = np.array([len(response) for response in responses], np.int32)
    return Sequences(
        tokens=tokens,
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        lengths=lengths,
        truncated=np.zeros(len(rows), bool),
        action_mask=np.arange(lengths.max()) < lengths[:, None],
    )


def train_on_responses(
    model: Transformer,
    params: Params,
    sequences: Sequences,
    *,
    batch_size: int,
    steps: int,
    lr: float,
    seed: int,
    mesh: Mesh,
    report: Callable[[str], None],
) -> Params:
    """Minimize the mean negative log-likelihood of response tokens over packed rows.

    AdamW with a cosine schedule to 0.

    Args:
      model: the network.
      params: its parameters, which are donated.
      sequences: all examples, host arrays.
      batch_size: examples per step, approximately: whole rows are drawn.
      steps: number of steps.
      lr: the peak learning rate.
      seed: of the order of the rows.
      mesh: the mesh to train on.
      report: called with lines for the user.
    """
    optim = CriticOptim(
        lr=lr, lr_warmup_steps=max(steps // 20, 1), lr_schedule="cosine", weight_decay=0.0
    )
    options = Supervised(optim)
    init = make_optimizer(options.optim, options.grad_clip).init
    shardings = sharding.tree_shardings(mesh, jax.eval_shape(init, params), sharding.TRAIN_RULES)
    opt_state = jax.jit(init, out_shardings=shardings)(params)
    # All examples are packed once; a step takes some of the rows.
    parts = meshes.row_parts(mesh)
    shards = meshes.row_shards(mesh) // parts
    plan, rows_at_once = _pack_rows(sequences, batch_size, shards, parts)
    sequences = placement.place(sequences, sharding.replicated(mesh))
    rng, order = np.random.default_rng(seed), np.empty(0, np.int64)
    for i in range(steps):
        # Packing sorts by length, so batches are drawn from all rows instead of cut from
        # neighbors.
        if len(order) < rows_at_once:
            order = np.concatenate([order, rng.permutation(len(plan.sample))])
        drawn, order = order[:rows_at_once], order[rows_at_once:]
        batch = jax.tree.map(lambda x, drawn=drawn: x[drawn][None], plan)
        batch = packing_lib.split_columns(batch, shards, parts)
        rows = placement.place(batch, sharding.rows(mesh, axis=1))
        params, opt_state, metrics = train_step(
            LANGUAGE,
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
            report(f"supervised warm-up: step {i + 1}/{steps}, loss {float(metrics['loss']):.3f}")
    return params


def _pack_rows(
    sequences: Sequences, batch_size: int, row_shards: int, parts: int
) -> tuple[Packing, int]:
    """Pack all examples.

    Returns:
      Packing [rows, L] without empty rows, host arrays, and the number of rows per batch.
    """
    # One row per "micro-batch" in the plan, so that rows can be drawn one by one.
    lengths = sequences.prompt_lengths + sequences.lengths
    examples_per_row = max(1, ROW_LENGTH // int(lengths.mean()))
    rows_at_once = -(-batch_size // (examples_per_row * row_shards)) * row_shards
    row_length = max(ROW_LENGTH, int(lengths.max()))
    row_length += -row_length % (2 * parts)
    plans, _ = packing_lib.plan_packing(lengths, np.arange(len(lengths))[None], 1, row_length)
    plan = jax.tree.map(lambda x: x[0, :, 0], plans)
    is_used = (plan.sample >= 0).any(1)
    return jax.tree.map(lambda x: x[is_used], plan), rows_at_once
