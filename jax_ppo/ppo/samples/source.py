"""The contract between a PPO step and what gives it samples, and what a checkpoint holds of these.

A source may leave one tree to the next step: a batch sampled ahead, or responses that continue.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.data.prompt_batches import PromptBatch, PromptBatches
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.errors import UserError
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.ppo.step_parts import StepObserver, StepParts
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress
from jax_ppo.training.state import TrainState
from jax_ppo.types import Prompts, Rollout

# The names of these trees in a checkpoint, which holds at most one.
ROLLOUT = "rollout"
POOL = "pool"
BATCHES_IN_POOL = 2  # of prompts


class SampledBatch(NamedTuple):
    """Prompts with their responses; the mesh may still be sampling them."""

    batch: PromptBatch
    rollout: Rollout
    position: int  # training examples consumed with this batch
    rule_rewards: RuleRewards | None = None  # the rewards of the rules, if they are known already
    metrics: Mapping[str, float] = {}  # how the samples were drawn
    # int [B], what addresses random numbers, by name; `None` if the step has a single draw.
    addresses: Mapping[str, np.ndarray] | None = None
    # The step that began with the sampling weights; `None` if given, or in `rollout.versions`.
    weights_step: int | None = None
    note: str = ""  # a line for the user


class SampleSource:
    """Gives each step its samples, and knows what it leaves to the next one: nothing by default."""

    tree_name = ""  # of what it leaves to the next step, in a checkpoint

    def __init__(self, parts: StepParts, batches: PromptBatches) -> None:
        """Take the parts of a step, and the prompts of the next steps."""
        self._parts = parts
        self._batches = batches
        # Waits for what the step before has left, and returns it; `None` if it has left nothing.
        self._await_left: Callable[[], Any] | None = None

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Return the samples of a step, numbered from 0, without waiting for them if possible."""
        raise NotImplementedError

    def begin_next(self, state: TrainState, step: int, observer: StepObserver) -> None:
        """Begin the samples of the next step; called in `step` where devices would idle."""

    def checkpoint_trees(self) -> dict[str, Any]:
        """Return what the next step starts from as trees of arrays, by their names."""
        return {self.tree_name: self.as_tree(self._await_left())} if self._await_left else {}

    def as_tree(self, left: Any) -> dict[str, Any]:
        """Return what a step has left as the tree that a checkpoint holds."""
        raise NotImplementedError

    def restore(self, checkpoints: Checkpointer, progress: Progress) -> list[str]:
        """Take over what a checkpoint holds for the next step; return lines for the user."""
        lines = []
        for name in (POOL, ROLLOUT):
            saved = checkpoints.saved_tree(progress.step, name) if progress.step else None
            if saved is None:
                continue
            left = None
            if name == self.tree_name:
                left = self.read_tree(saved, checkpoints, progress.step)
            if left is not None:
                self._await_left = lambda left=left: left
            elif name == ROLLOUT:
                lines.append(
                    "the checkpoint's responses that were sampled one step ahead do not fit this "
                    "run's data and options; their prompts are sampled anew"
                )
            else:
                count = saved["prompts"].shape[0] // BATCHES_IN_POOL
                lines.append(
                    f"the checkpoint's unfinished responses to {count} prompts do not fit this "
                    "run's data and options; these prompts are skipped"
                )
        return lines

    def read_tree(self, saved: dict[str, Any], checkpoints: Checkpointer, step: int) -> Any:
        """Return what `as_tree` took, from a checkpoint; `None` if it does not fit this run."""
        raise NotImplementedError


def are_rows(prompts: Prompts, rows: np.ndarray, training: PromptDataset) -> bool:
    """Return whether prompts [N, P] are what rows of the data, int [N], are now; -1 is any prompt.

    The data's fingerprint does not say it: order or chat template may have changed.
    """
    tokens, lengths = map(placement.to_host, (prompts.tokens, prompts.lengths))
    return len(rows) == len(tokens) and all(
        row < 0 or np.array_equal(tokens[i, : lengths[i]], training.tokens[row])
        for i, row in enumerate(rows)
    )


def rollout_arrays(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as the tree of arrays that a checkpoint holds."""
    arrays = {name: value for name, value in vars(rollout).items() if value is not None}
    prompts = {name: value for name, value in vars(rollout.prompts).items() if value is not None}
    return {**arrays, "prompts": prompts}


def read_rollout(arrays: dict[str, Any], step: int) -> Rollout:
    """Return the rollout of a checkpoint; raise `UserError` if another version wrote it."""
    if unknown := sorted(arrays.keys() - {field.name for field in dataclasses.fields(Rollout)}):
        raise UserError(
            f"checkpoint {step}: its responses are of another version of jax_ppo, with "
            f"{', '.join(unknown)}; resume with that version"
        )
    return Rollout(**arrays | {"prompts": Prompts(**arrays["prompts"])})


def lay_out(saved: Any, mesh: Mesh, samples: int, replicated: str) -> Any:
    """Return the shapes of a saved tree: the mesh splits its rows, except for one named array's."""
    rows, everywhere = sharding.batch_rows(mesh, samples), sharding.replicated(mesh)

    def shape(path: jax.tree_util.KeyPath, x: Any) -> jax.ShapeDtypeStruct:
        layout = everywhere if jax.tree_util.keystr(path, simple=True) == replicated else rows
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return jax.tree_util.tree_map_with_path(shape, saved)
