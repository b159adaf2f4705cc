"""The algorithm: sample, score, estimate advantages, update; evaluate and save now and then.

The mesh waits for the host once a step: for the sampled tokens to be scored by the rules. Where the host waits for the mesh
besides, to tell the time of a phase, the next work is already queued.
"""

import contextlib
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.config.schema import Config
from jax_ppo.kernels import moments as moments_lib
from jax_ppo.ppo import experience as experience_lib
from jax_ppo.ppo import precompilation as rehearsal
from jax_ppo.ppo import scoring
from jax_ppo.ppo.evaluation import Evaluation, evaluate
from jax_ppo.ppo.report import Reporter
from jax_ppo.ppo.setup import EVALUATION, REFERENCE, TRAINING, Experiment
from jax_ppo.ppo.update import update
from jax_ppo.reporting import console
from jax_ppo.runtime import compilation, sharding
from jax_ppo.sampler import engine
from jax_ppo.training import resume as resuming
from jax_ppo.training.checkpoint import Checkpointer, Progress
from jax_ppo.training.networks import full_parameters
from jax_ppo.training.state import TrainState, create_state, trained_shapes, trained_trees


def train(config: Config, workdir: Path) -> dict:
    """Runs an experiment, from the newest checkpoint in `workdir` if there is one. Returns what summary.json holds."""
    mesh = sharding.make_mesh(config.mesh)
    with (
        jax.set_mesh(mesh),
        compilation.counted() as compiled,
        Checkpointer(
            workdir / "checkpoints", config.trainer.max_checkpoints, config.trainer.best_metric
        ) as checkpoints,
    ):
        run = Experiment(config, workdir, mesh, console.print_on_main)
        progress = resuming.find_progress(
            config,
            run.total_steps,
            checkpoints,
            console.print_on_main,
            "train",
        )
        with engine.running(run.engine), Reporter(run, workdir, progress, compiled) as report:
            state = begin(run, checkpoints, progress, report)
            batches, ahead = run.batches(progress.position), None
            for step in range(progress.step, run.total_steps):
                batch, rollout, position = ahead or draw(run, state, batches, step, report)
                with report.phase("rollout"):
                    plans = run.plan(
                        step, sample_lengths(batch, rollout)
                    )  # waits for the lengths: the one wait of a step
                sequences = scoring.join(rollout, config.sequence_length)
                scores = scoring.score(config, run.nets, state, sequences, *plans.scoring)
                ahead = None
                # A run that is resumed has no rollout of older weights: before a checkpoint that is due none is begun.
                if config.rollout.one_step_off and not resuming.due(
                    step + 1, run.total_steps, config.trainer.save_freq
                ):
                    ahead = draw(run, state, batches, step + 1, report)
                report.flush()  # where nothing was drawn in this step, one step off
                with report.phase("reward"):  # on the host, while the mesh scores
                    rewarded, _ = run.reward(batch, rollout)
                read = rewarded.model_inputs or (sequences, *plans.scoring)
                rewards = add_reward_model(run, state, rewarded.scores, read)
                experience, of_rollout = experience_lib.estimate(
                    config,
                    state.step,
                    state.control,
                    sequences,
                    rollout.logprobs,
                    scores,
                    rewards,
                    rewarded.steps,
                )
                state, of_update = update(
                    config, run.nets, run.total_steps, state, experience, plans.actor, plans.critic
                )
                with report.phase("score"):
                    jax.block_until_ready(scores)
                report.later(
                    step,
                    of_rollout | of_update | rollout_metrics(rollout, rewarded.correct),
                    rewarded,
                )
                finish_step(run, state, step + 1, position, report, checkpoints)
                if checkpoints.should_stop(step + 1):
                    checkpoints.wait()
                    return report.finish(state, export=False)
            return report.finish(state, run.config.trainer.export)


def draw(run: Experiment, state, batches, step: int, report: Reporter):
    """Begins to sample responses to a step's prompts: (the batch, the rollout, the examples consumed with it).

    Then it writes the figures of the last update begun, whose actor is learned as this sampling begins (on one CPU device the
    critic may still be learning beside it). One step off that is the update of the step before the one that is under way, and
    what the host waited for in between stands in its row.
    """
    batch = next(batches)
    run.engine.update_weights(run.policy(state))
    rollout = run.engine.generate(run.on_mesh(batch.prompts), run.key(TRAINING, step), run.sampling)
    run.engine.release_weights()  # the update needs the memory
    report.flush()
    return batch, rollout, batches.position


def begin(
    run: Experiment, checkpoints: Checkpointer, progress: Progress, report: Reporter
) -> TrainState:
    """The state to begin with, evaluated if it is untrained; the programs of a step are compiled meanwhile."""
    arrays = None
    with (
        contextlib.nullcontext()
        if progress.step >= run.total_steps
        else rehearsal.during(run, progress.position)
    ):
        if progress.step:
            arrays, _ = checkpoints.restore(
                progress.step, trained_shapes(run.config, run.nets, run.mesh)
            )
        state = create_state(
            run.config,
            run.nets,
            run.folders,
            run.mesh,
            console.make_loading_reporter,
            arrays,
            progress.step,
        )
        if run.held_out and not progress.step and run.config.trainer.val_before_train:
            report.evaluation(0, evaluation(run, state))
    if run.config.reward.normalize == "reference" and not progress.step:
        state = measure_reference(run, state)
    report.restart_clock()
    return state


def finish_step(
    run: Experiment, state, done: int, position: int, report: Reporter, checkpoints: Checkpointer
) -> None:
    """Evaluates and saves where it is time: `done` steps are behind."""
    trainer, result = run.config.trainer, None
    if run.held_out and resuming.due(done, run.total_steps, trainer.test_freq):
        report.flush()
        result = evaluation(run, state)
        report.evaluation(done, result)
    if resuming.due(done, run.total_steps, trainer.save_freq) or checkpoints.should_stop(done):
        report.flush()
        with report.phase("checkpoint"):
            meta = {
                "position": position,
                "evaluations": report.progress.evaluations,
                "config": dataclasses.asdict(run.config),
            }
            figures = result and {"accuracy": result.accuracy, "reward_mean": result.reward_mean}
            checkpoints.save(done, trained_trees(state), meta, figures)
        report.restart_clock()


def sample_lengths(batch, rollout) -> np.ndarray:
    """Tokens of each sample's prompt and response, on the host."""
    responses = sharding.to_host(rollout.lengths)
    return (
        np.repeat(batch.prompts.lengths, len(responses) // len(batch.prompts.lengths)) + responses
    )


def add_reward_model(run: Experiment, state, rewards, inputs):
    """The rule's rewards [B], with the reward model's score if there is one. `inputs`: sequences, plan, micro_batches of
    scoring.reward_model_scores."""
    if run.nets.reward is None:
        return rewards
    params = full_parameters(run.nets.reward, state.reward, state.reference)
    return rewards + scoring.reward_model_scores(run.nets.reward, params, *inputs)


def evaluation(run: Experiment, state) -> Evaluation:
    """Averages over the held-out prompts with rollout.val_kwargs; the same draws at every step but for the policy."""
    run.engine.update_weights(run.policy(state))

    def reward(batch, rollout, keep):
        rewarded, samples = run.reward(batch, rollout, keep)
        scores = sharding.to_host(total_rewards(run, state, batch, rollout, rewarded))
        samples = [sample | {"score": float(scores[sample["row"]])} for sample in samples]
        return scores, sharding.to_host(rewarded.correct), samples

    def sample(prompts, key, first):
        return run.engine.generate(prompts, key, run.held_out_sampling, first)

    result = evaluate(
        sample,
        reward,
        run.held_out_batches(),
        run.mesh,
        run.key(EVALUATION, 0),
        run.config.trainer.log_samples,
    )
    run.engine.release_weights()
    return result


def total_rewards(run: Experiment, state, batch, rollout, rewarded):
    """Rewards [B] of a rollout that nothing else is scored of: the rules', those of steps too, and the reward model's."""
    scores = rewarded.scores if rewarded.steps is None else rewarded.scores + rewarded.steps.sum(1)
    if run.nets.reward is None:
        return scores
    inputs = rewarded.model_inputs
    if inputs is None:
        sequences = scoring.join(rollout, run.config.sequence_length)
        inputs = sequences, *run.plan_scoring(sample_lengths(batch, rollout))
    return add_reward_model(run, state, scores, inputs)


def measure_reference(run: Experiment, state) -> TrainState:
    """The state with the moments of the scores of its policy, over reward.normalize_samples responses in whole batches."""
    batches = run.batches(0)
    run.engine.update_weights(run.policy(state))
    moments = state.control.moments["rewards"]
    per_batch = run.config.data.train_batch_size * run.config.rollout.n
    for number in range(-(-run.config.reward.normalize_samples // per_batch)):
        batch = next(batches)
        rollout = run.engine.generate(
            run.on_mesh(batch.prompts), run.key(REFERENCE, number), run.sampling
        )
        rewarded, _ = run.reward(batch, rollout)
        outcomes = dataclasses.replace(
            rewarded, steps=None
        )  # what is normalised: rewards of steps are not
        moments = add_moments(moments, total_rewards(run, state, batch, rollout, outcomes))
    run.engine.release_weights()
    console.print_on_main(
        f"the first policy's rewards: mean {float(moments.mean):.4g}, deviation {float(moments_lib.moments_std(moments)):.4g}"
    )
    control = dataclasses.replace(
        state.control, moments=state.control.moments | {"rewards": moments}
    )
    return dataclasses.replace(state, control=control)


@jax.jit
def add_moments(moments, values):
    return moments_lib.update_moments(moments, values, jnp.ones(values.shape, bool))


@jax.jit
def rollout_metrics(rollout, correct_B) -> dict:
    """Return shares: of correct answers (NaN if the rules do not define correctness), of truncated
    responses, and, for an engine that counts them, of slot-steps that drew a token."""
    metrics = {
        "reward/accuracy": jnp.nanmean(correct_B),
        "response_length/truncated_share": rollout.truncated.mean(dtype=jnp.float32),
    }
    if rollout.slot_steps is not None:
        metrics["rollout/slot_use"] = rollout.action_mask.sum() / rollout.slot_steps.sum()
    return metrics
