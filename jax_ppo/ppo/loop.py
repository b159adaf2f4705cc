"""The PPO algorithm: sample, score, estimate advantages, update; evaluate and save at intervals.

The host waits for the mesh once per step, for the sampled tokens that the rules score. Where it
also waits to time a phase, the mesh already has its next work.
"""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jax_ppo.config.schema import Config, Trainer
from jax_ppo.ppo import scoring
from jax_ppo.ppo.evaluation import Evaluation, evaluate_policy
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.experience_types import ExperienceOptions
from jax_ppo.ppo.out_of_memory import explain_out_of_memory
from jax_ppo.ppo.plans import sample_lengths
from jax_ppo.ppo.precompilation import precompile_in_background
from jax_ppo.ppo.report import Reporter
from jax_ppo.ppo.reward_moments import measure_first_rewards
from jax_ppo.ppo.rewarding import FailedSteps, RuleRewards, add_reward_model_scores
from jax_ppo.ppo.run import PPORun
from jax_ppo.ppo.run_models import train_missing_actor
from jax_ppo.ppo.sample_metrics import measure_sampling
from jax_ppo.ppo.sample_records import StepSamples
from jax_ppo.ppo.sample_selection import sample_selected_batch
from jax_ppo.ppo.sampled_batch import (
    SampledBatch,
    TrainingBatches,
    observe_solve_rates,
    sample_batch,
)
from jax_ppo.ppo.setup import set_up_run
from jax_ppo.ppo.step_flops import count_step_flops
from jax_ppo.ppo.update import UpdateOptions, update_state
from jax_ppo.reporting import console
from jax_ppo.runtime import compilation, meshes, sharding, work_directory
from jax_ppo.sampler import engine
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress
from jax_ppo.training.resume import find_progress, is_due
from jax_ppo.training.state import TrainState, trained_trees
from jax_ppo.training.state_creation import create_state
from jax_ppo.training.state_shapes import trained_shapes
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
        # Most user errors surface in these two lines, before any weights are loaded.
        run = set_up_run(config, workdir, mesh, console.print_on_main)
        progress = find_progress(
            config, run.total_steps, checkpoints, console.print_on_main, "train"
        )
        with (
            explain_out_of_memory(config, run.folders, run.nets, mesh),
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
    config = run.config
    # Sections of the options that compiled functions take as static arguments.
    scoring_options = scoring.ScoringOptions.from_config(config)
    experience_options = ExperienceOptions.from_config(config)
    update_options = UpdateOptions.from_config(config)
    sample = sample_selected_batch if config.selects_samples else sample_batch
    failed_steps = FailedSteps(config.reward)
    stop_request = StopRequest()

    state = start_state(run, checkpoints, progress, reporter)
    batches = run.batches(progress.position, progress.solve_rates)
    # What the run had sampled one step ahead when it was saved.
    next_sampled = restore_sampled_batch(run, checkpoints, progress, batches)
    for step in range(progress.step, run.total_steps):
        # 1. Sample responses, unless that was done during the last step.
        sampled = next_sampled or sample(run, state, batches, step, reporter)
        batch, rollout = sampled.batch, sampled.rollout
        # This waits for the lengths of the responses: the one wait of a step.
        with reporter.phase("rollout"):
            lengths = sample_lengths(batch, rollout)
            plans = run.planner.plan(step, lengths)

        # 2. Dispatch the scoring passes; their results are not waited for.
        sequences = scoring.join_sequences(rollout, config.sequence_length)
        scores = scoring.score_rollout(scoring_options, run.nets, state, sequences, *plans.scoring)

        # One step off: sample with the weights from before this step's update.
        next_sampled = None
        if config.rollout.one_step_off and step + 1 < run.total_steps:
            next_sampled = sample_batch(run, state, batches, step + 1, reporter)
        reporter.flush()  # unless sampling ahead has done it

        # 3. Apply the rules on the host while the mesh scores; add a reward model's scores.
        with reporter.phase("reward"):
            rule_rewards = apply_rules(run, sampled, batches)
        failed_steps.count(step, rule_rewards)
        rewards = add_reward_model_scores(
            run.nets,
            state,
            rule_rewards.scores,
            # A reward model with its own tokenizer has inputs of its own.
            rule_rewards.model_inputs or (sequences, *plans.scoring),
            config.reward.score_position,
            run.rules.model_weight,
        )

        # 4. Dispatch advantages and update, which takes over the buffers of `state`.
        experience, rollout_metrics = estimate_experience(
            experience_options,
            state.step,
            state.control,
            sequences,
            rollout.logprobs,
            scores,
            rewards,
            rule_rewards.steps,
        )
        state, update_metrics = update_state(
            update_options,
            run.nets,
            run.total_steps,
            state,
            experience,
            plans.actor,
            plans.critic,
        )
        # The mesh has the update to do next: timing the scores leaves no gap.
        with reporter.phase("score"):
            jax.block_until_ready(scores)

        # 5. Report, one step late; evaluate and save.
        sampling_metrics = measure_sampling(
            rollout,
            rule_rewards.correct,
            rewards,
            rule_rewards.steps,
            responses_per_prompt=config.responses_per_prompt,
        )
        reporter.report_later(
            step,
            rollout_metrics | update_metrics | sampling_metrics,
            rule_rewards,
            flops=count_step_flops(config, run.nets, step, batch.prompts.lengths, lengths),
            samples=StepSamples(
                batch=batch,
                rollout=rollout,
                experience=experience,
                rule_rewards=rule_rewards,
                rewards=rewards,
                addresses=sampled.addresses,
            ),
            on_host={"update/padding": plans.padding, **sampled.metrics},
        )
        finish_step(
            run,
            state,
            completed_steps=step + 1,
            position=sampled.position,
            next_sampled=next_sampled,
            reporter=reporter,
            checkpoints=checkpoints,
            stop_request=stop_request,
        )
        if stop_request.should_stop(step + 1):
            checkpoints.wait()
            return state, True
    return state, False


def apply_rules(run: PPORun, sampled: SampledBatch, batches: TrainingBatches) -> RuleRewards:
    """Return the rules' rewards of a batch, and update the solve rates of its prompts.

    Samples that were selected by their rewards have been scored, and their prompts observed.
    """
    if sampled.rule_rewards is not None:
        return sampled.rule_rewards
    rule_rewards = run.rules.score(sampled.batch, sampled.rollout)
    observe_solve_rates(batches, sampled.batch, rule_rewards)
    return rule_rewards


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

    Meanwhile the programs of a step are compiled, also while a small actor is trained.
    """
    config, step = run.config, progress.step
    # A finished run only exports: no program of a step is needed.
    is_finished = step >= run.total_steps
    precompilation = (
        contextlib.nullcontext() if is_finished else precompile_in_background(run, progress)
    )
    with precompilation:
        train_missing_actor(config, run.folders, run.mesh, console.print_on_main)
        # A checkpoint holds what training changes; frozen models are read from their folders.
        trained = None
        if step:
            shapes = trained_shapes(config, run.nets, run.mesh)
            trained, _ = checkpoints.restore(step, shapes)
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
      The batch, which is taken from `batches`, or `None` if the checkpoint holds no rollout of the
      size of this run's, or one without the routing that this run replays.
    """
    config, step = run.config, progress.step
    if not (step and config.rollout.one_step_off):
        return None
    saved = checkpoints.saved_tree(step, ROLLOUT)
    samples = config.data.train_batch_size * config.rollout.n
    if saved is None or saved["responses"].shape != (samples, config.data.max_response_length):
        return None
    if ("routed_experts" in saved) != run.sampling.returns_routed_experts:
        return None
    rows, everywhere = sharding.batch_rows(run.mesh, samples), sharding.replicated(run.mesh)

    def shape(path: jax.tree_util.KeyPath, x: Any) -> jax.ShapeDtypeStruct:
        # This mesh may have another number of decoder queues.
        is_per_queue = jax.tree_util.keystr(path, simple=True) == "slot_steps"
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere if is_per_queue else rows)

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
    trainer = run.config.trainer
    evaluation = None
    if run.held_out and is_due(completed_steps, run.total_steps, trainer.test_freq):
        reporter.flush()
        try:
            evaluation = evaluate_policy(
                run, state, functools.partial(stop_request.interrupt_evaluation, completed_steps)
            )
            reporter.report_evaluation(completed_steps, evaluation)
        except EvaluationInterrupted:
            reporter.progress.evaluation_pending = True
    saves = is_due(completed_steps, run.total_steps, trainer.save_freq)
    saves = saves or stop_request.should_stop(completed_steps)
    saves_locally = bool(trainer.local_dir) and completed_steps % trainer.local_save_freq == 0
    if saves or saves_locally:
        reporter.flush()
        with reporter.phase("checkpoint"):
            meta = {
                "position": position,
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


def _checkpoint_metrics(evaluation: Evaluation | None) -> dict[str, float | None] | None:
    """Return the metrics that the best checkpoint is chosen by."""
    if evaluation is None:
        return None
    return {"accuracy": evaluation.accuracy, "reward_mean": evaluation.reward_mean}
