"""Supervised training as the life cycle drives it: jax_ppo.sft and jax_ppo.reward_model."""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.config.schema import Config
from jax_ppo.data import prompt_batches
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.save import export_checkpoint, refuse_foreign_folder
from jax_ppo.reporting import console
from jax_ppo.reporting.journal import Journal
from jax_ppo.run import life_cycle
from jax_ppo.run.supervised_build import (
    REWARD_MODEL,
    SFT,
    Batch,
    SupervisedRun,
    Task,
    set_up_run,
)
from jax_ppo.runtime import compilation, distributed, heartbeat, signals
from jax_ppo.runtime.compilation import compile_ahead
from jax_ppo.supervised.step import measure_batch, train_step, trained_shapes
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.optimizer import make_optimizer, rounding_seed
from jax_ppo.training.progress import Progress
from jax_ppo.training.setup import fingerprint_data
from jax_ppo.training.step_hashes import hash_quantities, take_hashes
from jax_ppo.types import Params

State = dict[str, Any]  # "params" and "optimizer", as a checkpoint names them


def train(
    config: Config,
    workdir: Path,
    task: Task,
    cycle: Callable[..., dict[str, Any]] = life_cycle.train,
) -> dict[str, Any]:
    """Train from the newest checkpoint in `workdir`, or from the start if there is none.

    `cycle` takes the steps; it takes the same arguments as `life_cycle.train`.

    Returns:
      The contents of summary.json.
    """

    def build(mesh: jax.sharding.Mesh) -> SupervisedTraining:
        if config.trainer.export:
            # Before training: the export comes after it.
            for folder in life_cycle.export_folders(config.trainer, workdir):
                output = folder / task.output
                distributed.run_on_main(functools.partial(refuse_foreign_folder, output))
        return SupervisedTraining(set_up_run(config, task, mesh))

    # The accuracy, or the negative loss of a task without one.
    return cycle(config, workdir, build, best_metric="quality")


train_sft = functools.partial(train, task=SFT)
train_reward_model = functools.partial(train, task=REWARD_MODEL)


class SupervisedTraining:
    """A supervised task's part of the life cycle: a `life_cycle.Training`."""

    def __init__(self, run: SupervisedRun) -> None:
        """Take the parts of the run."""
        self.command = run.task.command
        self.mesh = run.mesh
        self.total_steps = run.total_steps
        self.position = 0
        self.can_evaluate = bool(run.held_out)
        self._run = run
        self._batches = run.batches(0)

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Return facts that differ if the training examples do."""
        return {"data": fingerprint_data(self._run.config.data, self._run.training.prompts)}

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which nothing runs."""
        return contextlib.nullcontext()

    def open_journal(
        self, workdir: Path, progress: Progress, compiled: compilation.Compilations
    ) -> Journal:
        """Return the reports of the run."""
        return Journal(
            config=self._run.config,
            total_steps=self._run.total_steps,
            layout=self._run.task.layout,
            workdir=workdir,
            progress=progress,
            compiled=compiled,
        )

    def compile_programs(self, progress: Progress) -> Iterator[Any]:
        """Return what compiles the program of a step with `next`."""
        run = self._run
        batch = run.place_batch(run.training, next(run.batches(progress.position)).indices)
        shapes = _state_shapes(run)
        step = run.replicate(np.int32(progress.step))

        def compile_step() -> Iterator[Any]:
            arguments, named = _step_arguments(run, shapes, step, batch)
            yield compile_ahead(train_step, *arguments, **named)

        return compile_step()

    def load_state(self, checkpoints: Checkpointer, step: int) -> State:
        """Return parameters and optimizer state to start from."""
        return start_parameters(self._run, checkpoints, step)

    def begin(self, state: State, checkpoints: Checkpointer, progress: Progress) -> State:
        """Find the first batch."""
        self._batches = self._run.batches(progress.position)
        self.position = progress.position
        return state

    def take_step(self, state: State, step: int, journal: Journal) -> State:
        """Take a step, and queue its report."""
        run = self._run
        # The host packs this batch while the mesh still computes the step before.
        batch = run.place_batch(run.training, next(self._batches).indices)
        self.position = self._batches.position
        with heartbeat.activity(f"step {step + 1}"):
            arguments, named = _step_arguments(run, state, run.replicate(np.int32(step)), batch)
            params, optimizer_state, metrics = train_step(*arguments, **named)
            journal.flush()  # of the step before, while this one is computed
        sequences = batch[0]
        metrics |= hash_quantities(
            {
                "tokens": (sequences.tokens, sequences.prompt_lengths, sequences.lengths),
                "loss": metrics["loss"],
                f"weights/{run.task.output}": params,
            }
        )
        journal.write_later(
            functools.partial(_write_metrics, journal, step + 1, self.command, metrics)
        )
        return {"params": params, "optimizer": optimizer_state}

    def evaluate(
        self,
        state: State,
        completed_steps: int,
        journal: Journal,
        before_batch: Callable[[], None] = lambda: None,
    ) -> life_cycle.Quality:
        """Evaluate on the held-out examples and report it."""
        means = evaluate(self._run, state["params"], before_batch)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        journal.write_evaluation(completed_steps, dict(means), shown)
        # Larger is better for the best checkpoint, hence the negative loss.
        return {"quality": means.get("accuracy", -means["loss"])}

    def checkpoint_trees(self, state: State) -> dict[str, Any]:
        """Return the state."""
        return state

    def export(self, state: State, folder: Path, journal: Journal) -> None:
        """Write the trained model as a Hugging Face folder in a folder."""
        run = self._run
        with signals.limited("exporting the model"):
            export_checkpoint(
                state["params"],
                run.exported_architecture,
                folder / run.task.output,
                dtype=run.config.trainer.export_dtype,
                source_folder=run.folder,
                tokenizer_folder=Path(run.tokenizer.name_or_path),
            )
        journal.report_model(folder / run.task.output, run.task.next_option)


def _step_arguments(
    run: SupervisedRun, state: State, step: jax.Array, batch: Batch
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `train_step`, by position and by name."""
    options = run.config.supervised
    arguments = (
        run.task.objective,
        options,
        run.model,
        run.total_steps,
        state["params"],
        state["optimizer"],
        step,
        *batch,
    )
    return arguments, {"rounding_seed": rounding_seed(options.optim, run.config.seed)}


def _write_metrics(
    journal: Journal, step: int, command: str, on_mesh: dict[str, jax.Array]
) -> None:
    """Fetch and write the metrics and hashes of a step, numbered from 1."""
    # This waits for the step. In the loop the next one has been dispatched before.
    fetched = jax.device_get(on_mesh)
    journal.write_hashes(step, command, take_hashes(fetched))
    metrics = {f"train/{name}": float(value) for name, value in fetched.items()}
    journal.write_step(
        step,
        metrics,
        tokens=metrics["train/tokens"],
        skipped=bool(metrics["train/skipped"]),
    )


def _state_shapes(run: SupervisedRun) -> State:
    """Return shapes and shardings of the state."""
    return trained_shapes(run.config.supervised, run.model, run.task.objective.head, run.mesh)


def start_parameters(run: SupervisedRun, checkpoints: Checkpointer, step: int) -> State:
    """Return parameters and optimizer state to start from.

    At step 0 the model's own parameters are read.
    """
    # Shapes first: both a checkpoint and a model's folder are read into their shards.
    shapes = _state_shapes(run)
    if step:
        return checkpoints.restore(step, shapes).arrays
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    options = run.config.supervised
    params = load_checkpoint(
        run.folder,
        run.model.architecture,
        shardings["params"],
        jnp.dtype(options.optim.param_dtype),
        run.task.objective.head,
        console.make_loading_reporter("model"),
    )
    init_optimizer = make_optimizer(options.optim, options.grad_clip).init
    optimizer = jax.jit(init_optimizer, out_shardings=shardings["optimizer"])(params)
    return {"params": params, "optimizer": optimizer}


def evaluate(
    run: SupervisedRun, params: Params, before_batch: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return the objective's means over the held-out examples.

    `before_batch` is called before each batch; it may raise an exception to end the evaluation.
    """
    assert run.held_out is not None, "there are no validation files"
    objective = run.task.objective
    sums: collections.Counter[str] = collections.Counter()
    batches = prompt_batches.evaluation_batches(
        run.held_out.prompts, run.config.data.val_batch_size
    )
    with heartbeat.activity("evaluation") as activity:
        for number, batch in enumerate(batches, start=1):
            activity.update(f"batch {number}")
            before_batch()
            batch_sums = measure_batch(
                objective,
                run.config.supervised,
                run.model,
                params,
                *run.place_batch(run.held_out, batch.indices, batch.count),
            )
            sums.update({name: float(value) for name, value in jax.device_get(batch_sums).items()})
    # Sums of all batches over all units: batches of any size count by their content.
    units = sums.pop("units")
    return {name: sums[name] / units for name in objective.names}
