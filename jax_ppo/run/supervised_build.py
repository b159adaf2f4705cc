"""The tasks of the supervised commands, and the parts of a run that stay from step to step."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config import notes
from jax_ppo.config.schema import Config, Data
from jax_ppo.data import prompt_batches, responses
from jax_ppo.data.responses import ResponseDataset
from jax_ppo.memory.memory_check import SupervisedMemory, validate_memory
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.hub import resolve_model_folder
from jax_ppo.models.hf.load import describe_unread_parts, has_score_head, read_architecture
from jax_ppo.models.transformer import Transformer
from jax_ppo.reporting import console, journal
from jax_ppo.reporting.curves import Panel
from jax_ppo.run.parts import batches_in_order
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.supervised.step import LANGUAGE, PREFERENCE, SupervisedObjective
from jax_ppo.training import packing
from jax_ppo.training.decoders import build_decoder, describe_attention
from jax_ppo.training.networks import refuse_router_loss
from jax_ppo.training.setup import (
    count_steps,
    load_examples,
    load_model_tokenizer,
    make_encoding,
    validate_model,
)
from jax_ppo.types import Example, Packing, Sequences

# Arguments of a step: the samples, their packing, and its micro-batch count.
Batch = tuple[Sequences, Packing, jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
    """Task of one of the supervised commands: its objective and its reports.

    Attributes:
      command: the command's name.
      objective: the objective that the model is trained on.
      response_fields: the responses that an example must have.
      unit: what an example is called, in the plural, on the console.
      output: the folder in the work directory where the trained model is written.
      next_option: the option by which PPO reads it.
      layout: how its metrics are shown.
    """

    command: str
    objective: SupervisedObjective
    response_fields: tuple[str, ...]
    unit: str
    output: str
    next_option: str
    layout: journal.ReportLayout


_LOSS = console.Column(metric="train/loss", width=6, format=".3f", label="loss ")
_GRADIENT = console.Column(metric="train/grad_norm", width=5, format=".3g", label="grads ")
_GRADIENT_PANEL = Panel(
    title="gradient", unit="norm before clipping", curves={"norm": "train/grad_norm"}
)
_LEARNING_RATE = "supervised.optim.lr"
SFT = Task(
    command="sft",
    objective=LANGUAGE,
    response_fields=responses.DEMONSTRATION_FIELDS,
    unit="examples",
    output="actor",
    next_option="model.path",
    layout=journal.ReportLayout(
        columns=(_LOSS, _GRADIENT, *journal.SPEED_COLUMNS),
        panels=(
            Panel(
                title="loss",
                unit="nats per token",
                curves={"training": "train/loss", "evaluation": "eval/loss"},
            ),
            _GRADIENT_PANEL,
        ),
        learning_rate_option=_LEARNING_RATE,
        best_metric="train/loss",
        best_value=min,
    ),
)
REWARD_MODEL = Task(
    command="reward_model",
    objective=PREFERENCE,
    response_fields=responses.PREFERENCE_FIELDS,
    unit="pairs",
    output="reward_model",
    next_option="reward.model_path",
    layout=journal.ReportLayout(
        columns=(
            _LOSS,
            console.Column(metric="train/accuracy", width=5, format=".3f", label="acc "),
            console.Column(metric="train/margin", width=6, format=".3f", label="margin "),
            _GRADIENT,
            *journal.SPEED_COLUMNS,
        ),
        panels=(
            Panel(
                title="loss",
                unit="per pair, center_coef included",
                curves={"training": "train/loss", "evaluation": "eval/loss"},
            ),
            Panel(
                title="accuracy",
                unit="share of pairs",
                curves={"training": "train/accuracy", "evaluation": "eval/accuracy"},
            ),
            Panel(
                title="scores",
                unit="score",
                curves={
                    "margin": "train/margin",
                    "mean": "train/score",
                    "margin, evaluation": "eval/margin",
                },
            ),
            _GRADIENT_PANEL,
        ),
        learning_rate_option=_LEARNING_RATE,
        best_metric="train/loss",
        best_value=min,
    ),
)


@dataclasses.dataclass(frozen=True)
class SupervisedRun:
    """The parts of a run.

    Attributes:
      config: all options.
      task: what is trained.
      mesh: the run's mesh.
      folder: the checkpoint that training starts from.
      tokenizer: the model's, or that of `model.tokenizer_path`.
      training: the examples that are trained on.
      held_out: the examples of evaluations; `None` without validation files.
      row_length: L, tokens of a packed row.
      model: the network.
      total_steps: number of steps of the whole run.
    """

    config: Config
    task: Task
    mesh: Mesh
    folder: Path
    tokenizer: Any
    training: ResponseDataset
    held_out: ResponseDataset | None
    row_length: int
    model: Transformer
    total_steps: int

    @property
    def exported_architecture(self) -> Architecture:
        """Return the model's architecture, with the tokens that trained responses ended in."""
        architecture = self.model.architecture
        # Otherwise a sampler would not stop where the trained responses end.
        eos_ids = (*architecture.eos_ids, self.tokenizer.eos_token_id, *self.training.end_ids)
        return dataclasses.replace(architecture, eos_ids=tuple(dict.fromkeys(eos_ids)))

    def batches(self, position: int) -> prompt_batches.PromptBatches:
        """Return the training batches that follow a position, counted in examples consumed.

        Only their `indices` matter here.
        """
        return batches_in_order(self.config.data, self.config.seed, self.training.prompts, position)

    def replicate(self, tree: Any) -> Any:
        """Return host arrays on every device of the mesh."""
        return placement.place(tree, sharding.replicated(self.mesh))

    def place_batch(
        self, dataset: ResponseDataset, rows: np.ndarray, count: int | None = None
    ) -> Batch:
        """Pack rows of a data set and return them on the mesh.

        The first `count` rows are real, by default all; later ones are not packed.
        """
        num_rows = len(rows)
        num_responses = len(self.task.response_fields)
        sequences = dataset.sequences(rows.tolist())
        # The sequences of a pair are packed as one, so that both are in one row.
        lengths = (sequences.prompt_lengths + sequences.lengths).reshape(num_responses, -1)
        parts = meshes.row_parts(self.mesh)
        shards = meshes.row_shards(self.mesh) // parts
        rows_at_once = packing.rows_per_micro_batch(
            self.config.supervised.micro_batch_size_per_device,
            self.row_length // parts,
            num_rows,
            shards,
            meshes.needs_large_micro_batches(self.mesh),
        )
        if count is None:
            count = num_rows
        # A length of 0 takes no place in a row.
        is_real = np.arange(num_rows) < count
        plans, counts = packing.plan_packing(
            lengths.sum(0) * is_real,
            np.arange(num_rows)[None],
            rows_at_once,
            self.row_length,
            self.config.packing.enabled,
        )
        plan = jax.tree.map(lambda x: x[0], plans)
        if num_responses > 1:
            plan = packing.split_pairs(plan, lengths[0])
        plan = packing.split_columns(plan, shards, parts)
        return (
            self.replicate(sequences),
            placement.place(plan, sharding.rows(self.mesh, axis=1)),
            self.replicate(counts[0]),
        )


def set_up_run(config: Config, task: Task, mesh: Mesh) -> SupervisedRun:
    """Build the parts of a run, cheap checks first; weights are not loaded.

    Raises:
      UserError: an option does not fit the data, the model or the machine.
    """
    # 1. Notes and data, before anything of the model is read.
    for note in notes.note_unread_options(config, task.command):
        console.print_on_main(f"note: {note}")
    response_key = config.supervised.response_key
    training, held_out = load_examples(config.data, config.seed, response_key)
    for examples, option in (
        (training, "config.data.train_files"),
        (held_out, "config.data.val_files"),
    ):
        responses.validate_responses(examples, task.response_fields, option, response_key)

    # 2. The model's folder, tokenizer and architecture.
    folder = resolve_model_folder(config.model.path)
    tokenizer = load_model_tokenizer(config.model, folder)
    architecture = read_architecture(folder)
    for line in describe_unread_parts(folder):
        console.print_on_main(line)
    validate_model("model", mesh, architecture, tokenizer, config.sequence_length)
    if task.objective.head == "scalar" and has_score_head(folder):
        console.print_on_main(
            f"note: config.model.path={config.model.path!r} has a scalar head; it is left out, a "
            "new one is made"
        )
    head = task.objective.head
    model = Transformer(architecture, jnp.dtype(config.model.dtype))
    validate_memory(SupervisedMemory(config, model, head, mesh))

    # 3. Examples as tokens, which fix the row length and the number of steps.
    console.print_on_main(f"tokenizing {len(training) + len(held_out)} {task.unit}")
    training_set = _tokenize(config.data, task, training, tokenizer, "config.data.train_files")
    held_out_set = None
    if held_out:
        held_out_set = _tokenize(config.data, task, held_out, tokenizer, "config.data.val_files")
    longest = max(dataset.longest for dataset in (training_set, held_out_set) if dataset)
    parts = meshes.row_parts(mesh)
    row_length = config.packing.row_length or packing.row_width(longest, parts)
    batches = batches_in_order(config.data, config.seed, training_set.prompts)
    run = SupervisedRun(
        config=config,
        task=task,
        mesh=mesh,
        folder=folder,
        tokenizer=tokenizer,
        training=training_set,
        held_out=held_out_set,
        row_length=row_length,
        model=build_decoder(architecture, config.model, row_length),
        total_steps=count_steps(config.trainer, batches.steps_per_epoch),
    )
    coef = config.supervised.router_aux_loss_coef
    refuse_router_loss("config.supervised", coef, run.model)
    if attention := describe_attention(config.model, run.model, row_length):
        console.print_on_main(attention)
    console.print_on_main(
        f"{len(run.training)} training and {len(run.held_out or ())} held-out {task.unit}, "
        f"{run.total_steps} steps of {config.data.train_batch_size}"
    )
    return run


def _tokenize(
    data: Data, task: Task, examples: list[Example], tokenizer: Any, option: str
) -> ResponseDataset:
    return responses.tokenize_responses(
        examples,
        tokenizer,
        task.response_fields,
        make_encoding(data),
        data.max_response_length,
        option,
    )
