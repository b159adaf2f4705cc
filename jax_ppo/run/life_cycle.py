"""The life cycle of a training run: resume, take steps, report, evaluate, save, export.

    training = build(mesh)                               # run_life_cycle
    state = training.load_state(...)                     # StepLoop._start, while programs compile
    for step in range(completed steps, total steps):     # StepLoop.take_steps
        state = training.take_step(state, step)
        training.evaluate(state), if due; save training.checkpoint_trees(state), if due
    training.export(state)

PPO, supervised fine-tuning, reward models and critics share it. `Training` declares what differs
between them: what is loaded, what a step does, what an evaluation measures, what is exported.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import Mesh

from jax_ppo.config.schema import Config, Trainer
from jax_ppo.errors import UserError
from jax_ppo.reporting import console
from jax_ppo.reporting.journal import Journal
from jax_ppo.runtime import compiled_programs, distributed, meshes, signals, work_directory
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress, find_progress, find_saved_run, is_due

BEST = "best"  # folder in the work directory
JournalT = TypeVar("JournalT", bound=Journal)
# Metrics by which the best checkpoint is chosen; a metric without a value is `None`.
Quality = dict[str, float | None]


class Training(Protocol[JournalT]):
    """One kind of training, as the life cycle drives it; its state is a pytree on the mesh."""

    mesh: Mesh
    total_steps: int  # number of steps of the whole run
    position: int  # training examples consumed by the steps so far
    can_evaluate: bool  # whether there are held-out data

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Return fingerprints of "data" and any "frozen" models, which a resumed run compares."""

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that runs engines and workers; steps are taken inside it."""

    def open_journal(
        self, workdir: Path, progress: Progress, compiled: compiled_programs.Compilations
    ) -> JournalT:
        """Return the journal, which writes the reports of the run."""

    def step_on_shapes(self, progress: Progress) -> Callable[[], object]:
        """Return a function that takes the next step on shapes, which compiles its programs."""

    def load_state(self, checkpoints: Checkpointer, step: int) -> Any:
        """Return the state of the checkpoint after `step` steps; at step 0, a new state."""

    def prepare_first_step(self, checkpoints: Checkpointer, progress: Progress) -> None:
        """Move the data to the first batch."""

    def take_step(self, state: Any, step: int, journal: JournalT) -> Any:
        """Take a step, numbered from 0; queue its report, and return the new state."""

    def evaluate(
        self,
        state: Any,
        completed_steps: int,
        journal: JournalT,
        before_batch: Callable[[], None] = lambda: None,
    ) -> Quality:
        """Evaluate the state after `completed_steps`, and report the result.

        `before_batch` is called before each batch; it may raise to end the evaluation.
        """

    def checkpoint_trees(self, state: Any) -> dict[str, Any]:
        """Return the trees of arrays that a checkpoint holds, by name."""

    def export(self, state: Any, folder: Path, journal: JournalT) -> None:
        """Write the trained models to subfolders of `folder`."""


def run_life_cycle(
    config: Config,
    workdir: Path,
    build: Callable[[Mesh], Training[JournalT]],
    command: str,
    best_metric: str,
) -> dict[str, Any]:
    """Train from the newest checkpoint in `workdir`, or from the start if there is none.

    Return the contents of summary.json. Most user errors surface in `build`, before weights are
    loaded. Options that `command` does not read may change on resume. `best_metric`, an entry of
    `Quality`, chooses the best checkpoint.
    """
    mesh = meshes.make_mesh(config.mesh, decoding=config.rollout.mesh.devices)
    checkpointer = Checkpointer(
        work_directory.checkpoint_directory(workdir),
        max_to_keep=config.trainer.max_checkpoints,
        best_metric=best_metric,
        report=console.print_on_main,
        before_save=functools.partial(work_directory.publish, workdir),
    )
    with (
        jax.set_mesh(mesh),
        compiled_programs.count_compilations() as compiled,
        checkpointer as checkpoints,
    ):
        # First: of data, folders and weights that do not fit, a changed option may be the cause.
        saved = find_saved_run(config, checkpoints, command)
        training = build(mesh)
        progress = find_progress(
            config,
            training.total_steps,
            saved,
            console.print_on_main,
            **training.fingerprints(),
        )
        with training.running(), training.open_journal(workdir, progress, compiled) as journal:
            all_options = dataclasses.asdict(config)
            loop = StepLoop(training, config.trainer, all_options, checkpoints, progress, journal)
            state, was_preempted = loop.take_steps()
            journal.write_pending_report()
            # A preempted run ends without an export: the next start resumes it.
            if config.trainer.export and not was_preempted:
                training.export(state, workdir, journal)
                if config.trainer.export_best:
                    del state  # the devices may have no room for two states
                    export_best(training, checkpoints, workdir, journal)
            return journal.write_summary(loop.completed_steps, mesh)


def count_steps(trainer: Trainer, steps_per_epoch: int) -> int:
    """Return the number of steps of the whole run."""
    return trainer.total_training_steps or trainer.total_epochs * steps_per_epoch


def export_best(
    training: Training[JournalT], checkpoints: Checkpointer, workdir: Path, journal: JournalT
) -> None:
    """Write the models of the best checkpoint."""
    step = checkpoints.best_step()
    if step is None:
        journal.warn(
            "config.trainer.export_best: no checkpoint has a value of "
            f"config.trainer.best_metric={checkpoints.best_metric!r}, so none is best (an "
            "evaluation with which a resumed run begins gives none)"
        )
        return
    console.print_on_main(f"the best checkpoint: after step {step}")
    training.export(training.load_state(checkpoints, step), workdir / BEST, journal)


def export_folders(options: Trainer, workdir: Path) -> tuple[Path, ...]:
    """Return the folders to which a run exports its models at its end; none without an export."""
    folders = (workdir, workdir / BEST) if options.export_best else (workdir,)
    return folders if options.export else ()


@dataclasses.dataclass
class StepLoop:
    """The loop over the steps of a run, with the evaluations and checkpoints between them."""

    training: Training[Any]
    options: Trainer
    all_options: dict[str, Any]  # by section; checkpoints record them
    checkpoints: Checkpointer
    progress: Progress
    journal: Journal

    def __post_init__(self) -> None:
        self.completed_steps = self.progress.step

    def take_steps(self) -> tuple[Any, bool]:
        """Take the remaining steps; return the last state, and whether a signal ended the run."""
        state = self._start()
        for step in range(self.completed_steps, self.training.total_steps):
            state = self.training.take_step(state, step, self.journal)
            self.completed_steps = step + 1
            quality = self._evaluate_if_due(state)
            stops = should_stop()
            if stops or is_due(step + 1, self.training.total_steps, self.options.save_freq):
                self._save(state, quality)
                stops = stops or should_stop()  # a save may take long
            if stops:
                self.checkpoints.wait()
                return state, True
        return state, False

    def _start(self) -> Any:
        """Return the state to start from, while the programs of a step are compiled.

        Evaluate it if `val_before_train` asks for it, or its evaluation was interrupted or failed.
        """
        training, progress = self.training, self.progress
        with contextlib.ExitStack() as precompilation:
            # A finished run only exports, and needs no program of a step.
            if progress.step < training.total_steps:
                take_step = training.step_on_shapes(progress)
                precompilation.enter_context(compile_in_background(take_step, training.mesh))
            state = training.load_state(self.checkpoints, progress.step)
            evaluates_first = progress.step == 0 and self.options.val_before_train
            if training.can_evaluate and (evaluates_first or progress.evaluation_pending):
                training.evaluate(state, progress.step, self.journal)
                progress.evaluation_pending = False
        training.prepare_first_step(self.checkpoints, progress)
        self.journal.restart_clock()
        return state

    def _evaluate_if_due(self, state: Any) -> Quality | None:
        """Evaluate if due; `None` if not, or interrupted. If it fails, the step is saved first."""
        step = self.completed_steps
        due = is_due(step, self.training.total_steps, self.options.test_freq)
        if not (self.training.can_evaluate and due):
            return None
        self.journal.write_pending_report()  # the evaluation is not part of the step's time
        try:
            return self.training.evaluate(state, step, self.journal, interrupt_evaluation)
        except EvaluationInterrupted:
            self.progress.evaluation_pending = True
            return None
        except EvaluationFailed:
            self.progress.evaluation_pending = True
            self._save(state, None)
            self.checkpoints.wait()
            raise

    def _save(self, state: Any, quality: Quality | None) -> None:
        self.journal.write_pending_report()
        with self.journal.phase("checkpoint"):
            meta = {
                "position": self.training.position,
                **self.training.fingerprints(),
                **self.progress.history(),
                "config": self.all_options,
            }
            trees = self.training.checkpoint_trees(state)
            self.checkpoints.save(self.completed_steps, trees, meta, quality)
        # Exclude the checkpoint from the next step's time.
        self.journal.restart_clock()


@contextlib.contextmanager
def compile_in_background(take_step: Callable[[], object], mesh: Mesh) -> Iterator[None]:
    """Take a step on shapes in another thread while the context runs, and wait for it at its end.

    A later call with arrays of the same shapes and shardings uses the compiled program: JAX keeps
    one cache for all threads. After an error in the context no further program is compiled.
    `take_step` makes no arrays: that would run programs in this thread, and all processes must run
    theirs in the same order. At the end, raise what the compiler raised.
    """
    stop = threading.Event()

    def compile_unless_stopped(
        name: str, lowered: jax.stages.Lowered, arguments: tuple[Any, ...]
    ) -> Any:
        if stop.is_set():
            raise concurrent.futures.CancelledError
        return compiled_programs.compile_program(name, lowered, arguments)

    def compile_all() -> None:
        with jax.set_mesh(mesh), compiled_programs.run_on_shapes(compile_unless_stopped):
            take_step()

    # XLA compiles outside the interpreter lock, so the main thread keeps loading weights.
    with concurrent.futures.ThreadPoolExecutor(1, "precompilation") as pool:
        compiling = pool.submit(compile_all)
        try:
            yield
            compiling.result()
        except BaseException:
            stop.set()
            raise


class EvaluationFailed(UserError):
    """No held-out response could be scored, in all processes."""


class EvaluationInterrupted(Exception):
    """A signal asked the run to end between two batches of an evaluation."""


def should_stop() -> bool:
    """Return whether SIGTERM or Ctrl-C asked the run to save and end, in any process.

    All processes must call it equally often, and get the same answer, which stays `True`. Before
    the first call, a signal ends the run without saving.
    """
    signals.defer_signals()
    received = signals.received_signal()
    if jax.process_count() > 1 and (received := distributed.agree_on_signal(received)):
        signals.record_signal(received)
    return received is not None


def interrupt_evaluation() -> None:
    """Raise `EvaluationInterrupted` if the run is to end: called between batches."""
    if should_stop():
        raise EvaluationInterrupted
