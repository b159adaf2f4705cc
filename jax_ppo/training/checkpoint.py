"""Checkpoints: written while training goes on, whole or not at all, read back onto any mesh.

A checkpoint is a folder DIRECTORY/STEP with an item for each tree of arrays (those of state.trained), `meta` (JSON) and
`metrics` (JSON, what the best one is chosen by). A folder gets its name when all of it is on disk; a process killed
while saving leaves a temporary one, which is not seen and is removed by the next run.
"""

import dataclasses
import json
import math
import os
import signal
import threading
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jax_ppo.errors import UserError

META = "meta"
SHOWN = 5  # wrong parameters named in an error


@dataclasses.dataclass
class Progress:
    """How far a run has come: with the arrays of state.trained and the options, all that a checkpoint holds.

    Attributes:
      step: steps done.
      position: training examples consumed.
      evaluations: {step} and the means by name of each evaluation so far, None where one has no meaning.
    """

    step: int = 0
    position: int = 0
    evaluations: list[dict] = dataclasses.field(default_factory=list)


class Checkpointer:
    """The checkpoints of one run: the newest ones and the best one.

    Every process of the run makes one and calls every method in the same order; the directory is on a disk that all of
    them see. Leaving its `with` block waits for a save under way.
    """

    def __init__(
        self, directory: str | os.PathLike, max_to_keep: int = 2, best_metric: str = "accuracy"
    ):
        """Opens a directory, which is made if it does not exist.

        Args:
          directory: of this run alone.
          max_to_keep: the newest checkpoints that are kept, at least 1.
          best_metric: the checkpoint in which this is largest is kept besides, as it is across restarts.
        """
        # orbax takes absolute paths only; gs://... is one already.
        self._directory = str(directory) if "://" in str(directory) else os.path.abspath(directory)
        self._best_metric = best_metric
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(max_to_keep),
                checkpoint_managers.BestN(
                    get_metric_fn=self._quality, n=1, keep_checkpoints_without_metrics=False
                ),
            ]
        )
        # best_fn is needed besides the policy: without it no metrics are written, and a restart forgets the best one.
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy, best_fn=self._quality, cleanup_tmp_directories=True
            ),
        )
        self._saved = None
        self._asked, self._stop = None, False
        self._sigterm = _Sigterm() if jax.process_count() == 1 else None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind, error, trace) -> None:
        # After an error in one of several processes the others are elsewhere, and close() would wait for them for ever.
        if kind is None or jax.process_count() == 1:
            self.close()

    def save(
        self,
        step: int,
        arrays: dict[str, Any],
        meta: dict,
        metrics: dict[str, float | None] | None = None,
    ) -> None:
        """Copies the arrays and returns; they are written in the background. Saving a step twice does nothing.

        Args:
          step: number of the checkpoint.
          arrays: trees of arrays by name, typed PRNG keys among them if need be; a tree that is None is left out.
          meta: anything that JSON can hold.
          metrics: figures to choose the best checkpoint by; without the best metric, or with NaN in it, this is not it.

        Raises:
          TypeError: something in meta is not JSON.
          ValueError: the directory had this step before.
          Exception: the save before this one failed (no space left, ...).
        """
        if step == self._saved:
            return
        items = {
            name: ocp.args.StandardSave(tree) for name, tree in arrays.items() if tree is not None
        }
        items[META] = ocp.args.JsonSave(json.loads(json.dumps(meta)))  # here, so that it fails here
        finite = {
            name: float(value)
            for name, value in (metrics or {}).items()
            if value is not None and math.isfinite(value)
        }
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=finite, force=True)
        self._saved = step

    def latest_step(self) -> int | None:
        """The newest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """The checkpoint with the largest best metric (the newest of several), None if no checkpoint has it."""
        self.wait()  # metrics are read from disk
        step = self._manager.best_step()
        return (
            None
            if step is None or self._quality(self._manager.metrics(step)) == -math.inf
            else step
        )

    def restore(self, step: int, abstract: dict[str, Any]) -> tuple[dict[str, Any], dict]:
        """Reads a checkpoint.

        Args:
          step: one that exists.
          abstract: what to read: trees of ShapeDtypeStruct with sharding, on whichever mesh; a tree that is None is
            left out, and so is what the checkpoint holds besides. A dtype other than the saved one casts.

        Returns:
          the arrays, placed as asked, and meta.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          UserError: names or shapes differ.
        """
        self.wait()
        wanted = {name: tree for name, tree in abstract.items() if tree is not None}
        there = self._manager.all_steps()
        if step not in there:
            raise FileNotFoundError(
                f"{self._directory} has no checkpoint of step {step}, only of {there}"
            )
        for name, tree in wanted.items():
            self._check(step, name, tree)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
        restored = self._manager.restore(
            step, args=ocp.args.Composite(**items, **{META: ocp.args.JsonRestore()})
        )
        return {name: restored[name] for name in wanted}, restored[META]

    def restore_item(self, step: int, name: str, abstract: Any) -> Any:
        """Reads one tree of a checkpoint, as `restore` does."""
        arrays, _ = self.restore(step, {name: abstract})
        return arrays[name]

    def should_stop(self, step: int) -> bool:
        """Whether SIGTERM asked the run to save and end. Call it after every step; all processes get the same answer.

        Several processes agree on a step that none of them has passed yet. The answer for a step does not change.
        """
        if step != self._asked:
            self._asked = step
            self._stop = (
                self._sigterm.received if self._sigterm else self._manager.reached_preemption(step)
            )
        return self._stop

    def wait(self) -> None:
        """Waits until what was saved is on disk. Raises what went wrong with it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for a save under way; nothing can be called after it."""
        if self._sigterm:
            self._sigterm.restore()
        self._manager.close()

    def _quality(self, metrics: dict[str, float] | None) -> float:
        return (metrics or {}).get(self._best_metric, -math.inf)

    def _check(self, step, name, abstract):
        """Compares names and shapes before orbax does, which would name no parameter."""
        path = self._manager.directory / str(step) / name
        if not path.exists():
            raise UserError(f"checkpoint {step} in {self._directory} holds no {name!r}")
        saved = _shapes(ocp.StandardCheckpointHandler().metadata(path).tree)
        wanted = _shapes(abstract)
        wrong = [
            f"{name}/{key}: {saved.get(key, 'absent')} in the checkpoint, {wanted.get(key, 'absent')} in the model"
            for key in sorted(saved.keys() | wanted.keys())
            if saved.get(key) != wanted.get(key)
        ]
        if wrong:
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise UserError(
                f"checkpoint {step} in {self._directory} is of another model or optimizer: "
                f"{'; '.join(wrong[:SHOWN])}{more}"
            )


def _shapes(tree) -> dict[str, tuple[int, ...]]:
    """The shape of each array by its path, for trees of arrays and for orbax's descriptions of them."""
    shapes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)  # as which a key is saved
        shapes[jax.tree_util.keystr(path, simple=True, separator="/")] = tuple(leaf.shape)
    return shapes


class _Sigterm:
    """Notes a SIGTERM instead of dying of it. Several processes have JAX do this, and agree on a step."""

    def __init__(self):
        self.received = False
        self._before = None
        if threading.current_thread() is threading.main_thread():  # only there may a handler be set
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number, frame):
        self.received = True
        self.restore()  # a second one ends the process as ever

    def restore(self):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
