"""Supervised warm-up: a small model and its tokenizer, trained on worked examples.

It gives the embedded arithmetic task a model to start from without a download. The model learns
first a skill, to solve problems step by step, and then the habit of seldom doing so, which leaves
reinforcement learning something to improve.
"""

import functools
import shutil
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import Create, CriticOptim, Model, Supervised
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.prompt_batches import pad_token_rows
from jax_ppo.demonstration import arithmetic
from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.families import CREATED_FAMILY
from jax_ppo.models.hf.load import has_weights, read_architecture
from jax_ppo.models.hf.save import export_checkpoint, export_description
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import heartbeat, meshes, placement, sharding
from jax_ppo.supervised.step import LANGUAGE, train_step
from jax_ppo.training import packing as packing_lib
from jax_ppo.training.optimizer import make_optimizer
from jax_ppo.types import Packing, Params, Sequences

NUM_EXAMPLES = 8_192  # of each kind, at most
TOKENIZER_EXAMPLES = 2_000
ROW_LENGTH = 144  # three worked examples
BATCH_SIZE = 32  # examples per step, approximately: whole rows are drawn
LR = 6e-3  # at its peak, while the skill is learned
HABIT_LR = 3e-4
CAREFUL_SHARE = 0.25  # of the habit's examples that are solved step by step
WEIGHT_DECAY = 0.5  # without it the model learns examples by heart, not the skill
BETA2 = 0.95  # moments over a thousand steps would remember the start of a few hundred steps

# Factors on the initial weights, whose standard deviation of 0.02 is that of wide models. Without
# them attention takes twice as many steps to find the operands. Kernels that write to the residual
# stream get a smaller one, as in GPT-2.
EMBEDDING_SCALE = 5
KERNEL_SCALE = 3
RESIDUAL_SCALE = 2
RESIDUAL_KERNELS = ("o_proj", "down_proj")


def describe_model(create: Create, seed: int, folder: Path) -> None:
    """Write the tokenizer and config.json of a small model, to which `train_weights` adds weights.

    Does nothing if the folder already holds a complete model. The problems depend on the seed.
    Raise `UserError` if the vocabulary is too small for their characters.
    """
    if has_weights(folder):
        return
    pairs = _generate_pairs(create.steps, 1.0, seed)
    texts = [prompt + response for prompt, response in pairs]
    # Each process writes a separate folder: they may share a disk. A hidden one is not uploaded.
    tokenizer_folder = folder.with_name(f".{folder.name}_tokenizer_{jax.process_index()}")
    tokenizer = tokenizer_lib.train_tokenizer(
        texts[:TOKENIZER_EXAMPLES], create.vocab_size, tokenizer_folder
    )
    architecture = make_architecture(
        create,
        len(tokenizer),
        bos_id=tokenizer.bos_token_id,
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
    )
    export_description(architecture, folder, source_folder=tokenizer_folder)
    shutil.rmtree(tokenizer_folder)


def train_weights(
    options: Model, seed: int, folder: Path, mesh: Mesh, report: Callable[[str], None]
) -> None:
    """Train the weights of the model that `describe_model` described, and add them to its folder.

    Does nothing if the folder already holds weights. The problems and the first weights depend on
    the seed; `report` is called with lines for the user.
    """
    if has_weights(folder):
        return
    create = options.create
    architecture = read_architecture(folder, needs_weights=False)
    model = Transformer(architecture, jnp.dtype(options.dtype))
    init = functools.partial(_init_params, model)
    shapes = jax.eval_shape(init, jax.random.key(0))
    shardings = sharding.tree_shardings(mesh, shapes, sharding.TRAIN_RULES)
    # Created in its shards, as weights from a checkpoint are.
    params = jax.jit(init, out_shardings=shardings)(jax.random.key(seed))
    careful = _generate_pairs(create.steps, 1.0, seed)
    mostly_hasty = _generate_pairs(create.habit_steps, CAREFUL_SHARE, seed)
    params = train_on_responses(
        model,
        params,
        tokenize_pairs([*careful, *mostly_hasty], tokenizer_lib.load_tokenizer(str(folder))),
        num_careful=len(careful),
        create=create,
        seed=seed,
        mesh=mesh,
        report=report,
    )
    export_checkpoint(params, architecture, folder, source_folder=folder)


def _generate_pairs(steps: int, careful_share: float, seed: int) -> list[tuple[str, str]]:
    """Return as many prompts with responses as `steps` read, at most `NUM_EXAMPLES`."""
    count = max(min(steps * BATCH_SIZE, NUM_EXAMPLES), BATCH_SIZE)
    return arithmetic.generate_worked_solutions(count, careful_share, seed)


def _init_params(model: Transformer, key: jax.Array) -> Params:
    """Return the parameters that training starts from."""

    def scale(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "embedding" in names:
            return EMBEDDING_SCALE * x
        if any(name in names for name in RESIDUAL_KERNELS):
            return RESIDUAL_SCALE * x
        if "kernel" in names:
            return KERNEL_SCALE * x
        return x

    return jax.tree_util.tree_map_with_path(scale, heads.init_params(model, key, head="lm"))


def make_architecture(create: Create, tokens: int, **token_ids: Any) -> Architecture:
    """Return a Llama of the sizes of `model.create`, with the `bos_id`, `eos_ids` and `pad_id`.

    The vocabulary is the number of tokens, rounded up so that a mesh can split it.
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
    tokens = pad_token_rows(rows, max(len(row) for row in rows))
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
    num_careful: int,
    create: Create,
    seed: int,
    mesh: Mesh,
    report: Callable[[str], None],
) -> Params:
    """Minimize the mean negative log-likelihood of response tokens over packed rows.

    The first `num_careful` sequences, host arrays, teach the skill, which must be learned well
    before the others teach the habit. The learning rate of AdamW falls linearly to that of the
    habit, which is constant: one schedule, and so one program, for both.

    The parameters are donated; the seed determines the order of the rows.
    """
    options = _training_options(create)
    init = make_optimizer(options.optim, options.grad_clip).init
    shardings = sharding.tree_shardings(mesh, jax.eval_shape(init, params), sharding.TRAIN_RULES)
    opt_state = jax.jit(init, out_shardings=shardings)(params)
    # All examples are packed once; a step takes some of the rows.
    parts = meshes.row_parts(mesh)
    shards = meshes.row_shards(mesh) // parts
    packed, rows_at_once = _pack_rows(sequences, num_careful, BATCH_SIZE, shards, parts)
    sequences = placement.place(sequences, sharding.replicated(mesh))
    rng = np.random.default_rng(seed)
    careful_batches = _draw_rows(packed[0], rows_at_once, rng)
    habit_batches = _draw_rows(packed[1], rows_at_once, rng)
    last_steps = (create.steps, create.steps + create.habit_steps)
    with heartbeat.activity("supervised warm-up") as activity:
        for step in range(1, last_steps[-1] + 1):
            batches = careful_batches if step <= create.steps else habit_batches
            batch = packing_lib.split_columns(next(batches), shards, parts)
            rows = placement.place(batch, sharding.rows(mesh, axis=1))
            params, opt_state, metrics = train_step(
                LANGUAGE,
                options,
                model,
                create.steps,  # at which the schedule ends
                params,
                opt_state,
                np.int32(step - 1),
                sequences,
                rows,
                np.int32(1),
            )
            # Reading the loss waits for the mesh, so that the host does not run far ahead of it.
            if step == 1 or step % 20 == 0 or step in last_steps:
                loss = float(metrics["loss"])
                progress = f"step {step}/{last_steps[-1]}, loss {loss:.3f}"
                activity.update(progress)
    report(f"supervised warm-up: {progress}")
    return params


def _training_options(create: Create) -> Supervised:
    """Return the options of training; the schedule ends at the habit's learning rate."""
    return Supervised(
        CriticOptim(
            lr=LR,
            lr_warmup_steps=max(create.steps // 20, 1),
            lr_schedule="linear",
            min_lr_ratio=HABIT_LR / LR,
            beta2=BETA2,
            weight_decay=WEIGHT_DECAY,
        )
    )


def _draw_rows(rows: Packing, count: int, rng: np.random.Generator) -> Iterator[Packing]:
    """Yield batches [1, count, L] of rows without end; none returns before all have been drawn.

    Packing sorts by length, so batches are drawn from all rows instead of cut from neighbors.
    """
    order = np.empty(0, np.int64)
    while True:
        while len(order) < count:
            order = np.concatenate([order, rng.permutation(len(rows.sample))])
        drawn = order[:count]
        order = order[count:]
        yield jax.tree.map(lambda x, drawn=drawn: x[drawn][None], rows)


def _pack_rows(
    sequences: Sequences, num_careful: int, batch_size: int, row_shards: int, parts: int
) -> tuple[list[Packing], int]:
    """Pack the first `num_careful` examples, and the others.

    Returns:
      The packing of each part, host arrays [rows, L] without empty rows; and the number of rows
      per batch.
    """
    lengths = sequences.prompt_lengths + sequences.lengths
    examples_per_row = max(1, ROW_LENGTH // int(lengths[:num_careful].mean()))
    rows_at_once = -(-batch_size // (examples_per_row * row_shards)) * row_shards
    row_length = max(ROW_LENGTH, int(lengths.max()))
    row_length += -row_length % (2 * parts)
    packed = []
    for examples in np.split(np.arange(len(lengths)), [num_careful]):
        # One row per "micro-batch" of the packing, so that rows can be drawn one by one.
        packing, _ = packing_lib.pack_samples(lengths, examples[None], 1, row_length)
        rows = jax.tree.map(lambda x: x[0, :, 0], packing)
        is_used = (rows.sample >= 0).any(1)
        packed.append(jax.tree.map(lambda x, is_used=is_used: x[is_used], rows))
    return packed, rows_at_once
