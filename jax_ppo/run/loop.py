"""The loop of a PPO run: resume, take steps, report them, evaluate and save at intervals."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jax_ppo.config.schema import Config, Trainer
from jax_ppo.memory.memory_check import PPOMemory, explain_out_of_memory
from jax_ppo.memory.step_work import count_step_flops
from jax_ppo.ppo.rewarding import FailedSteps
from jax_ppo.ppo.step import StepResult, take_step
from jax_ppo.ppo.step_parts import SampledBatch, TrainingBatches
from jax_ppo.reporting import console
from jax_ppo.run.build import set_up_run
from jax_ppo.run.evaluation import Evaluation, evaluate_policy
from jax_ppo.run.parts import PPORun
from jax_ppo.run.precompilation import precompile_in_background
from jax_ppo.run.reporter import Reporter, refuse_foreign_exports
from jax_ppo.run.reward_moments import measure_first_rewards
from jax_ppo.run.run_models import train_missing_actor
from jax_ppo.run.sample_metrics import measure_sampling
from jax_ppo.run.sample_records import StepSamples
from jax_ppo.runtime import compilation, distributed, meshes, sharding, work_directory
from jax_ppo.sampler import engine
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress
from jax_ppo.training.resume import find_progress, is_due
from jax_ppo.training.roles import fingerprint_frozen
from jax_ppo.training.setup import fingerprint_data
from jax_ppo.training.state import TrainState, create_state, trained_shapes, trained_trees
from jax_ppo.training.stopping import EvaluationInterrupted, StopRequest
from jax_ppo.types import Prompts, Rollout

ROLLOUT = "rollout"  # a checkpoint's tree of what was sampled one step ahead


def train(config: Config, workdir: Path) -> dict[str, Any]:
    """Train from the newest checkpoint in `workdir`, or from the start if there is none.

    Returns:
      The contents of summary.json.
    """
    mesh = meshes.make_mesh(config.mesh)
    with (
        jax.set_mesh(mesh),
        compilation.count_compilations() as compiled,
        open_checkpoints(config.trainer, workdir, mesh) as checkpoints,
    ):
        # Most user errors surface in these lines, before any weights are loaded.
        if config.trainer.export:
            distributed.run_on_main(lambda: refuse_foreign_exports(config, workdir))
        run = set_up_run(config, workdir, mesh, console.print_on_main)
        progress = find_progress(
            config,
            run.total_steps,
            checkpoints,
            console.print_on_main,
            "train",
            fingerprint_data(config.data, run.training),
            fingerprint_frozen(run.folders),
        )
        with (
            explain_out_of_memory(PPOMemory(config, run.folders, run.nets, mesh)),
            engine.running(run.engine),
            run.rules.running(),
            Reporter(run, workdir, progress, compiled) as reporter,
        ):
            state, was_preempted = take_steps(run, checkpoints, progress, reporter)
            # A preempted run ends without an export: the next start resumes it.
            return reporter.finish(state, export=config.trainer.export and not was_preempted)


def take_steps(
    run: PPORun, checkpoints: Checkpointer, progress: Progress, reporter: Reporter
) -> tuple[TrainState, bool]:
    """Take the remaining steps of a run.

    Args:
      run: the parts of the run.
      checkpoints: where the state is restored from and saved.
      progress: how far the run has come.
      reporter: writes metrics and evaluations.

    Returns:
      The last state, and whether a signal has ended the run after its current step was saved.
    """
    failed_steps = FailedSteps(run.config.reward)
    stop_request = StopRequest()
    state = start_state(run, checkpoints, progress, reporter)
    batches = run.batches(progress.position, progress.solve_rates)
    # What the run had sampled one step ahead when it was saved.
    sampled = restore_sampled_batch(run, checkpoints, progress, batches)

    for step in range(progress.step, run.total_steps):
        state, result = take_step(run, state, batches, step, sampled, reporter)
        failed_steps.count(step, result.rule_rewards)
        report_step(run, reporter, step, result)  # written one step later
        sampled = result.next_sampled
        finish_step(
            run,
            state,
            completed_steps=step + 1,
            position=result.sampled.position,
            next_sampled=sampled,
            reporter=reporter,
            checkpoints=checkpoints,
            stop_request=stop_request,
        )
        if stop_request.should_stop(step + 1):
            checkpoints.wait()
            return state, True
    return state, False


def report_step(run: PPORun, reporter: Reporter, step: int, result: StepResult) -> None:
    """Start computing the metrics of a step's samples, and queue its report without waiting.

    Args:
      run: the parts of the run.
      reporter: writes the metrics one step late.
      step: the step, from 0.
      result: what the step has left.
    """
    sampled = result.sampled
    rule_rewards = result.rule_rewards
    sampling_metrics = measure_sampling(
        sampled.rollout,
        rule_rewards.correct,
        result.rewards,
        rule_rewards.steps,
        responses_per_prompt=run.config.responses_per_prompt,
    )
    reporter.report_later(
        step,
        result.metrics | sampling_metrics,
        rule_rewards,
        flops=count_step_flops(
            run.config, run.nets, step, sampled.batch.prompts.lengths, result.packed.lengths
        ),
        samples=StepSamples(sampled, result.experience, rule_rewards, result.rewards),
        on_host={"update/padding": result.packed.padding, **sampled.metrics},
    )


def open_checkpoints(options: Trainer, workdir: Path, mesh: Mesh) -> Checkpointer:
    """Return the checkpoints of the run in `workdir`, and on the local disks if there are any."""
    checkpoints = Checkpointer(
        work_directory.checkpoint_directory(workdir),
        max_to_keep=options.max_checkpoints,
        best_metric=options.best_metric,
        report=console.print_on_main,
        before_save=functools.partial(work_directory.publish, workdir),
    )
    if options.local_dir:
        checkpoints.keep_local(options.local_dir, mesh)
    return checkpoints


def start_state(
    run: PPORun, checkpoints: Checkpointer, progress: Progress, reporter: Reporter
) -> TrainState:
    """Return the state to start from, evaluated if it is untrained.

    The programs of a step are compiled in the background, also while a small actor is trained.
    """
    config = run.config
    step = progress.step
    with contextlib.ExitStack() as precompilation:
        # A finished run only exports: no program of a step is needed.
        if step < run.total_steps:
            precompilation.enter_context(precompile_in_background(run, progress))
        train_missing_actor(config, run.folders, run.mesh, console.print_on_main)
        # A checkpoint holds what training changes; frozen models are read from their folders.
        trained = None
        if step:
            shapes = trained_shapes(config, run.nets, run.mesh)
            trained = checkpoints.restore(step, shapes).arrays
        state = create_state(
            config,
            run.nets,
            run.folders,
            run.mesh,
            progress=console.make_loading_reporter,
            trained=trained,
            step=step,
        )
        evaluates_first = step == 0 and config.trainer.val_before_train
        if run.held_out and (evaluates_first or progress.evaluation_pending):
            reporter.report_evaluation(step, evaluate_policy(run, state))
            progress.evaluation_pending = False
    if config.reward.normalize == "reference" and step == 0:
        state = measure_first_rewards(run, state)
    reporter.restart_clock()
    return state


def restore_sampled_batch(
    run: PPORun, checkpoints: Checkpointer, progress: Progress, batches: TrainingBatches
) -> SampledBatch | None:
    """Return the batch that a run one step off had sampled ahead of the checkpoint.

    The resumed run could not sample it again: the weights are one update newer by now.

    Returns:
      The batch, which is taken from `batches`, or `None` if the checkpoint holds no rollout of this
      run's data and size, or one that records routing or kept tokens although this run does not,
      or the reverse.
    """
    config = run.config
    step = progress.step
    if not (step and config.rollout.one_step_off):
        return None
    if not progress.position:
        return None  # the data have changed: it was sampled for rows that are gone
    saved = checkpoints.saved_tree(step, ROLLOUT)
    samples = config.data.train_batch_size * config.rollout.n
    if saved is None or saved["responses"].shape != (samples, config.data.max_response_length):
        return None
    records = ("routed_experts" in saved, "kept_tokens" in saved)
    if records != (run.sampling.returns_routed_experts, run.sampling.returns_kept_tokens):
        return None
    rows = sharding.batch_rows(run.mesh, samples)
    # One number per decoder queue; this mesh may have more or fewer queues.
    layouts = {"slot_steps": sharding.replicated(run.mesh)}

    def shape(path: jax.tree_util.KeyPath, x: Any) -> jax.ShapeDtypeStruct:
        layout = layouts.get(jax.tree_util.keystr(path, simple=True), rows)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    shapes = jax.tree_util.tree_map_with_path(shape, saved)
    arrays = checkpoints.restore_item(step, ROLLOUT, shapes)
    prompts = Prompts(**arrays.pop("prompts"))
    batch = next(batches)
    return SampledBatch(
        batch=batch, rollout=Rollout(prompts=prompts, **arrays), position=batches.position
    )


def rollout_arrays(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as the tree of arrays that a checkpoint holds."""
    arrays = {name: value for name, value in vars(rollout).items() if value is not None}
    prompts = {name: value for name, value in vars(rollout.prompts).items() if value is not None}
    return {**arrays, "prompts": prompts}


def finish_step(
    run: PPORun,
    state: TrainState,
    completed_steps: int,
    position: int,
    next_sampled: SampledBatch | None,
    reporter: Reporter,
    checkpoints: Checkpointer,
    stop_request: StopRequest,
) -> None:
    """Evaluate if that is due; save if that is due or the run is to stop.

    Args:
      run: the parts of the run.
      state: the state after the step.
      completed_steps: the number of completed steps.
      position: training examples consumed by them.
      next_sampled: the batch sampled one step ahead, if any.
      reporter: writes the evaluation.
      checkpoints: where the state is saved.
      stop_request: decides whether the run ends after this step.
    """
    evaluation = evaluate_if_due(run, state, completed_steps, reporter, stop_request)
    trainer = run.config.trainer
    saves = is_due(completed_steps, run.total_steps, trainer.save_freq)
    saves = saves or stop_request.should_stop(completed_steps)
    saves_locally = bool(trainer.local_dir) and completed_steps % trainer.local_save_freq == 0
    if not (saves or saves_locally):
        return
    reporter.flush()
    with reporter.phase("checkpoint"):
        meta = {
            "position": position,
            "data": fingerprint_data(run.config.data, run.training),
            "frozen": fingerprint_frozen(run.folders),
            **reporter.progress.history(),
            "config": dataclasses.asdict(run.config),
        }
        trees = trained_trees(state)
        if next_sampled is not None:
            trees[ROLLOUT] = rollout_arrays(next_sampled.rollout)
        if saves:
            checkpoints.save(completed_steps, trees, meta, _checkpoint_metrics(evaluation))
        else:
            checkpoints.save_local(completed_steps, trees, meta)
    # The next step's time does not include the checkpoint.
    reporter.restart_clock()


def evaluate_if_due(
    run: PPORun,
    state: TrainState,
    completed_steps: int,
    reporter: Reporter,
    stop_request: StopRequest,
) -> Evaluation | None:
    """Return the evaluation after a step; `None` if none is due, or a signal interrupted it."""
    if not run.held_out or not is_due(
        completed_steps, run.total_steps, run.config.trainer.test_freq
    ):
        return None
    reporter.flush()
    interrupt = functools.partial(stop_request.interrupt_evaluation, completed_steps)
    try:
        evaluation = evaluate_policy(run, state, before_batch=interrupt)
    except EvaluationInterrupted:
        reporter.progress.evaluation_pending = True
        return None
    reporter.report_evaluation(completed_steps, evaluation)
    return evaluation


def _checkpoint_metrics(evaluation: Evaluation | None) -> dict[str, float | None] | None:
    """Return the metrics by which the best checkpoint is chosen."""
    if evaluation is None:
        return None
    return {"accuracy": evaluation.accuracy, "reward_mean": evaluation.reward_mean}
