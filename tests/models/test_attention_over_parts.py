"""Devices that hold parts of packed rows compute the attention of whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from attention_inputs import OPTIONS, make_inputs
from jax_ppo.models import attention, heads
from jax_ppo.models.transformer import Transformer
from jax_ppo.training import packing
from jax_ppo.types import Packing


def split_and_join(rows, length, parts):
    """Return a function that splits arrays [R, L, ...] over devices, and its inverse."""
    columns = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    row_of_column = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], (rows, length))
    place = packing.split_columns(Packing(sample=row_of_column, position=columns), 1, parts)

    def split(x):
        return x[place.sample, place.position]

    def join(x):
        return (
            jnp.zeros((rows, length, *x.shape[2:]), x.dtype).at[place.sample, place.position].set(x)
        )

    return split, join


def run_over_parts(program, mesh, q, k, v, segments, **options):
    """Return the attention of whole rows, of which the devices of `mesh` hold parts."""
    rows, length = segments.shape
    split, join = split_and_join(rows, length, mesh.shape["context"])
    parts = map(split, (q, k, v, segments))
    return join(attention.run_attention_over_parts(program, *parts, **options))


def output_and_gradient(attend, inputs):
    """Return the attention, and the gradients of a loss of the tokens that are read."""
    *qkv, segments = inputs

    def loss(*x):
        out = attend(*x, segments)
        return jnp.sum(jnp.sin(out) * (segments >= 0)[..., None, None]), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*qkv)
    return out, gradients


def assert_devices_agree_with_whole_rows(program, mesh, inputs, **options):
    with jax.set_mesh(mesh):
        ours, our_gradients = output_and_gradient(
            lambda *x: run_over_parts(program, mesh, *x, **options), inputs
        )
    expected, gradients = output_and_gradient(
        lambda *x: attention.xla_attention(
            *x, **{name: value for name, value in options.items() if name != "interpret"}
        ),
        inputs,
    )
    is_read = np.asarray(inputs[-1]) >= 0
    np.testing.assert_allclose(ours[is_read], expected[is_read], atol=1e-5)
    for one, other in zip(our_gradients, gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("options", [OPTIONS[3], pytest.param({}, marks=pytest.mark.exhaustive)])
def test_parts_of_rows_attend_to_their_samples_in_the_whole_row(options):
    """Three samples in rows of 64 tokens lie across the blocks of 8 of four devices."""
    mesh = tiny.make_mesh(8, data=1, context=4, model=2)
    assert_devices_agree_with_whole_rows("xla", mesh, make_inputs(length=64), **options)


def test_parameters_are_created_where_rows_have_parts():
    """One token, from which they are created, has no parts."""
    create = functools.partial(heads.init_params, Transformer(tiny.ARCHITECTURE), head="lm")
    expected = jax.eval_shape(create, jax.random.key(0))
    with jax.set_mesh(tiny.make_mesh(8, data=1, context=8)):
        shapes = jax.eval_shape(create, jax.random.key(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, expected)


def test_cudnn_reads_the_mask_of_a_part(cudnn_anywhere):
    mesh = tiny.make_mesh(2, data=1, context=2)
    assert_devices_agree_with_whole_rows("cudnn", mesh, make_inputs(length=16), sliding_window=5)


@pytest.mark.slow
def test_splash_reads_the_mask_of_a_part():
    """The kernel's Python code, for two devices of two mirrored blocks of 64 columns each."""
    mesh = tiny.make_mesh(2, data=1, context=2)
    inputs = make_inputs(rows=1, length=256, heads=2, kv_heads=1)
    for options in ({}, {"sliding_window": 100, "softcap": 5.0}):
        assert_devices_agree_with_whole_rows("splash", mesh, inputs, interpret=True, **options)
