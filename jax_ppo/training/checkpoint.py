"""Checkpoints: written atomically while training continues, and restored onto any mesh.

A checkpoint is a folder DIRECTORY/STEP that holds

    trees of arrays  in PPO the trained models, "optimizer" and "control" (`state.trained_trees`),
                     "rollout" if the next step's samples are drawn already, and "pool" if it
                     continues responses
    meta             JSON: the format; and of the run the position in the data, fingerprints of
                     data and frozen models, history (`progress.HISTORY`), all options
    metrics          JSON: means of the evaluation, by which the best checkpoint is chosen

A folder gets its name once all of it is on disk, with a checksum of each file; in a bucket, an
object written last completes it. A process that is killed while saving leaves a temporary folder,
which is ignored, and removed by the next run. A checkpoint whose files are not as they were written
is set aside when the directory is opened, and the next older one is used.
"""

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jax_ppo.errors import UserError
from jax_ppo.runtime import distributed, heartbeat, signals
from jax_ppo.storage import local_files, remote
from jax_ppo.training import checksums

META = "meta"
# The first version that writes each format; add one when older checkpoints can no longer be read.
FORMATS = {1: "0.1.0", 2: "0.2.0"}
MAX_SHOWN = 5  # mismatched parameters named in an error
_show_uncaught = sys.unraisablehook


class Restored(NamedTuple):
    """Contents of a restored checkpoint."""

    arrays: dict[str, Any]
    meta: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run: the newest ones and the best one.

    Every process creates one and calls its methods in the same order; the directory is in a bucket
    or on a shared disk. Leaving the `with` block waits for a save in progress.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        max_to_keep: int = 2,
        best_metric: str = "accuracy",
        report: Callable[[str], None] = print,
        before_save: Callable[[], None] = lambda: None,
        read_only: bool = False,
    ) -> None:
        """Open a directory, creating it if necessary.

        Args:
          directory: a path or an address, used by this run only.
          max_to_keep: how many of the newest checkpoints are kept, at least 1.
          best_metric: the checkpoint with the largest value of this metric is kept too, also across
            restarts.
          report: called on the main process with a line for each damaged checkpoint.
          before_save: called on the main process before each save, for what must not be older than
            it.
          read_only: leave everything in the directory as it is: a run may be writing there.
        """
        self._directory = os.fspath(directory)
        self._is_remote = remote.is_address(self._directory)
        if not self._is_remote:
            self._directory = os.path.abspath(directory)  # Orbax takes absolute paths only
        self._before_save = before_save
        self.best_metric = best_metric
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(max_to_keep),
                checkpoint_managers.BestN(  # only an evaluated checkpoint can be the best one
                    get_metric_fn=self._quality, n=1, keep_checkpoints_without_metrics=False
                ),
            ]
        )
        # Before Orbax looks at them: it would count damaged checkpoints and delete older ones.
        self._intact_steps: set[int] = set()
        if distributed.is_main() and not read_only:
            newest = checksums.set_damaged_aside(self._directory, report)
            if newest is not None:
                self._intact_steps.add(newest)
        distributed.barrier("damaged checkpoints")
        # Hide what Orbax, asyncio and tensorstore print of errors that this class raises itself.
        for library in ("absl", "asyncio"):
            logging.getLogger(library).addFilter(_is_worth_showing)
        sys.unraisablehook = _show_unless_of_closed_loop
        # Without best_fn no metrics are written, and a restart forgets the best checkpoint.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=self._quality,
            cleanup_tmp_directories=True,
            temporary_path_class=checksums.temporary_path_class(self._directory),
        )
        if read_only:
            options = ocp.CheckpointManagerOptions(best_fn=self._quality, read_only=True)
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._saved_step: int | None = None
        self._saving: tuple[int, int] = (0, 0)  # the step that is being saved, and its bytes

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failed = error is not None
        if failed and jax.process_count() > 1:
            return  # this would wait forever for the other processes
        # The first error is the one to report, not that of a save which it interrupted.
        with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
            self.wait()
            self._manager.close()

    def save(
        self,
        step: int,
        arrays: dict[str, Any],
        meta: dict,
        metrics: dict[str, float | None] | None = None,
    ) -> None:
        """Copy the arrays and return; they are written in the background.

        `arrays` are trees by name, with typed PRNG keys. Without a finite best metric in `metrics`
        this checkpoint is never the best. Raise `UserError` if the disk has too little space,
        `ValueError` if the directory has this step, `TypeError` if `meta` is not JSON, and what
        ended the save before.
        """
        items = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items()}
        # Serialize here, so that an error is raised here and not in the background.
        written = {"format": max(FORMATS), "run": meta}
        items[META] = ocp.args.JsonSave(json.loads(json.dumps(written)))
        finite = {
            name: float(value)
            for name, value in (metrics or {}).items()
            if value is not None and math.isfinite(value)
        }
        self.wait()  # the save before this one needs its space first
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
        self._saving = (step, num_bytes)

        def prepare() -> None:
            # Checked beforehand, since tensorstore has no short error for a full disk.
            if not self._is_remote:
                what = f"the checkpoint of step {step}"
                local_files.require_free_space(Path(self._directory), num_bytes, what)
            self._before_save()

        distributed.run_on_main(prepare)
        # `force`: the caller decides when to save, not an interval of Orbax.
        with self._disk_errors():
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=finite, force=True)
        self._saved_step = step

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint, or `None` if there is none."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Return the newest step with the largest best metric; `None` if none has the metric."""
        self.wait()  # metrics are read from disk
        step = self._manager.best_step()
        if step is None or self._quality(self._manager.metrics(step)) == -math.inf:
            return None
        return step

    @heartbeat.activity("restoring a checkpoint")
    def restore(self, step: int, abstract: dict[str, Any]) -> Restored:
        """Read a checkpoint.

        `abstract` has the trees to read, of `jax.ShapeDtypeStruct` with shardings on any mesh.
        Arrays are cast to the dtype given here.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          UserError: names or shapes differ, files are damaged, or another version wrote them.
        """
        self.wait()
        # Validate files, names and shapes first: Orbax's errors do not name what is wrong.
        saved_steps = self._manager.all_steps()
        if step not in saved_steps:
            raise FileNotFoundError(
                f"{self._directory} has no checkpoint of step {step}, only of {saved_steps}"
            )
        self._validate_files(step)
        checkpoint = f"checkpoint {step} in {self._directory}"
        read_meta = ocp.args.Composite(**{META: ocp.args.JsonRestore()})
        meta = self._manager.restore(step, args=read_meta)[META]
        _validate_format(checkpoint, meta)
        for name, tree in abstract.items():
            _validate_shapes(checkpoint, name, self.saved_tree(step, name), tree)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        arrays = {}
        if items:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
            arrays = {name: restored[name] for name in items}
        return Restored(arrays, meta["run"])

    def saved_tree(self, step: int, name: str) -> Any:
        """Return a tree of a checkpoint as objects with `shape` and `dtype`, `None` without it."""
        path = self._manager.directory / str(step) / name
        if not path.exists():
            return None
        return ocp.StandardCheckpointHandler().metadata(path).tree

    def wait(self) -> None:
        """Wait until everything saved is on disk, and raise the error if a save failed."""
        with self._disk_errors():
            self._manager.wait_until_finished()
        if self._saved_step is not None:
            signals.record_saved_step(self._saved_step)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._is_remote or not local_files.is_disk_full(error):
                raise
            step, needed = self._saving
            full = local_files.disk_full_error(
                Path(self._directory), f"the checkpoint of step {step}", needed
            )
            # Without the cause, whose frames hold the writers that were not awaited.
            raise full from None

    def _quality(self, metrics: dict[str, float] | None) -> float:
        return (metrics or {}).get(self.best_metric, -math.inf)

    def _validate_files(self, step: int) -> None:
        """Compare the checksums on the main process; raise on all of them if they differ."""

        def compare() -> None:
            folder = f"{self._directory}/{step}"
            if step in self._intact_steps:
                return
            if damage := checksums.find_damage(folder):
                raise UserError(f"checkpoint {folder} is damaged: {damage}")

        distributed.run_on_main(compare)
        self._intact_steps.add(step)


def _validate_format(checkpoint: str, meta: dict[str, Any]) -> None:
    found = meta.get("format", 1)  # version 0.1.0 did not write it
    if found != max(FORMATS):
        version = f"version {FORMATS[found]}" if found in FORMATS else "a later version"
        raise UserError(
            f"{checkpoint} has format {found}, which {version} of jax_ppo reads: continue with "
            "that, or give another --workdir"
        )


def _validate_shapes(checkpoint: str, name: str, saved_tree: Any, abstract: Any) -> None:
    """Raise `UserError` if names or shapes differ: other errors name no parameter."""
    if saved_tree is None:
        raise UserError(f"{checkpoint} holds no {name!r}")
    saved, wanted = _shapes(saved_tree), _shapes(abstract)
    wrong = [  # names of both sides: a parameter that only one of them has is a mismatch, too
        f"{name}/{key}: {saved.get(key, 'absent')} in the checkpoint, "
        f"{wanted.get(key, 'absent')} in the model"
        for key in sorted(saved.keys() | wanted.keys())
        if saved.get(key) != wanted.get(key)
    ]
    if wrong:
        shown = "; ".join(wrong[:MAX_SHOWN])
        if len(wrong) > MAX_SHOWN:
            shown += f" and {len(wrong) - MAX_SHOWN} more"
        raise UserError(f"{checkpoint} is of another model or optimizer: {shown}")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array by its path, for trees of arrays or Orbax's metadata."""
    shapes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)  # keys are saved as their data
        shapes[jax.tree_util.keystr(path, simple=True, separator="/")] = tuple(leaf.shape)
    return shapes


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """Return whether to show a log record of Orbax.

    `Checkpointer` reports a full disk itself. Orbax's threads fail if the command ends before them,
    after an error that has been reported. Directories of other runs are read only on purpose.
    """
    error = record.exc_info[1] if record.exc_info else None
    text = record.getMessage()
    is_of_full_disk = local_files.is_disk_full(error) or local_files.is_disk_full(Exception(text))
    expected = ("cannot schedule new futures", "directory is read only", "read_only=True, setting")
    return not is_of_full_disk and not any(part in text for part in expected)


def _show_unless_of_closed_loop(report: "sys.UnraisableHookArgs") -> None:
    """Show an error that no caller can catch, unless it follows from a save that failed."""
    # tensorstore reports from its threads each array that was still being written.
    if str(report.exc_value) != "Event loop is closed":
        _show_uncaught(report)
