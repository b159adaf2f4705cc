"""The life cycle of a training run: resume, take steps, report, evaluate, save, export.

    training = kind.build(sizes, mesh)                   # run_life_cycle
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import Mesh

from jax_ppo.config.schema import Config, Trainer, flatten_options, replace_options
from jax_ppo.errors import UserError
from jax_ppo.kernels.platform import target_platform
from jax_ppo.memory.automatic_sizes import (
    AS_SET,
    SizeChoice,
    Sizes,
    choose_sizes,
    compile_within,
    raise_in_all_processes,
)
from jax_ppo.memory.memory_check import (
    OutOfMemory,
    PPOMemory,
    SupervisedMemory,
    explain_out_of_memory,
)
from jax_ppo.memory.remedies import set_sizes
from jax_ppo.reporting import console
from jax_ppo.reporting.journal import Journal
from jax_ppo.runtime import compiled_programs, distributed, meshes, signals, work_directory
from jax_ppo.runtime.compiled_programs import Compile
from jax_ppo.runtime.devices import read_memory_limit
from jax_ppo.runtime.heartbeat import activity
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import (
    Progress,
    find_progress,
    find_saved_run,
    is_due,
    refuse_saved_run,
)

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

    @property
    def memory(self) -> PPOMemory | SupervisedMemory:
        """Return what measures the memory of the arrays that stay."""

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


@dataclasses.dataclass(frozen=True)
class TrainingKind:
    """One kind of training, described before any of it is built."""

    command: str  # options that it does not read may change on resume
    best_metric: str  # the entry of `Quality` that chooses the best checkpoint
    # Builds the training with values of options by dotted name; most user errors surface here.
    build: Callable[[Mapping[str, Any], Mesh], Training[Any]]
    # The sizes that are `auto` with values of options by dotted name, fastest first.
    rank_sizes: Callable[[Mapping[str, Any], Mesh], list[Sizes]]


def run_life_cycle(config: Config, workdir: Path, kind: TrainingKind) -> dict[str, Any]:
    """Train from the newest checkpoint in `workdir`, or from the start if there is none.

    Where the devices state their memory, options that are `auto` are chosen by it. Return the
    contents of summary.json.
    """
    mesh = meshes.make_mesh(config.mesh, decoding=config.rollout.mesh.devices)
    checkpointer = Checkpointer(
        work_directory.checkpoint_directory(workdir),
        max_to_keep=config.trainer.max_checkpoints,
        best_metric=kind.best_metric,
        report=console.print_on_main,
        before_save=functools.partial(work_directory.publish, workdir),
    )
    with (
        jax.set_mesh(mesh),
        compiled_programs.count_compilations() as compiled,
        checkpointer as checkpoints,
    ):

        def train(choice: SizeChoice) -> dict[str, Any]:
            sized = replace_options(config, choice.sizes.options)
            # First: a changed option may be why data, folders or weights do not fit.
            saved = find_saved_run(sized, checkpoints, kind.command)
            training = kind.build(choice.sizes.options, mesh)
            found = training.fingerprints()
            models = {f"config.{option}": x for option, x in found.get("frozen", {}).items()}
            distributed.require_equal({"config.data": found["data"]} | models, "files")
            progress = find_progress(training.total_steps, saved, console.print_on_main, **found)
            with (
                explain_out_of_memory(training.memory),
                training.running(),
                training.open_journal(workdir, progress, compiled) as journal,
            ):
                loop = StepLoop(
                    training, sized, checkpoints, progress, journal, choice, kind.command
                )
                state, was_preempted = loop.take_steps()
                journal.write_pending_report()
                # A preempted run ends without an export: the next start resumes it.
                if config.trainer.export and not was_preempted:
                    training.export(state, workdir, journal)
                    if config.trainer.export_best:
                        del state  # the devices may have no room for two states
                        export_best(training, checkpoints, workdir, journal)
                return journal.write_summary(loop.completed_steps, mesh)

        if not config.trainer.resume:  # once: what follows may have saved before memory runs out
            refuse_saved_run(checkpoints)
        choice = AS_SET
        if (limit := read_memory_limit()) is not None:
            saved = find_saved_run(config, checkpoints, kind.command)
            kept = flatten_options(saved.meta["config"]) if saved else {}
            choice = choose_sizes(kind.rank_sizes({}, mesh), limit, kept)
        elif target_platform() != "cpu":
            console.print_on_main("note: the devices state no memory: auto is the same as on CPUs")
        try:
            return _train_while_memory_lasts(choice, train)
        except OutOfMemory as error:
            are_set = set_sizes(flatten_options(dataclasses.asdict(config)))
            if not (error.needed and are_set):
                raise
            ranked = kind.rank_sizes(dict.fromkeys(are_set), mesh)
            most = choose_sizes(ranked, choice.available)
            words = ", ".join(f"config.{name}={value}" for name, value in are_set.items())
            fitting = "the largest that fit:" if most.fits else "auto begins with"
            raise UserError(f"{words}: {error}; {fitting} {most.sizes}") from error


def _train_while_memory_lasts(
    choice: SizeChoice, train: Callable[[SizeChoice], dict[str, Any]]
) -> dict[str, Any]:
    """Return what `train` returns, called with smaller sizes each time that memory runs out."""
    while True:
        if line := str(choice):
            console.print_on_main(line)
        try:
            return train(choice)
        except OutOfMemory as error:
            # An allocation may fail in one process while others wait for it; all know what the
            # compiler needs.
            is_shared = jax.process_count() == 1 or bool(error.needed)
            smaller = choice.smaller(error.needed) if is_shared else None
            if smaller is None:
                raise
            reason = str(error).partition("\n")[0]
        # Here nothing refers to the arrays of the failed attempt.
        console.print_on_main(f"note: {reason}; the run continues with smaller sizes")
        choice = smaller


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
            f"config.trainer.best_metric={checkpoints.best_metric!r}, so none is the best (the "
            "evaluation at the start of a resumed run does not count)"
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
    config: Config  # checkpoints record it
    checkpoints: Checkpointer
    progress: Progress
    journal: Journal
    choice: SizeChoice  # of the sizes that are `auto`
    command: str  # recorded, too: the checkpoints are of no other command

    def __post_init__(self) -> None:
        self.completed_steps = self.progress.step

    def take_steps(self) -> tuple[Any, bool]:
        """Take the remaining steps; return the last state, and whether a signal ended the run."""
        state = self._start()
        for step in range(self.completed_steps, self.training.total_steps):
            with activity(f"step {step + 1}"):
                state = self.training.take_step(state, step, self.journal)
            self.completed_steps = step + 1
            quality = self._evaluate_if_due(state)
            stops = should_stop()
            if stops or is_due(step + 1, self.training.total_steps, self.config.trainer.save_freq):
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
                compile_: Compile = compiled_programs.compile_program
                if self.choice is not AS_SET:
                    precompilation.enter_context(raise_in_all_processes())
                    compile_ = compile_within(self.choice, training.memory.measure().resident)
                take_step = training.step_on_shapes(progress)
                compiling = compile_in_background(take_step, training.mesh, compile_)
                precompilation.enter_context(compiling)
                if self.choice.smaller() is None and not self.choice.fits:
                    precompilation.close()  # the compiler may refuse the run: weights wait for it
            state = training.load_state(self.checkpoints, progress.step)
            evaluates_first = progress.step == 0 and self.config.trainer.val_before_train
            if training.can_evaluate and (evaluates_first or progress.evaluation_pending):
                training.evaluate(state, progress.step, self.journal)
                progress.evaluation_pending = False
        training.prepare_first_step(self.checkpoints, progress)
        self.journal.restart_clock()
        return state

    def _evaluate_if_due(self, state: Any) -> Quality | None:
        """Evaluate if due; `None` if not, or interrupted. If it fails, the step is saved first."""
        step = self.completed_steps
        due = is_due(step, self.training.total_steps, self.config.trainer.test_freq)
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
                "config": dataclasses.asdict(self.config),
                "command": self.command,
            }
            trees = self.training.checkpoint_trees(state)
            self.checkpoints.save(self.completed_steps, trees, meta, quality)
        self.journal.restart_clock()


@contextlib.contextmanager
def compile_in_background(
    take_step: Callable[[], object], mesh: Mesh, compile_: Compile
) -> Iterator[None]:
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
        return compile_(name, lowered, arguments)

    def compile_all() -> None:
        on_shapes = compiled_programs.run_on_shapes(compile_unless_stopped)
        with jax.set_mesh(mesh), on_shapes, activity("compiling a step"):
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
    return distributed.agree_on_signal()


def interrupt_evaluation() -> None:
    """Raise `EvaluationInterrupted` if the run is to end: called between batches."""
    if should_stop():
        raise EvaluationInterrupted
