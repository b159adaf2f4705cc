"""What a state is made of when a run goes on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import tiny
from jax_ppo import state as state_lib


def test_a_state_from_a_checkpoint_is_the_one_that_was_saved():
    """Parameters, optimizers, the coefficient where its controller left it, and the step."""
    config, mesh = tiny.config(algorithm__use_reference=False), tiny.make_mesh()
    with jax.set_mesh(mesh):
        before = tiny.make_state(config, mesh)
        before = dataclasses.replace(before, step=jnp.int32(7), control=dataclasses.replace(
            before.control, kl_coef=jnp.float32(0.75)))
        folders = state_lib.Folders(None, None, None)
        after = state_lib.create(config, tiny.networks(config), folders, mesh, None, state_lib.trained(before), 7)
    assert (int(after.step), float(after.control.kl_coef)) == (7, 0.75)
    for name in ("actor", "critic", "actor_optimizer", "critic_optimizer"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
