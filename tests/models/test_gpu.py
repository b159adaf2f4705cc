"""On an NVIDIA GPU, cuDNN's kernels compute what XLA's programs do, as exactly.

Run with `JAX_PLATFORMS=cuda,cpu python -m pytest tests/models/test_gpu.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.models import attention, cache

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")

ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 4, 256, 14, 2, 64


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def relative_error(result, expected):
    result, expected = (np.asarray(x, np.float32) for x in (result, expected))
    return np.linalg.norm(result - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("length", "packed", "options"),
    [
        (LENGTH, False, {}),
        (LENGTH, False, {"sliding_window": 40}),
        (LENGTH, True, {"sliding_window": 40}),
        (LENGTH, True, {"scale": 0.1}),
        # Blocks of 512 queries, the last with two further keys.
        (1216, True, {}),
        (1216, True, {"sliding_window": 200}),
    ],
)
def test_cudnn_and_its_gradients_are_as_exact_as_xla(length, packed, options):
    """Both in bfloat16, against XLA in float32 with exact products."""
    q, k, v = (draw(ROWS, length, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    segments = None
    if packed:
        segments = jnp.broadcast_to(jnp.arange(length) // 100, (ROWS, length))
    weights = draw(ROWS, length, HEADS, WIDTH)

    @functools.partial(jax.jit, static_argnums=0)
    def run(program, *arrays):
        def loss(*arrays):
            out = attention.run_attention(program, *arrays, segments, **options)
            return (out.astype(jnp.float32) * weights).sum(), out

        gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
        return out, *gradients

    with jax.default_matmul_precision("highest"):
        exact = run("xla", q, k, v)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    for cudnn, xla, expected in zip(
        run("cudnn", *rounded), run("xla", *rounded), exact, strict=True
    ):
        assert relative_error(cudnn, expected) < max(0.01, 1.5 * relative_error(xla, expected))


def test_gradients_are_finite_where_all_scores_are_low():
    """All scores are near -120, and there are 64 keys more than a multiple of 128."""
    q, k, v = (draw(1, 192, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q[..., 0], k[..., 0] = 1, -120 * WIDTH**0.5
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    segments = jnp.zeros((1, 192), jnp.int32)

    def loss(*arrays):
        return attention.run_attention("cudnn", *arrays, segments).astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in gradients)


@pytest.mark.parametrize("program", ["gpu", "cudnn"])
def test_a_token_reads_the_cache_as_on_a_cpu(program):
    q = draw(ROWS, 1, HEADS, WIDTH)
    k, v = draw(ROWS, LENGTH, KV_HEADS, WIDTH), draw(ROWS, LENGTH, KV_HEADS, WIDTH)[::-1].copy()
    columns = jnp.array([0, 1, 100, LENGTH - 1])
    with jax.default_matmul_precision("highest"):
        expected = cache.attend_to_cache("tpu", q, cache.cache_layout("tpu", k, v), columns)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    out = cache.attend_to_cache(program, q, cache.cache_layout(program, k, v), columns)
    assert relative_error(out, expected) < 0.01
