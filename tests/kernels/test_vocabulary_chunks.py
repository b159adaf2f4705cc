"""What log-probs and KL share: the soft cap, chunks of positions, and one exchange of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import vocabulary_chunks
from jax_ppo.kernels.logprobs import token_logprobs
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.kernels.vocabulary_chunks import LogitOptions, softcap, softcap_slope
from jax_ppo.kernels.vocabulary_kl import full_kl


def sum_logprobs(options, hidden, unembedding, mask, targets):
    return sum(x.sum() for x in token_logprobs(hidden, unembedding, targets, mask, options))


def sum_kl(options, hidden, unembedding, mask, ref_hidden, ref_unembedding):
    return full_kl(hidden, unembedding, ref_hidden, ref_unembedding, mask, options).sum()


def compile_gradient(loss, shape, chunk_size=0, rows=None, whole=None):
    """Compile a loss's gradient for G groups of P places, width D and V tokens, without running."""
    G, P, D, V = shape
    hidden = jax.ShapeDtypeStruct((G, P, D), jnp.float32, sharding=rows)
    unembedding = jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=whole)
    mask, targets = (
        jax.ShapeDtypeStruct((G, P), dtype, sharding=rows) for dtype in (bool, jnp.int32)
    )
    others = (hidden, unembedding) if loss is sum_kl else (targets,)
    options = LogitOptions(1.0, chunk_size=chunk_size)
    gradient = jax.jit(
        jax.grad(functools.partial(loss, options), (0, 1)),
        out_shardings=None if rows is None else (rows, whole),
    )
    return gradient.lower(hidden, unembedding, mask, *others).compile()


def test_a_soft_cap_by_hand():
    # tanh(1/2) = 0.4621: 2 becomes 4 x 0.4621 = 1.8485 under a cap of 4, with slope
    # 1 - 0.4621^2 = 0.7864.
    capped, slope = softcap(jnp.array([2.0, -2.0, 0]), 4.0), softcap_slope(1.848469, 4.0)
    np.testing.assert_allclose(capped, [1.8485, -1.8485, 0], atol=5e-5)
    np.testing.assert_allclose([slope, softcap_slope(0.0, 4.0)], [0.7864, 1], atol=5e-5)
    np.testing.assert_array_equal(softcap(jnp.array([1e30, -1e30]), 30.0), [30, -30])
    assert softcap(7.0, None) == 7.0 and softcap_slope(7.0, None) == 1.0


def test_work_follows_the_mask():
    """The fullest group sets the number of chunks: 3 positions in chunks of 2 need two."""
    mask = jnp.array([[0, 1, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1]], bool)
    assert int(vocabulary_chunks.MaskedChunks(mask, 2).count) == 2
    assert int(vocabulary_chunks.MaskedChunks(~mask, 2).count) == 4
    assert int(vocabulary_chunks.MaskedChunks(mask & False, 2).count) == 0


@pytest.mark.parametrize(
    ("platform", "vocabulary", "size"),
    # 2^29 bytes hold the logits of 883, 4194 and 128 positions; on a CPU, 2^22 bytes those of 255.
    [("gpu", 151_936, 1024), ("tpu", 32_000, 4096), ("gpu", 2**20, 128), ("cpu", 4107, 255)],
)
def test_chunks_on_accelerators_are_powers_of_two(platform, vocabulary, size):
    """Rows and responses of 512 or 1024 tokens then leave no part of a chunk empty."""
    with assume_platform(platform):
        assert vocabulary_chunks.default_chunk_size(vocabulary) == size


@pytest.mark.parametrize(
    ("loss", "distributions", "vocabulary", "width"),
    [
        (sum_logprobs, 1, 4096, 16),
        (sum_logprobs, 1, 151_936, 8),
        pytest.param(sum_kl, 2, 4096, 16, marks=pytest.mark.exhaustive),
        (sum_kl, 2, 151_936, 8),
    ],
)
def test_never_holds_places_by_vocabulary(loss, distributions, vocabulary, width):
    """Neither the logits nor one unembedding gradient per chunk are held in memory."""
    places = 64 * vocabulary_chunks.default_chunk_size(distributions * vocabulary)
    whole = 4 * places * vocabulary  # bytes of the logits of a distribution in float32

    def temporaries(places, chunk_size=0):
        compiled = compile_gradient(loss, (1, places, width, vocabulary), chunk_size)
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries(places // 4), temporaries(places)
    assert long < 1.25 * short and long < whole / 8, (short, long, whole)
    # The measure sees what it is meant to see.
    assert temporaries(places, chunk_size=10**9) > distributions * whole


@pytest.mark.parametrize(("loss", "devices"), [(sum_logprobs, 1), (sum_logprobs, 8), (sum_kl, 8)])
def test_devices_exchange_the_gradient_once(loss, devices):
    """The unembedding's gradient is summed over devices after the loop over chunks, not in it."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("data",), automatic, devices=jax.devices()[:devices])
    rows, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (("data",), ())
    )
    text = compile_gradient(loss, (8, 32, 16, 64), 4, rows, whole).as_text()
    sums = [line for line in text.splitlines() if " all-reduce(" in line and "f32" in line]
    assert len(sums) == (devices > 1) and " all-gather(" not in text
    assert all("while" not in line for line in sums), sums
