"""Supervised training as the life cycle drives it: jax_ppo.sft and jax_ppo.reward_model."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config import validation
from jax_ppo.config.schema import Config, replace_options
from jax_ppo.data import prompt_batches
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.data.responses import ResponseDataset
from jax_ppo.errors import counted
from jax_ppo.memory.automatic_sizes import Sizes, rank_sizes
from jax_ppo.memory.memory_check import SupervisedMemory, validate_memory
from jax_ppo.models.hf.load import (
    describe_unread_parts,
    has_score_head,
    load_checkpoint,
    read_architecture,
)
from jax_ppo.models.hf.model_folders import resolve_model_folder
from jax_ppo.models.hf.save import export_checkpoint, refuse_foreign_folder
from jax_ppo.models.transformer import Transformer
from jax_ppo.reporting import console
from jax_ppo.reporting.journal import Journal
from jax_ppo.run import life_cycle
from jax_ppo.run.parts import batches_in_order
from jax_ppo.run.run_examples import (
    fingerprint_data,
    load_examples,
    tokenize_run_responses,
    validate_run_responses,
)
from jax_ppo.run.run_models import load_model_tokenizer, validate_model
from jax_ppo.run.supervised_tasks import REWARD_MODEL, SFT, Task
from jax_ppo.runtime import (
    compiled_programs,
    distributed,
    heartbeat,
    meshes,
    placement,
    sharding,
    signals,
)
from jax_ppo.training import packing
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.decoders import build_decoder, describe_attention
from jax_ppo.training.learner import Metrics
from jax_ppo.training.networks import refuse_without_experts
from jax_ppo.training.optimizer import make_optimizer, rounding_seed
from jax_ppo.training.progress import Progress
from jax_ppo.training.supervised_step import (
    State,
    SupervisedStep,
    measure_batch,
    train_step,
    trained_shapes,
)
from jax_ppo.types import MiniBatches, Sequences, with_nan


def train_supervised(config: Config, workdir: Path, task: Task) -> dict[str, Any]:
    """Train, and return the contents of summary.json."""

    def build(sizes: Mapping[str, Any], mesh: Mesh) -> SupervisedTraining:
        # Before training: the export comes after it.
        for folder in life_cycle.export_folders(config.trainer, workdir):
            output = folder / task.output
            distributed.run_on_main(functools.partial(refuse_foreign_folder, output))
        return build_training(replace_options(config, sizes), task, mesh)

    def rank(options: Mapping[str, Any], mesh: Mesh) -> list[Sizes]:
        """Return the sizes that are automatic, without estimates: the compiler decides."""
        free = replace_options(config, options)
        parts = meshes.row_parts(mesh)
        shards = meshes.row_shards(mesh) // parts
        length = packing.row_width(config.sequence_length, parts) // parts
        large = meshes.needs_large_micro_batches(mesh)
        samples = config.data.train_batch_size
        option = "supervised.micro_batch_size_per_device"
        return rank_sizes(
            free.model.gradient_checkpointing,
            (option, free.supervised.micro_batch_size_per_device),
            packing.rows_per_micro_batch(None, length, samples, shards, large) // shards,
            lambda sizes: 0,
        )

    kind = life_cycle.TrainingKind(task.command, "quality", build, rank)
    return life_cycle.run_life_cycle(config, workdir, kind)


train_sft = functools.partial(train_supervised, task=SFT)
train_reward_model = functools.partial(train_supervised, task=REWARD_MODEL)


@dataclasses.dataclass
class SupervisedTraining:
    """A supervised task's part of the life cycle: a `life_cycle.Training`."""

    config: Config
    task: Task
    mesh: Mesh
    folder: Path  # the checkpoint that training starts from
    tokenizer: Any  # the model's, or that of `model.tokenizer_path`
    training: ResponseDataset  # the examples that are trained on
    held_out: ResponseDataset | None  # the examples of evaluations; `None` without validation files
    row_length: int  # L, tokens of a packed row
    model: Transformer  # the network
    total_steps: int  # number of steps of the whole run
    position: int = 0  # training examples consumed by the steps so far

    def __post_init__(self) -> None:
        self.can_evaluate = bool(self.held_out)
        head = self.task.objective.head
        self.memory = SupervisedMemory(self.config, self.model, head, self.mesh)
        self._batches = self._batches_from(0)
        options = self.config.supervised
        seed = rounding_seed(options.optim, self.config.seed)
        self._setup = SupervisedStep(
            self.task.objective, options, self.model, self.total_steps, seed
        )

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Return facts that differ if the training examples do."""
        return {"data": fingerprint_data(self.config.data, self.training.prompts)}

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which nothing runs."""
        return contextlib.nullcontext()

    def open_journal(
        self, workdir: Path, progress: Progress, compiled: compiled_programs.Compilations
    ) -> Journal:
        """Return the reports of the run."""
        return Journal(
            trainer=self.config.trainer,
            options=dataclasses.asdict(self.config),
            total_steps=self.total_steps,
            layout=self.task.layout,
            workdir=workdir,
            progress=progress,
            compiled=compiled,
        )

    def step_on_shapes(self, progress: Progress) -> Callable[[], object]:
        """Return a function that takes the next step on shapes."""
        batches = self._batches_from(progress.position)
        return functools.partial(self._run_step, self._state_shapes(), progress.step, batches)

    @heartbeat.activity("loading the state")
    def load_state(self, checkpoints: Checkpointer, step: int) -> State:
        """Return parameters and optimizer state; at step 0 the model's own parameters are read."""
        # Shapes first: both a checkpoint and a model's folder are read into their shards.
        shapes = self._state_shapes()
        if step:
            return checkpoints.restore(step, shapes).arrays
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        options = self.config.supervised
        params = load_checkpoint(
            self.folder,
            self.model.architecture,
            shardings["params"],
            jnp.dtype(options.optim.param_dtype),
            self.task.objective.head,
            console.make_loading_reporter("model"),
        )
        init_optimizer = make_optimizer(options).init
        optimizer = jax.jit(init_optimizer, out_shardings=shardings["optimizer"])(params)
        return {"params": params, "optimizer": optimizer}

    def prepare_first_step(self, checkpoints: Checkpointer, progress: Progress) -> None:
        """Move the data to the first batch."""
        self._batches = self._batches_from(progress.position)
        self.position = progress.position

    def take_step(self, state: State, step: int, journal: Journal) -> State:
        """Take a step, and queue its report."""
        state, metrics = self._run_step(state, step, self._batches)
        self.position = self._batches.position
        journal.write_pending_report()  # of the step before, while this one is computed

        def write() -> None:
            # This waits for the step. In the loop the next one has been dispatched before.
            fetched = jax.device_get(metrics)
            values = {f"train/{name}": float(with_nan(value)) for name, value in fetched.items()}
            skipped = bool(values["train/skipped"])
            journal.write_step(step + 1, values, tokens=values["train/tokens"], skipped=skipped)

        journal.write_later(write)
        return state

    def evaluate(
        self,
        state: State,
        completed_steps: int,
        journal: Journal,
        before_batch: Callable[[], None] = lambda: None,
    ) -> life_cycle.Quality:
        """Evaluate on the held-out examples and report it."""
        assert self.held_out is not None, "there are no validation files"
        sums: collections.Counter[str] = collections.Counter()
        batches = prompt_batches.evaluation_batches(
            self.held_out.prompts, self.config.data.val_batch_size
        )
        with heartbeat.activity("evaluation") as activity:
            for number, batch in enumerate(batches, start=1):
                activity.update(f"batch {number}")
                before_batch()
                placed = self.place_batch(self.held_out, batch)
                batch_sums = jax.device_get(measure_batch(self._setup, state["params"], *placed))
                sums.update({name: float(value) for name, value in batch_sums.items()})
        # Sums of all batches over all units: batches of any size count by their content.
        units = sums.pop("units")
        means = {name: sums[name] / units for name in self.task.objective.names}
        shown = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        journal.write_evaluation(completed_steps, dict(means), shown)
        # Larger is better for the best checkpoint, hence the negative loss.
        return {"quality": means.get("accuracy", -means["loss"])}

    def checkpoint_trees(self, state: State) -> dict[str, Any]:
        """Return the state."""
        return state

    def export(self, state: State, folder: Path, journal: Journal) -> None:
        """Write the trained model as a Hugging Face folder in a folder."""
        architecture = self.model.architecture
        # Otherwise a sampler would not stop where the trained responses end.
        eos_ids = (*architecture.eos_ids, self.tokenizer.eos_token_id, *self.training.end_ids)
        with signals.limited("exporting the model"):
            export_checkpoint(
                state["params"],
                dataclasses.replace(architecture, eos_ids=tuple(dict.fromkeys(eos_ids))),
                folder / self.task.output,
                dtype=self.config.trainer.export_dtype,
                source_folder=self.folder,
                tokenizer_folder=Path(self.tokenizer.name_or_path),
            )
        journal.report_model(folder / self.task.output, self.task.next_option)

    def place_batch(
        self, dataset: ResponseDataset, batch: PromptBatch
    ) -> tuple[Sequences, MiniBatches]:
        """Return all rows of a batch on the mesh, and the real ones as a packed mini-batch."""
        num_rows = len(batch.indices)
        num_responses = len(self.task.response_fields)
        sequences = dataset.sequences(batch.indices.tolist())
        # The sequences of a pair are packed as one, so that both are in one row.
        lengths = (sequences.prompt_lengths + sequences.lengths).reshape(num_responses, -1)
        # A length of 0 takes no place in a row.
        is_real = np.arange(num_rows) < batch.count
        packings, counts = packing.pack_on_mesh(
            self.mesh,
            lengths.sum(0) * is_real,
            np.arange(num_rows)[None],
            self.row_length,
            self.config.supervised.micro_batch_size_per_device,
            self.config.packing.enabled,
        )
        packed = jax.tree.map(lambda x: x[0], packings)
        if num_responses > 1:
            packed = packing.split_pairs(packed, lengths[0])
        return self._replicate(sequences), MiniBatches(
            packing=placement.place(packed, sharding.rows(self.mesh, axis=1)),
            counts=self._replicate(counts[0]),
            members=self._replicate(np.tile(is_real, num_responses)),
        )

    def _batches_from(self, position: int) -> prompt_batches.PromptBatches:
        return batches_in_order(self.config.data, self.config.seed, self.training.prompts, position)

    def _replicate(self, tree: Any) -> Any:
        return placement.place(tree, sharding.replicated(self.mesh))

    def _state_shapes(self) -> State:
        head = self.task.objective.head
        return trained_shapes(self.config.supervised, self.model, head, self.mesh)

    def _run_step(
        self, state: State, step: int, batches: prompt_batches.PromptBatches
    ) -> tuple[State, Metrics]:
        # The host packs this batch while the mesh still computes the step before.
        batch = self.place_batch(self.training, next(batches))
        return train_step(self._setup, state, self._replicate(np.int32(step)), *batch)


@heartbeat.activity("preparing the run")
def build_training(config: Config, task: Task, mesh: Mesh) -> SupervisedTraining:
    """Build a run without weights; raise `UserError` if data, model or machine do not fit it."""
    # 1. Notes and data, before anything of the model is read.
    for note in validation.note_unread_options(config, task.command):
        console.print_on_main(f"note: {note}")
    response_key = config.supervised.response_key
    training, held_out = load_examples(config.data, config.seed, response_key)
    validate_run_responses(config.data, response_key, task.response_fields, training, held_out)

    # 2. The model's folder, tokenizer and architecture.
    folder = resolve_model_folder(config.model.path)
    tokenizer = load_model_tokenizer(config.model, folder, config.data.date)
    architecture = read_architecture(folder)
    for line in describe_unread_parts(folder):
        console.print_on_main(line)
    validate_model("model", mesh, architecture, tokenizer, config.sequence_length)
    head = task.objective.head
    if head == "scalar" and has_score_head(folder):
        console.print_on_main(
            f"note: config.model.path={config.model.path!r}: a new scalar head replaces the one "
            "in it"
        )
    model = Transformer(architecture, jnp.dtype(config.model.dtype))
    coef = config.supervised.router_aux_loss_coef
    refuse_without_experts("supervised.router_aux_loss_coef", coef, 0, model)
    validate_memory(SupervisedMemory(config, model, head, mesh))

    # 3. Examples as tokens, which fix the row length and the number of steps.
    console.print_on_main(f"tokenizing {len(training) + len(held_out)} {task.unit}")
    training_set, held_out_set = tokenize_run_responses(
        config.data, tokenizer, task.response_fields, training, held_out
    )
    longest = max(dataset.longest for dataset in (training_set, held_out_set) if dataset)
    parts = meshes.row_parts(mesh)
    row_length = config.packing.row_length or packing.row_width(longest, parts)
    batches = batches_in_order(config.data, config.seed, training_set.prompts)
    run = SupervisedTraining(
        config=config,
        task=task,
        mesh=mesh,
        folder=folder,
        tokenizer=tokenizer,
        training=training_set,
        held_out=held_out_set,
        row_length=row_length,
        model=build_decoder(architecture, config.model, row_length),
        total_steps=life_cycle.count_steps(config.trainer, batches.steps_per_epoch),
    )
    optims = {"supervised": config.supervised.optim}
    for note in validation.note_long_warmups(run.total_steps, 0, optims):
        console.print_on_main(f"note: {note}")
    if attention := describe_attention(config.model, run.model, row_length):
        console.print_on_main(attention)
    batch_size = config.data.train_batch_size
    console.print_on_main(
        f"{len(run.training)} training and {len(run.held_out or ())} held-out {task.unit}, "
        f"{counted(run.total_steps, 'step')} of {batch_size} "
        f"({run.total_steps * batch_size / len(run.training):.3g} epochs)"
    )
    return run
