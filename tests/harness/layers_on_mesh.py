"""The gradient of layers, in rows with samples of their own, compiled for a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import tiny
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding

R, T = 16, 12
ARCHITECTURE = dataclasses.replace(tiny.ARCHITECTURE, num_layers=4, qk_norm=True, qkv_bias=True)
EXPERTS = dataclasses.replace(ARCHITECTURE, num_experts=4, experts_per_token=2)


def gradient(params, tokens, slope, *, model):
    """Return the gradient of a sum of hidden states, and the hidden states."""
    layers = np.arange(model.architecture.num_layers)[:, None, None]
    # Each row has its own segments and positions, so that rows cannot be mistaken for each other.
    cut = (np.arange(len(tokens)) % (T - 1) + 1)[:, None]
    segments = np.where(np.arange(T) < cut, 0, 1)
    positions = np.where(np.arange(T) < cut, np.arange(T), np.arange(T) - cut)

    def loss(params):
        out = model.apply({"params": params}, tokens, positions, segments)
        # Each layer's auxiliary outputs count differently, and each row's.
        losses = [jnp.sum(x * (slope[None, :, :, 0] + layers)) for x in out.auxiliary.values()]
        return jnp.sum(out.hidden * slope) + sum(losses), out.hidden

    return jax.grad(loss, has_aux=True)(params)


def inputs(architecture):
    r = np.random.default_rng(0)
    # Less far from uniform than elsewhere: gradients of four layers amplify rounding.
    params = jax.tree.map(lambda x: 0.4 * x, tiny.random_params(architecture, 0, 0, "lm"))
    tokens = r.integers(2, 32, (R, T)).astype(np.int32)
    return params, tokens, r.normal(size=(R, T, architecture.hidden_size)).astype(np.float32)


@functools.cache
def compiled_on_mesh(shape, architecture, **options):
    """Return the compiled gradient, and its arguments on the mesh."""
    mesh = tiny.make_mesh(8, **({"data": 1} | dict(shape)))
    params, *arrays = inputs(architecture)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, sharding.tree_shardings(mesh, params, sharding.TRAIN_RULES))
        arrays = jax.device_put(arrays, sharding.rows(mesh))
        run = jax.jit(
            functools.partial(gradient, model=Transformer(architecture, **options)),
            out_shardings=jax.tree.map(lambda x: x.sharding, (params, arrays[0])),
        )
        return run.lower(params, *arrays).compile(), (params, *arrays)
