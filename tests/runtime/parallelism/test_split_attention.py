"""Heads that `mesh.model` does not divide: same values and gradients, same parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from hlo import read_collectives
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.parallelism.split_attention import (
    copy_kv_heads,
    drop_padded_heads,
    num_split_kv_heads,
    pad_query_heads,
)

# Three queries per key head, as Qwen2.5-0.5B has seven: an odd number, which four devices pad.
ARCHITECTURE = dataclasses.replace(
    tiny.ARCHITECTURE, num_heads=6, num_kv_heads=2, qkv_bias=True, qk_norm=True, num_layers=2
)
R, L = 8, 12


@pytest.mark.parametrize(
    ("heads", "kv_heads", "parts", "padded"),
    [(14, 2, 4, 16), (28, 4, 8, 32), (6, 2, 4, 8), (6, 1, 4, 8), (12, 6, 4, 12), (16, 2, 8, 16)]
    + [(4, 1, 4, 4), (4, 2, 4, 4)],
)
def test_padded_query_heads_read_the_same_key_head(heads, kv_heads, parts, padded):
    queries = np.arange(1.0, heads + 1)[None, None, :, None] * np.ones((2, 3, 1, 2))
    keys = np.arange(kv_heads)[None, None, :, None] * np.ones((2, 3, 1, 2))

    def pad(queries, keys):
        more = pad_query_heads(queries, kv_heads)
        return more, copy_kv_heads(keys), drop_padded_heads(more, heads, kv_heads)

    with jax.set_mesh(tiny.make_mesh(8, model=parts)):
        more, copied, dropped = (np.asarray(x) for x in jax.jit(pad)(queries, keys))
        assert copied.shape[2] == num_split_kv_heads(kv_heads)
    assert more.shape[2] == padded and padded % parts == copied.shape[2] % parts == 0
    np.testing.assert_array_equal(dropped, queries)
    group = padded // copied.shape[2]
    for h, query in enumerate(more[0, 0, :, 0]):
        if query:
            read = copied[0, 0, h // group, 0]
            assert read == (int(query) - 1) // (heads // kv_heads)


def test_without_a_mesh_nothing_is_padded():
    queries = jnp.ones((2, 3, 6, 4))
    assert pad_query_heads(queries, 2) is queries
    assert drop_padded_heads(queries, 6, 2) is queries


def gradient(params, tokens, slope):
    """Return hidden states and the gradient of a sum of them over two segments per row."""
    positions = np.tile(np.arange(L) % (L // 2), (len(tokens), 1))
    segments = np.tile(np.arange(L) // (L // 2), (len(tokens), 1))

    def loss(params):
        out = Transformer(ARCHITECTURE).apply({"params": params}, tokens, positions, segments)
        return jnp.sum(out.hidden * slope), out.hidden

    gradients, hidden = jax.grad(loss, has_aux=True)(params)
    return hidden, gradients


def inputs():
    r = np.random.default_rng(0)
    params = tiny.random_params(ARCHITECTURE, 0, 0, "lm")
    tokens = r.integers(0, ARCHITECTURE.vocab_size, (R, L)).astype(np.int32)
    return params, tokens, r.normal(size=(R, L, ARCHITECTURE.hidden_size)).astype(np.float32)


def compile_on_mesh(mesh):
    """Return the compiled gradient, laid out as in training, and its arguments."""
    params, tokens, slope = inputs()
    layout = sharding.tree_shardings(mesh, params, sharding.TRAIN_RULES)
    rows = sharding.rows(mesh)
    arguments = (
        jax.device_put(params, layout),
        *(placement.place(x, rows) for x in (tokens, slope)),
    )
    with jax.set_mesh(mesh):
        program = jax.jit(gradient, out_shardings=(rows, layout))
        return program.lower(*arguments).compile(), arguments


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"data": 2, "model": 4}, {"fsdp": 2, "model": 4}], ids=str)
def test_padded_heads_change_neither_values_nor_gradients(shape):
    mesh = tiny.make_mesh(8, **{"data": 1} | shape)
    compiled, arguments = compile_on_mesh(mesh)
    expected = jax.jit(gradient)(*inputs())
    ours = compiled(*arguments)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        # Eight heads, which need no padding, differ by 2.4e-5 of the largest value on this mesh.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max())


def test_no_gather_brings_the_queries_of_all_heads_together():
    mesh = tiny.make_mesh(8, data=2, model=4)
    compiled, _ = compile_on_mesh(mesh)
    collectives = read_collectives(compiled.as_text())
    # In float32, of a device's rows, padded to 8 heads.
    queries = 4 * (R // 2) * L * 8 * ARCHITECTURE.head_dim
    gathers = [x for x in collectives if x.kind in ("all-gather", "all-to-all")]
    assert gathers
    assert max(x.bytes for x in gathers) <= queries // 2
