"""A PPO run as the life cycle drives it: its state, its step, its evaluation, its checkpoints."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jax_ppo.config.schema import Config, replace_options
from jax_ppo.memory.abstract_step import build_abstract_step
from jax_ppo.memory.automatic_sizes import Sizes, rank_step_sizes
from jax_ppo.memory.memory_check import PPOMemory
from jax_ppo.memory.step_flops import count_step_flops
from jax_ppo.ppo.programs import take_step_on_shapes
from jax_ppo.ppo.rewarding import FailedSteps
from jax_ppo.ppo.samples import choose_source
from jax_ppo.ppo.samples.source import SampleSource
from jax_ppo.ppo.step import take_ppo_step
from jax_ppo.reporting import console
from jax_ppo.run import life_cycle
from jax_ppo.run.build import build_run
from jax_ppo.run.evaluation import evaluate_policy
from jax_ppo.run.export import export_models, refuse_foreign_exports
from jax_ppo.run.parts import PPORun
from jax_ppo.run.reporter import Reporter
from jax_ppo.run.run_examples import fingerprint_data, read_given_responses
from jax_ppo.run.sample_reports import measure_sampling
from jax_ppo.runtime import compiled_programs, distributed, heartbeat
from jax_ppo.runtime.devices import read_memory_limit
from jax_ppo.sampler import engine
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress
from jax_ppo.training.roles import fingerprint_frozen, resolve_roles
from jax_ppo.training.state import TrainState, trained_trees


def train_ppo(config: Config, workdir: Path) -> dict[str, Any]:
    """Train, and return the contents of summary.json."""

    def build(sizes: Mapping[str, Any], mesh: Mesh) -> PPOTraining:
        sized = replace_options(config, sizes)
        roles = resolve_roles(config)
        for folder in life_cycle.export_folders(config.trainer, workdir):
            distributed.run_on_main(functools.partial(refuse_foreign_exports, roles, folder))
        given = None
        if config.learns_from_files:
            given, _, _ = read_given_responses(config, workdir)
        return PPOTraining(build_run(sized, workdir, mesh, console.print_on_main, given=given))

    def rank(options: Mapping[str, Any], mesh: Mesh) -> list[Sizes]:
        limit, free = read_memory_limit(), replace_options(config, options)
        return rank_step_sizes(
            lambda sizes: build_abstract_step(replace_options(free, sizes), mesh, limit=limit)
        )

    kind = life_cycle.TrainingKind("train", config.trainer.best_metric, build, rank)
    return life_cycle.run_life_cycle(config, workdir, kind)


class PPOTraining:
    """PPO's part of the life cycle: a `life_cycle.Training` whose state is a `TrainState`."""

    def __init__(self, run: PPORun) -> None:
        self.mesh = run.mesh
        self.memory = PPOMemory(run.config, run.nets, run.mesh, run.folders)
        self.total_steps = run.total_steps
        self.position = 0
        self.can_evaluate = bool(run.held_out)
        self._run = run
        self._failed_steps = FailedSteps(run.config.reward)
        self._samples: SampleSource | None = None

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Return fingerprints of the training prompts ("data") and of the frozen models."""
        run = self._run
        return {
            "data": fingerprint_data(run.config.data, run.training),
            "frozen": fingerprint_frozen(run.states.roles, run.folders),
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the engine and the reward workers."""
        with engine.running(self._run.engine), self._run.rules.running():
            yield

    def open_journal(
        self, workdir: Path, progress: Progress, compiled: compiled_programs.Compilations
    ) -> Reporter:
        """Return the journal, which writes the reports of the run."""
        return Reporter(self._run, workdir, progress, compiled)

    def step_on_shapes(self, progress: Progress) -> Callable[[], object]:
        """Return a function that takes the next step on shapes, in its prompts' length bucket."""
        run = self._run
        batches = run.batches(progress.position)
        return functools.partial(
            take_step_on_shapes, run, run.states.shapes(), batches, progress.step
        )

    @heartbeat.activity("loading the state")
    def load_state(self, checkpoints: Checkpointer, step: int) -> TrainState:
        """Return the state to start from."""
        run = self._run
        # A checkpoint holds what training changes; frozen models are read from their folders.
        trained = None
        if step:
            trained = checkpoints.restore(step, run.states.trained_shapes()).arrays
        return run.states.create(run.folders, console.make_loading_reporter, trained, step)

    def prepare_first_step(self, checkpoints: Checkpointer, progress: Progress) -> None:
        """Move the data to the first batch, and restore the samples in a checkpoint."""
        self._samples = choose_source(self._run, self._run.batches(progress.position))
        for line in self._samples.restore(checkpoints, progress):
            console.print_on_main(line)
        self.position = progress.position

    def take_step(self, state: TrainState, step: int, journal: Reporter) -> TrainState:
        """Take a step, and queue its report."""
        assert self._samples is not None, "the run has not begun"
        run = self._run
        state, result = take_ppo_step(run, state, self._samples, step, journal)
        sampled, rule_rewards = result.sampled, result.rule_rewards
        self._failed_steps.count(step, rule_rewards)
        staleness = {}
        if run.config.rollout.max_staleness and sampled.weights_step is not None:
            staleness["rollout/staleness"] = step - sampled.weights_step
        sampling_metrics = measure_sampling(
            sampled.rollout,
            rule_rewards.correct,
            result.rewards,
            rule_rewards.steps,
            responses_per_prompt=run.config.responses_per_prompt,
            step=step,
        )
        lengths = sampled.batch.prompts.lengths
        journal.report_later(
            step,
            result.metrics | sampling_metrics,
            rule_rewards,
            flops=count_step_flops(
                run.step_options, run.nets, step, lengths, result.packed.lengths
            ),
            samples=result,
            on_host={"update/padding": result.packed.padding, **staleness, **sampled.metrics},
        )
        if sampled.note:
            console.print_on_main(sampled.note)
        self.position = sampled.position
        return state

    def evaluate(
        self,
        state: TrainState,
        completed_steps: int,
        journal: Reporter,
        before_batch: Callable[[], None] = lambda: None,
    ) -> life_cycle.Quality:
        """Evaluate the policy and report it."""
        evaluation = evaluate_policy(self._run, state, before_batch)
        journal.report_evaluation(completed_steps, evaluation)
        return {"accuracy": evaluation.accuracy, "reward_mean": evaluation.reward_mean}

    def checkpoint_trees(self, state: TrainState) -> dict[str, Any]:
        """Return what training changes, and what has been sampled for later steps."""
        assert self._samples is not None, "the run has not begun"
        to_next_step = self._samples.checkpoint_trees()
        if self._run.rules.environment is not None:
            jax.block_until_ready(to_next_step)
            self._run.rules.environment.raise_if_given_up()
        return trained_trees(state) | to_next_step

    def export(self, state: TrainState, folder: Path, journal: Reporter) -> None:
        """Write the trained roles as Hugging Face folders."""
        export_models(self._run, state, folder, journal)
