"""What a step of PPO leaves to the next one, as checkpoints hold it.

That is a batch that was sampled one step ahead, or responses that will continue.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.data.prompts import PromptDataset
from jax_ppo.errors import UserError
from jax_ppo.ppo.partial_rollouts import BATCHES_IN_POOL, compile_begin
from jax_ppo.ppo.step_parts import ResponsePool, SampledBatch, TrainingBatches
from jax_ppo.reporting import console
from jax_ppo.run.parts import PPORun
from jax_ppo.runtime import placement, sharding
from jax_ppo.sampler.continuation import DrawStates
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress, former_values
from jax_ppo.training.random_streams import Stream
from jax_ppo.types import Prompts, Rollout

# The names of these trees in a checkpoint, which holds at most one.
ROLLOUT = "rollout"
POOL = "pool"


def carried_over_trees(
    carried_over: SampledBatch | ResponsePool | None, mesh: Mesh
) -> dict[str, Any]:
    """Return the tree that a checkpoint holds of what a step left, by its name; {} if nothing."""
    if isinstance(carried_over, ResponsePool):
        return {POOL: pool_arrays(carried_over, mesh)}
    return {} if carried_over is None else {ROLLOUT: rollout_arrays(carried_over.rollout)}


def restore_carried_over(
    run: PPORun, checkpoints: Checkpointer, progress: Progress, batches: TrainingBatches
) -> SampledBatch | ResponsePool | None:
    """Return what the step before left to the next one; `None` if nothing, or nothing that fits."""
    return restore_pool(run, checkpoints, progress) or restore_sampled_batch(
        run, checkpoints, progress, batches
    )


def restore_sampled_batch(
    run: PPORun, checkpoints: Checkpointer, progress: Progress, batches: TrainingBatches
) -> SampledBatch | None:
    """Return the batch that a run had sampled ahead for its next step when it was saved.

    The resumed run could not sample it again: the checkpoint's weights are one update newer.

    Returns:
      The batch, whose prompts are taken from `batches`; `None` if the checkpoint holds none. For
      one that does not fit this run, print that its prompts are sampled anew, and return `None`.
    """
    config, options = run.config, run.sampling
    step, position = progress.step, batches.position
    saved = checkpoints.saved_tree(step, ROLLOUT) if step else None
    if saved is None:
        return None
    samples = config.data.train_batch_size * config.rollout.n
    has_turns = options.environment is not None
    optional = {
        "routed_experts": options.returns_routed_experts,
        "turn_rewards": has_turns,
        "turn_starts": has_turns,
    }
    # Position 0: the data have changed, and the rollout's prompts are gone.
    fits = config.rollout.max_staleness == 1 and progress.position > 0
    fits &= saved["responses"].shape == (samples, config.data.max_response_length)
    fits &= optional == {name: name in saved for name in optional}
    if fits:
        # `slot_steps` has one number per queue of the decoder, and this mesh may have others.
        shapes = _lay_out(saved, run.mesh, samples, replicated="slot_steps")
        rollout = _read_rollout(checkpoints.restore_item(step, ROLLOUT, shapes), step)
        batch = next(batches)
        if _are_rows(rollout.prompts, np.repeat(batch.indices, config.rollout.n), run.training):
            return SampledBatch(
                batch=batch,
                rollout=rollout,
                position=batches.position,
                weights_step=step - 1,  # sampled during the last completed step
            )
        batches.position = position
    console.print_on_main(
        "the checkpoint's responses that were sampled one step ahead do not fit this run's data "
        "and options; their prompts are sampled anew"
    )
    return None


def _are_rows(prompts: Prompts, rows: np.ndarray, training: PromptDataset) -> bool:
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


def _read_rollout(arrays: dict[str, Any], step: int) -> Rollout:
    """Return the rollout of a checkpoint; raise `UserError` if another version wrote it."""
    if unknown := sorted(arrays.keys() - {field.name for field in dataclasses.fields(Rollout)}):
        raise UserError(
            f"checkpoint {step}: its responses are of another version of jax_ppo, with "
            f"{', '.join(unknown)}; resume with that version"
        )
    return Rollout(**arrays | {"prompts": Prompts(**arrays["prompts"])})


def pool_arrays(pool: ResponsePool, mesh: Mesh) -> dict[str, Any]:
    """Return a pool as the tree of arrays that a checkpoint holds."""
    prompts = placement.place(pool.prompts.astype(np.int32), sharding.replicated(mesh))
    return _pool_rows(pool.rollout, pool.draws) | {"prompts": prompts}


def _pool_rows(rollout: Rollout, draws: DrawStates) -> dict[str, Any]:
    """Return what a checkpoint holds of the samples of a pool."""
    return {"rollout": rollout_arrays(rollout), "draws": draws._asdict()}


def restore_pool(run: PPORun, checkpoints: Checkpointer, progress: Progress) -> ResponsePool | None:
    """Return the unfinished responses of a run's checkpoint.

    Returns:
      The pool; `None` if the checkpoint holds none. For one that does not fit this run, print that
      its prompts are skipped, and return `None`.
    """
    config = run.config
    saved = checkpoints.saved_tree(progress.step, POOL) if progress.step else None
    if saved is None:
        return None
    num_prompts = saved["prompts"].shape[0]
    samples = BATCHES_IN_POOL * run.samples
    # Changed data have reset the position.
    fits = config.rollout.max_staleness > 1 and progress.position > 0
    if fits:
        _read_rollout(saved["rollout"], progress.step)  # raises if another version wrote it
        begun = compile_begin(run, run.sample_keys(Stream.TRAINING, 0))
        rows = saved["rollout"]["responses"].shape[0]
        fits = num_prompts * config.rollout.n == samples == rows
        fits &= _row_shapes(saved) == _row_shapes(jax.eval_shape(_pool_rows, *begun))
        former = former_values(checkpoints.restore(progress.step, {}).meta["config"])
        # The states of the search for other strings would have another meaning.
        fits &= former["rollout.stop"] == config.rollout.stop
    if fits:
        shapes = _lay_out(saved, run.mesh, samples, replicated="prompts")
        arrays = checkpoints.restore_item(progress.step, POOL, shapes)
        rollout = _read_rollout(arrays["rollout"], progress.step)
        prompts = placement.to_host(arrays["prompts"])
        entered = np.where(prompts[:, 1] < 0, -1, prompts[:, 0])
        fits = _are_rows(rollout.prompts, np.repeat(entered, config.rollout.n), run.training)
    if not fits:
        console.print_on_main(
            f"the checkpoint's unfinished responses to {num_prompts // BATCHES_IN_POOL} prompts do "
            "not fit this run's data and options; these prompts are skipped"
        )
        return None
    return ResponsePool(rollout=rollout, draws=DrawStates(**arrays["draws"]), prompts=prompts)


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _row_shapes(tree: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the samples' rows in a checkpoint's tree, by name."""
    return {
        _name(path): tuple(x.shape[1:])
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if _name(path) != "prompts"
    }


def _lay_out(saved: Any, mesh: Mesh, samples: int, replicated: str) -> Any:
    """Return the shapes of a saved tree: the mesh splits its rows, except for one named array's."""
    rows, everywhere = sharding.batch_rows(mesh, samples), sharding.replicated(mesh)

    def shape(path: jax.tree_util.KeyPath, x: Any) -> jax.ShapeDtypeStruct:
        layout = everywhere if jax.tree_util.keystr(path, simple=True) == replicated else rows
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return jax.tree_util.tree_map_with_path(shape, saved)
