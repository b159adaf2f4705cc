"""Gradients that the backward loop over layers adds to a sum: their values and their memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.models.transformer import MAX_UNROLLED_LAYERS, Transformer
from jax_ppo.training.learner import add_gradient
from jax_ppo.training.stochastic_rounding import zero_gradients

TOKENS = np.arange(12).reshape(2, 6) % 32
POSITIONS = np.broadcast_to(np.arange(6), (2, 6))


def make_model(num_layers, **changes):
    architecture = dataclasses.replace(tiny.ARCHITECTURE, num_layers=num_layers, **changes)
    params = tiny.random_params(architecture, 0, 0, "lm")
    return Transformer(architecture, remat=True), params


def loss(model, params, tokens=TOKENS):
    hidden = model.apply({"params": params}, tokens, POSITIONS).hidden
    return jnp.sum(jnp.sin(hidden)), hidden.mean()


@pytest.mark.parametrize(
    "num_layers", [pytest.param(2, marks=pytest.mark.exhaustive), MAX_UNROLLED_LAYERS + 1]
)
def test_the_sum_is_that_of_the_gradients(num_layers):
    """With layers of two kinds, unrolled and in a loop."""
    is_local = tuple(i % 2 == 0 for i in range(num_layers))
    model, params = make_model(num_layers, sliding_window=3, local_layers=is_local)
    total = jax.tree.map(lambda x: jnp.asarray(x) / 3, params)
    of_params = functools.partial(loss, model)
    summed, mean = jax.jit(lambda p, t: add_gradient(of_params, p, t, None))(params, total)
    gradients, expected_mean = jax.jit(jax.grad(of_params, has_aux=True))(params)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-6)
    expected = jax.tree.map(jnp.add, total, gradients)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), summed, expected)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", marks=pytest.mark.slow),
    ],
)
def test_layers_have_no_gradient_beside_the_sum(dtype):
    """Three micro-batches, in a loop over layers, as deep models have."""
    model, params = make_model(MAX_UNROLLED_LAYERS + 1, hidden_size=64, intermediate_size=256)
    key = None if dtype == "float32" else jax.random.key(0)

    def temporary_bytes(trains_layers):
        def sum_gradients(params):
            def micro_batch(i, total):
                of_params = functools.partial(loss, model, tokens=TOKENS + i)
                return add_gradient(of_params, params, total, key, trains_layers)[0]

            return jax.lax.fori_loop(0, 3, micro_batch, zero_gradients(params, dtype))

        compiled = jax.jit(sum_gradients).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    tree = sum(x.nbytes for x in jax.tree.leaves(params["layers"]))
    assert temporary_bytes(trains_layers=False) - temporary_bytes(trains_layers=True) > 0.9 * tree
