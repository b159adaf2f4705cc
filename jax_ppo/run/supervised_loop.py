"""Supervised training: the loop of jax_ppo.sft and of jax_ppo.reward_model."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_ppo.config.schema import Config
from jax_ppo.data import prompt_batches
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.save import export_checkpoint, refuse_foreign_folder
from jax_ppo.reporting import console
from jax_ppo.run.supervised_build import SupervisedRun, set_up_run
from jax_ppo.run.supervised_report import Reporter
from jax_ppo.run.supervised_tasks import Task
from jax_ppo.runtime import (
    compilation,
    distributed,
    heartbeat,
    meshes,
    signals,
    work_directory,
)
from jax_ppo.supervised.parameters import trained_shapes
from jax_ppo.supervised.step import measure_batch, train_step
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.optimizer import make_optimizer, rounding_seed
from jax_ppo.training.progress import Progress
from jax_ppo.training.resume import find_progress, is_due
from jax_ppo.training.setup import fingerprint_data
from jax_ppo.training.stopping import EvaluationInterrupted, StopRequest
from jax_ppo.types import Params


def train(config: Config, workdir: Path, task: Task) -> dict[str, Any]:
    """Train from the newest checkpoint in `workdir`, or from the start if there is none.

    Returns:
      The contents of summary.json.
    """
    mesh = meshes.make_mesh(config.mesh)
    trainer = config.trainer
    with (
        jax.set_mesh(mesh),
        compilation.count_compilations() as compiled,
        Checkpointer(
            work_directory.checkpoint_directory(workdir),
            max_to_keep=trainer.max_checkpoints,
            best_metric="quality",
            report=console.print_on_main,
            before_save=functools.partial(work_directory.publish, workdir),
        ) as checkpoints,
    ):
        if trainer.export:
            # Before training: the export comes after it.
            distributed.run_on_main(lambda: refuse_foreign_folder(workdir / task.output))
        run = set_up_run(config, task, mesh)
        progress = find_progress(
            config,
            run.total_steps,
            checkpoints,
            console.print_on_main,
            task.command,
            fingerprint_data(config.data, run.training.prompts),
        )
        with Reporter(run, workdir, progress, compiled) as reporter:
            params, completed_steps, was_preempted = take_steps(
                run, checkpoints, progress, reporter
            )
            # A preempted run ends without an export: the next start resumes it.
            if trainer.export and not was_preempted:
                with signals.limited("exporting the model"):
                    export_model(run, params, workdir)
                reporter.report_model(task.output, task.next_option)
            return reporter.finish(completed_steps)


def take_steps(
    run: SupervisedRun, checkpoints: Checkpointer, progress: Progress, reporter: Reporter
) -> tuple[Params, int, bool]:
    """Take the remaining steps of a run.

    Args:
      run: the parts of the run.
      checkpoints: where the parameters are restored from and saved.
      progress: how far the run has come.
      reporter: writes metrics and evaluations.

    Returns:
      The trained parameters, the number of completed steps, and whether a signal has ended the run
      after its current step was saved.
    """
    config = run.config
    params, optimizer_state = start_parameters(run, checkpoints, progress.step)
    reporter.restart_clock()
    evaluates_first = progress.step == 0 and config.trainer.val_before_train
    if run.held_out and (evaluates_first or progress.evaluation_pending):
        reporter.report_evaluation(progress.step, evaluate(run, params))
        progress.evaluation_pending = False
    batches = run.batches(progress.position)
    stop_request = StopRequest()
    for step in range(progress.step, run.total_steps):
        # The host packs this batch while the mesh still computes the step before.
        batch = run.place_batch(run.training, next(batches).indices)
        with heartbeat.activity(f"step {step + 1}"):  # the first compiles
            params, optimizer_state, metrics = train_step(
                run.task.objective,
                config.supervised,
                run.model,
                run.total_steps,
                params,
                optimizer_state,
                run.replicate(np.int32(step)),
                *batch,
                rounding_seed=rounding_seed(config.supervised.optim, config.seed),
            )
            reporter.flush()  # of the step before, while this one is computed
        completed_steps = step + 1
        reporter.report_later(completed_steps, metrics)

        quality = evaluate_if_due(run, params, completed_steps, reporter, stop_request)
        # A preempted run saves even if no checkpoint is due.
        is_preempted = stop_request.should_stop(completed_steps)
        if is_preempted or is_due(completed_steps, run.total_steps, config.trainer.save_freq):
            reporter.flush()
            meta = {
                "position": batches.position,
                "data": fingerprint_data(config.data, run.training.prompts),
                **progress.history(),
                "config": dataclasses.asdict(config),
            }
            trees = {"params": params, "optimizer": optimizer_state}
            checkpoints.save(completed_steps, trees, meta, {"quality": quality})
            reporter.restart_clock()
        if is_preempted:
            checkpoints.wait()
            return params, completed_steps, True
    return params, run.total_steps, False


def evaluate_if_due(
    run: SupervisedRun,
    params: Params,
    completed_steps: int,
    reporter: Reporter,
    stop_request: StopRequest,
) -> float | None:
    """Evaluate after a step if due; return the quality by which the best checkpoint is chosen.

    Returns `None` if no evaluation is due, or a signal interrupted it.
    """
    if not run.held_out or not is_due(
        completed_steps, run.total_steps, run.config.trainer.test_freq
    ):
        return None
    reporter.flush()  # the evaluation is not part of the step's time
    interrupt = functools.partial(stop_request.interrupt_evaluation, completed_steps)
    try:
        means = evaluate(run, params, interrupt)
    except EvaluationInterrupted:
        reporter.progress.evaluation_pending = True
        return None
    return reporter.report_evaluation(completed_steps, means)


def start_parameters(
    run: SupervisedRun, checkpoints: Checkpointer, step: int
) -> tuple[Params, optax.OptState]:
    """Return parameters and optimizer state to start from.

    Args:
      run: the parts of the run.
      checkpoints: the run's checkpoints.
      step: the number of completed steps; with 0 the model's own parameters are read.
    """
    head = run.task.objective.head
    # Shapes first: both a checkpoint and a model's folder are read into their shards.
    shapes = trained_shapes(run.config.supervised, run.model, head, run.mesh)
    if step:
        arrays = checkpoints.restore(step, shapes).arrays
        return arrays["params"], arrays["optimizer"]
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    options = run.config.supervised
    params = load_checkpoint(
        run.folder,
        run.model.architecture,
        shardings["params"],
        jnp.dtype(options.optim.param_dtype),
        head,
        console.make_loading_reporter("model"),
    )
    init_optimizer = make_optimizer(options.optim, options.grad_clip).init
    return params, jax.jit(init_optimizer, out_shardings=shardings["optimizer"])(params)


def evaluate(
    run: SupervisedRun, params: Params, before_batch: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return the objective's means over the held-out examples.

    Args:
      run: the parts of the run.
      params: the model's.
      before_batch: called before each batch; it may raise an exception to end the evaluation.
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


def export_model(run: SupervisedRun, params: Params, workdir: Path) -> None:
    """Write the trained model as a Hugging Face folder in the work directory."""
    export_checkpoint(
        params,
        run.exported_architecture,
        workdir / run.task.output,
        dtype=run.config.trainer.export_dtype,
        source_folder=run.folder,
        tokenizer_folder=Path(run.tokenizer.name_or_path),
    )
