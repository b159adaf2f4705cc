"""What devices exchange in a pass over packed rows, counted in the compiled programs.

The CPU's compiler leaves the gather of an unembedding and the exchange of its gradient in the loop
over micro-batches. The TPU's moves the gather out of it; what it makes of the exchange is in
docs/development/decisions.md ("Embeddings under `mesh.fsdp`").
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from hlo import read_collectives
from jax_ppo.kernels import logprobs, vocabulary_chunks, vocabulary_kl
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.meshes import WEIGHTS
from jax_ppo.runtime.parallelism.vocabulary import (
    TPU_LANES,
    look_up_embedding,
    scatter_columns_for_tpu,
)
from jax_ppo.training import forward, packing

G, N, V, D, CHUNK = 8, 12, 96, 16, 4


def inputs() -> tuple[np.ndarray, ...]:
    r = np.random.default_rng(0)
    return (
        r.normal(size=(G, N, D)).astype(np.float32),
        r.normal(size=(V, D)).astype(np.float32),
        r.integers(0, V, (G, N)).astype(np.int32),
        r.random((G, N)) < 0.7,
    )


def options(layout):
    return vocabulary_chunks.LogitOptions(0.7, layout=layout, chunk_size=CHUNK)


def summed_logprobs(layout, dtype, hidden, unembedding, targets, mask):
    values, entropy = logprobs.token_logprobs(
        hidden.astype(dtype), unembedding, targets, mask, options(layout)
    )
    return values.sum() + 0.1 * entropy.sum()


def summed_kl(layout, dtype, hidden, unembedding, targets, mask):
    hidden = hidden.astype(dtype)
    reference = jax.lax.stop_gradient(1.3 * unembedding)
    return vocabulary_kl.full_kl(
        hidden, unembedding, hidden, reference, mask, options(layout)
    ).sum()


def compile_gradient(loss, mesh, dtype=jnp.bfloat16):
    """Return the compiled gradient by hidden states and unembedding, and its arguments."""
    columns = jax.NamedSharding(mesh, jax.P("model", "fsdp"))
    hidden, unembedding, targets, mask = inputs()
    rows = sharding.rows(mesh)
    arguments = (
        placement.place(hidden, rows),
        placement.place(unembedding, columns),
        *(placement.place(x, rows) for x in (targets, mask)),
    )
    gradient = jax.grad(functools.partial(loss, forward.UNEMBEDDING, dtype), argnums=(0, 1))
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradient, out_shardings=(rows, columns)).lower(*arguments).compile()
    return compiled, arguments


@pytest.mark.parametrize(("loss", "gathers"), [(summed_logprobs, 2), (summed_kl, 4)])
def test_the_unembedding_is_gathered_once_per_pass_and_its_gradient_scattered_once(loss, gathers):
    """Forward and backward gather each unembedding once: none is gathered per chunk of logits."""
    compiled, _ = compile_gradient(loss, tiny.make_mesh(8, data=1, fsdp=8))
    collectives = read_collectives(compiled.as_text())
    gathered = [x for x in collectives if x.kind == "all-gather" and x.bytes >= 2 * V * D]
    assert 1 <= len(gathered) <= gathers
    assert {(x.loops, x.shapes[0][-2:]) for x in gathered} == {(0, (V, D))}
    scattered = [x for x in collectives if x.kind == "reduce-scatter"]
    assert [(x.loops, x.bytes) for x in scattered] == [(0, 4 * V * D // 8)]
    # Nothing else of the size of a vocabulary moves.
    others = [x for x in collectives if x not in gathered + scattered]
    assert all(x.bytes <= 4 * G * N for x in others), others


def test_copies_of_the_parameters_exchange_only_their_columns_of_the_gradient():
    compiled, _ = compile_gradient(summed_logprobs, tiny.make_mesh(8, data=2, fsdp=4))
    collectives = read_collectives(compiled.as_text())
    of_gradient = [x for x in collectives if x.kind in ("reduce-scatter", "all-reduce")]
    of_gradient = [x for x in of_gradient if x.bytes > 4 * G * N]
    assert {x.bytes for x in of_gradient} == {4 * V * D // 4}


def test_tensor_parallel_chunks_exchange_no_logits():
    compiled, _ = compile_gradient(summed_logprobs, tiny.make_mesh(8, data=1, fsdp=2, model=4))
    in_loops = [x for x in read_collectives(compiled.as_text()) if x.loops]
    assert in_loops
    # Sums over the vocabulary are numbers per position; the hidden states' gradient has D.
    assert max(x.bytes for x in in_loops) <= 4 * (G // 2) * CHUNK * D


@pytest.mark.parametrize("loss", [summed_logprobs, summed_kl])
@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "model": 2}], ids=str)
def test_a_split_unembedding_has_the_gradient_of_a_whole_one(loss, shape):
    compiled, arguments = compile_gradient(
        loss, tiny.make_mesh(8, **{"data": 1} | shape), jnp.float32
    )
    whole = functools.partial(loss, vocabulary_chunks.UnembeddingLayout(), jnp.float32)
    expected = jax.jit(jax.grad(whole, argnums=(0, 1)))(*inputs())
    for one, other in zip(compiled(*arguments), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"fsdp": 2, "context": 4}], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [64, 8 * TPU_LANES])
def test_columns_of_a_tpu_are_summed_in_float32(shape, dtype, width):
    """Parts of any width; only those that do not fill the lanes are rounded when they are sent."""
    parts = np.random.default_rng(0).normal(size=(8, V, width)).astype(np.float32)
    mesh = tiny.make_mesh(8, data=1, **shape)
    with jax.set_mesh(mesh):
        scatter = jax.shard_map(
            lambda part: scatter_columns_for_tpu(part[0], dtype),
            in_specs=jax.P(WEIGHTS),
            out_specs=jax.P(None, WEIGHTS),
            check_vma=False,
        )
        columns = jax.jit(scatter)(placement.place(parts, sharding.rows(mesh)))
    sent = parts
    if width == 64:
        sent = parts.astype(dtype).astype(np.float32)
    np.testing.assert_allclose(columns, sent.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [{"fsdp": 8}, {"data": 2, "fsdp": 2, "model": 2}, {"model": 8}, {"data": 2, "fsdp": 4}],
    ids=str,
)
def test_embeddings_are_looked_up_without_a_copy_of_the_table(shape):
    """Rows [8, 12] of a table [4096, 16]: what moves has the size of the rows, not the table's."""
    V, D, L = 4096, 16, 12
    r = np.random.default_rng(0)
    table, tokens = r.normal(size=(V, D)).astype(np.float32), r.integers(0, V, (8, L))
    # Ids at the borders of what one device holds.
    tokens[:, :4] = [0, V // 8 - 1, V // 8, V - 1]
    slope = r.normal(size=(8, L, D)).astype(np.float32)

    def look_up(table, tokens, slope):
        out = look_up_embedding(table, tokens, jnp.bfloat16)
        return jnp.sum(out.astype(jnp.float32) * slope), out

    gradient = jax.grad(look_up, has_aux=True)
    expected_gradient, expected = jax.jit(gradient)(table, tokens, slope)
    mesh = tiny.make_mesh(8, **{"data": 1} | shape)
    layout = jax.NamedSharding(mesh, jax.P("model", "fsdp"))
    rows = sharding.rows(mesh)
    arguments = (
        placement.place(table, layout),
        *(placement.place(x, rows) for x in (tokens, slope)),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradient, out_shardings=(layout, rows)).lower(*arguments).compile()
    ours_gradient, ours = compiled(*arguments)
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_allclose(ours_gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    # Only copies of the parameters exchange a table: their own part of its gradient.
    own_bytes = 4 * V * D // (mesh.shape["fsdp"] * mesh.shape["model"])
    sizes = [x.bytes for x in read_collectives(compiled.as_text())]
    tables = [size for size in sizes if size > 4 * 8 * L * D]
    assert tables == ([own_bytes] if mesh.shape["data"] > 1 else [])
    assert sizes


def test_parts_of_rows_exchange_keys_and_values_alone():
    """Two layers on rows of 256 tokens in 8 parts: no device receives the row's hidden states."""
    L, parts = 256, 8
    architecture = dataclasses.replace(tiny.ARCHITECTURE, num_layers=2)
    model = Transformer(architecture)
    mesh = tiny.make_mesh(8, data=1, context=parts)
    params = dict(tiny.random_params(architecture, 0, 0, "lm"))
    params = jax.device_put(params, sharding.tree_shardings(mesh, params, sharding.TRAIN_RULES))
    tokens = np.arange(L, dtype=np.int32).reshape(parts, -1)
    rows = placement.place(
        packing.Rows(
            tokens=tokens % 32,
            positions=tokens,
            segments=tokens // 100,
            targets=tokens % 31,
            samples=tokens * 0,
            steps=tokens * 0,
            mask=tokens >= 0,
        ),
        sharding.rows(mesh),
    )

    def loss(params, rows):
        hidden = forward.hidden_states(model, params, rows)
        return forward.target_logprobs(model, params, hidden, rows, 1.0)[0].sum()

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss)).lower(params, rows).compile().as_text()
    collectives = read_collectives(text)
    keys = (parts, 1, L // parts, architecture.num_kv_heads, architecture.head_dim)
    gathered = [x.shapes for x in collectives if x.kind == "all-gather"]
    scattered = [x.shapes for x in collectives if x.kind == "reduce-scatter"]
    # Keys and values of each layer, and the sums of their gradients.
    assert sum(shapes.count(keys) for shapes in gathered) == 2 * architecture.num_layers
    assert sum(shapes.count((1, *keys[1:])) for shapes in scattered) == 2 * architecture.num_layers
    sizes = [np.prod(shape) for x in collectives for shape in x.shapes]
    assert max(sizes) < L * architecture.hidden_size < L * architecture.vocab_size
