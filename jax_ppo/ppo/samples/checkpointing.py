"""What a step of PPO leaves to the next one, as checkpoints hold it.

That is a batch that was sampled one step ahead, or responses that will continue.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.errors import UserError
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.types import Prompts, Rollout

# The names of these trees in a checkpoint, which holds at most one.
ROLLOUT = "rollout"
POOL = "pool"
BATCHES_IN_POOL = 2  # of prompts


def describe_skipped_samples(checkpoints: Checkpointer, step: int) -> list[str]:
    """Return lines about the samples in a checkpoint, of which a run uses none."""
    return describe_skipped_pool(checkpoints, step) + describe_skipped_rollout(checkpoints, step)


def describe_skipped_rollout(checkpoints: Checkpointer, step: int) -> list[str]:
    """Return a line about a batch that was sampled ahead and is not used, if there is one."""
    if not step or checkpoints.saved_tree(step, ROLLOUT) is None:
        return []
    return [
        "the checkpoint's responses that were sampled one step ahead do not fit this run's data "
        "and options; their prompts are sampled anew"
    ]


def describe_skipped_pool(checkpoints: Checkpointer, step: int) -> list[str]:
    """Return a line about unfinished responses that are not used, if there are some."""
    saved = checkpoints.saved_tree(step, POOL) if step else None
    if saved is None:
        return []
    return [
        f"the checkpoint's unfinished responses to {saved['prompts'].shape[0] // BATCHES_IN_POOL} "
        "prompts do not fit this run's data and options; these prompts are skipped"
    ]


def are_rows(prompts: Prompts, rows: np.ndarray, training: PromptDataset) -> bool:
    """Return whether prompts [N, P] are what rows of the data, int [N], are now; -1 is any prompt.

    The fingerprint of the data does not say it: they may be in another order since the checkpoint,
    or have another chat template, which may also write the date.
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
