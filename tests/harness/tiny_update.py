"""Updates of the tiny actor and critic: a whole step, and the gradients of one mini-batch."""

import dataclasses

import jax
import numpy as np

import tiny

ALL = [list(range(tiny.B))]
HALVES = [[0, 2, 4, 6], [1, 3, 5, 7]]


def run_update(
    config, mesh, groups, rows, seed=0, rewards=None, prepare=lambda state: state, total_steps=100
):
    """Run one whole step on a random rollout.

    Returns:
        The state before the step (on the host), the state after it, and the metrics.
    """
    with jax.set_mesh(mesh):
        state = prepare(tiny.make_state(config, mesh, seed))
        rollout = tiny.make_rollout(mesh, seed)
        experience, rollout_metrics = tiny.make_experience(
            config, mesh, state, rollout, rewards, rows
        )
        batches = tiny.pack_batches(config, mesh, rollout, groups, rows)
        before = jax.tree.map(np.array, state)
        state, metrics = tiny.update_state(
            config, state, experience, batches, batches if config.has_critic else None, total_steps
        )
    return (
        before,
        state,
        {name: np.asarray(value)[()] for name, value in (rollout_metrics | metrics).items()},
    )


def run_gradients(
    config,
    mesh,
    rows,
    change=lambda experience: experience,
    move=1.02,
    roles=("actor", "critic"),
    prepare=lambda state: state,
):
    """Return gradients and metrics of the roles for one mini-batch of all samples.

    Args:
        change: function applied to the experience.
        move: factor by which parameters have changed since the rollout.
        prepare: function applied to the state before the rollout is scored.
    """
    with jax.set_mesh(mesh):
        state = prepare(tiny.make_state(config, mesh))
        rollout = tiny.make_rollout(mesh)
        experience = change(tiny.make_experience(config, mesh, state, rollout, rows=rows)[0])
        moved_state = jax.tree.map(
            lambda x: x * move, dataclasses.replace(state, step=None, control=None)
        )
        batch = tiny.pack_batch(config, mesh, rollout, rows)
        learners = {
            "actor": (tiny.actor_gradients, moved_state.actor),
            "critic": (tiny.critic_gradients, moved_state.critic),
        }
        grads, metrics = [], {}
        for name in roles:
            compute_gradients, params = learners[name]
            gradients, role_metrics = compute_gradients(
                config, params, moved_state.reference, experience, batch
            )
            grads.append(gradients)
            metrics |= role_metrics
        return jax.tree.map(np.asarray, grads), {
            name: float(value) for name, value in metrics.items()
        }


def assert_close(ours, expected, tolerance=2e-5):
    def compare(path, a, b):
        scale = max(np.abs(a).max(), 1e-3)
        assert np.abs(a - b).max() <= tolerance * scale, (
            jax.tree_util.keystr(path),
            np.abs(a - b).max(),
            scale,
        )

    jax.tree_util.tree_map_with_path(compare, ours, expected)
