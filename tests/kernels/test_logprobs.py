import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_ppo.config.schema import MeshShape
from jax_ppo.kernels import logprobs as kernel
from jax_ppo.kernels.vocabulary_chunks import LogitOptions
from jax_ppo.runtime.meshes import make_mesh

jitted = jax.jit(kernel.token_logprobs, static_argnames=("options", "with_entropy"))


def token_logprobs(
    hidden, unembedding, targets, temperature, chunk_size=0, with_entropy=True, mask=None, cap=None
):
    """Compute log-probs at all positions if no mask is passed."""
    mask = jnp.ones(targets.shape, bool) if mask is None else mask
    options = LogitOptions(temperature, cap, chunk_size=chunk_size)
    return jitted(hidden, unembedding, targets, mask, options, with_entropy)


def naive(hidden, unembedding, targets, temperature, cap=None):
    """Compute the definition in float32, with all logits at once."""
    logits = hidden @ unembedding.T
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    log_p = jax.nn.log_softmax(logits / temperature)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    return jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0], entropy


def inputs(rng, rows, length, width, vocabulary):
    hidden = rng.normal(0, 1, (rows, length, width)).astype(np.float32)
    unembedding = rng.normal(0, 1, (vocabulary, width)).astype(np.float32)
    return hidden, unembedding, rng.integers(0, vocabulary, (rows, length))


def test_by_hand():
    # The logits are the hidden state itself: (ln 3, 0) at T = 1 is p = (3/4, 1/4),
    # entropy 3/4 ln 4/3 + 1/4 ln 4 = 0.5623.
    # At T = 1/2 the odds are squared: p = (9/10, 1/10), entropy 0.3251.
    hidden = jnp.full((1, 2, 2), jnp.array([math.log(3), 0.0]))
    targets = jnp.array([[0, 1]])
    logprobs, entropy = token_logprobs(hidden, jnp.eye(2), targets, 1.0)
    np.testing.assert_allclose(np.exp(logprobs), [[0.75, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(entropy, [[0.5623, 0.5623]], atol=5e-5)
    logprobs, entropy = token_logprobs(hidden, jnp.eye(2), targets, 0.5)
    np.testing.assert_allclose(np.exp(logprobs), [[0.9, 0.1]], rtol=1e-6)
    np.testing.assert_allclose(entropy, [[0.3251, 0.3251]], atol=5e-5)


@pytest.mark.parametrize(
    ("chunk_size", "of_entropy", "cap"),
    [
        *itertools.product([3, 4, 128], [0.0, 1.0], [None]),
        # The standard deviation of the logits equals the cap.
        *itertools.product([3, 128], [1.0], [2.0]),
    ],
)
def test_gradient_is_that_of_the_definition(chunk_size, of_entropy, cap, rng):
    hidden, unembedding, targets = inputs(rng, 2, 7, 4, 11)
    weights = (
        rng.normal(0, 1, (2, 2, 7)).astype(np.float32)
        * np.array([1, of_entropy], np.float32)[:, None, None]
    )
    mask = np.array([[1, 0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0]], bool)

    def loss(score, hidden, unembedding):
        logprobs, entropy = score(hidden, unembedding)
        entropy = entropy if of_entropy else jax.lax.stop_gradient(entropy)
        return jnp.sum(jnp.where(mask, weights[0] * logprobs + weights[1] * entropy, 0))

    def ours(hidden, unembedding):
        return token_logprobs(hidden, unembedding, targets, 0.7, chunk_size, True, mask, cap)

    def definition(hidden, unembedding):
        return naive(hidden, unembedding, targets, 0.7, cap)

    (got, gradients), (expected, exact) = (
        jax.value_and_grad(functools.partial(loss, score), (0, 1))(hidden, unembedding)
        for score in (ours, definition)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    for one, other in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_gradient_in_bfloat16(rng):
    """Products of rounded factors with float32 sums: within 2^-8 of the float32 gradient."""
    hidden, unembedding, targets = inputs(rng, 2, 40, 16, 50)

    def gradients(hidden):
        return jax.grad(
            lambda h, u: sum(x.sum() for x in token_logprobs(h, u, targets, 1.0, 8)), (0, 1)
        )(hidden, unembedding)

    low, exact = gradients(jnp.asarray(hidden, jnp.bfloat16)), gradients(jnp.asarray(hidden))
    assert [x.dtype for x in low] == [jnp.bfloat16, jnp.float32]
    for one, other in zip(low, exact, strict=True):
        assert np.abs(one - other).max() < 0.03 * np.abs(other).max()


@pytest.mark.parametrize("chunk_size", [3, 128])
def test_without_entropy(chunk_size, rng):
    hidden, unembedding, targets = inputs(rng, 2, 7, 4, 11)
    logprobs, entropy = token_logprobs(
        hidden, unembedding, targets, 1.0, chunk_size, with_entropy=False
    )
    assert entropy is None
    np.testing.assert_array_equal(
        logprobs, token_logprobs(hidden, unembedding, targets, 1.0, chunk_size)[0]
    )


def test_entropy_is_never_negative_nor_logprob_positive(rng):
    """Peaked distributions with large logits, where logsumexp(z) - E[z] rounds below 0."""
    hidden, unembedding, targets = inputs(rng, 4, 50, 8, 20)
    for scale in (10.0, 100.0, 1000.0):
        logprobs, entropy = token_logprobs(scale * hidden, unembedding, targets, 1.0, 16)
        assert entropy.min() >= 0 and logprobs.max() <= 0
        assert np.isfinite(logprobs).all() and np.isfinite(entropy).all()
    _, entropy = token_logprobs(0 * hidden, unembedding, targets, 1.0, 16)
    np.testing.assert_allclose(entropy, math.log(20), rtol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the library of XLA for CPUs")
def test_the_entropy_is_summed_by_a_loop(rng):
    """XLA's library for CPUs takes four times as long for a sum of products as for a plain sum."""
    hidden, unembedding, targets = inputs(rng, 1, 256, 4, 4096)
    arguments = (hidden, unembedding, targets, jnp.ones(targets.shape, bool), LogitOptions(1.0))
    text = jitted.lower(*arguments, with_entropy=True).compile().as_text()
    names = re.findall(r"kind=kCustom, calls=%([\w.\-]+)", text)
    bodies = [text.split(f"%{name} (", 1)[1].split("\n}", 1)[0] for name in names]
    sums = [body for body in bodies if " reduce(" in body]
    assert sums and not any(" multiply(" in body for body in sums)


def test_bfloat16_hidden_still_gives_float32_logits(rng):
    """Rounded to bfloat16, logits near 100 are off by up to 0.25."""
    hidden, unembedding, targets = inputs(rng, 1, 6, 4, 8)
    rounded = [jnp.asarray(x).astype(jnp.bfloat16) for x in (30 * hidden, unembedding)]
    logprobs, _ = token_logprobs(rounded[0], unembedding, targets, 1.0, 4)
    exact, _ = token_logprobs(*(x.astype(jnp.float32) for x in rounded), targets, 1.0, 4)
    assert logprobs.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, exact, rtol=1e-4, atol=1e-4)


def test_gradient_of_the_master_is_summed_in_float32(rng):
    """Summed in bfloat16 over 1024 chunks, equal addends stop counting after 256 of them."""
    hidden, targets = jnp.ones((1, 1024, 2), jnp.bfloat16), jnp.zeros((1, 1024), jnp.int32)
    loss = lambda u: token_logprobs(hidden, u, targets, 1.0, 1, with_entropy=False)[0].sum()  # noqa: E731
    gradient = jax.grad(loss)(jnp.zeros((2, 2)))
    # p = 1/2 throughout: every position adds 1 - 1/2 to the row of the target, -1/2 to the other.
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, [[512, 512], [-512, -512]], rtol=1e-3)


def test_wrong_shapes_are_refused():
    hidden, ones = jnp.ones((2, 3, 4)), functools.partial(jnp.ones, dtype=int)
    for unembedding, targets, mask in (
        ((5, 4), (2, 4), (2, 4)),
        ((5, 4), (2, 3), (2, 4)),
        ((4, 5), (2, 3), (2, 3)),
    ):
        with pytest.raises(AssertionError):
            token_logprobs(hidden, jnp.ones(unembedding), ones(targets), 1.0, mask=ones(mask))


@pytest.mark.parametrize("cap", [None, 2.0])
def test_ids_beyond_the_last_are_as_if_they_had_no_rows(cap, rng):
    hidden, unembedding, targets = inputs(rng, 2, 5, 4, 7)
    mask, slope = np.ones((2, 5), bool), rng.normal(size=(2, 2, 5))
    padded = np.concatenate([unembedding, 9 * unembedding[:3]])

    @functools.partial(jax.jit, static_argnames="num_ids")
    def weighted(hidden, unembedding, num_ids):
        results = kernel.token_logprobs(
            hidden, unembedding, targets, mask, LogitOptions(0.7, cap, num_ids, chunk_size=3)
        )
        return jnp.sum(slope * jnp.stack(results))

    ours, (hidden_grad, weight_grad) = jax.value_and_grad(weighted, (0, 1))(hidden, padded, 7)
    expected, gradients = jax.value_and_grad(weighted, (0, 1))(hidden, unembedding, None)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(hidden_grad, gradients[0], atol=1e-5)
    np.testing.assert_allclose(weight_grad[:7], gradients[1], atol=1e-5)
    np.testing.assert_array_equal(weight_grad[7:], 0)


def test_devices_that_split_the_vocabulary_leave_out_the_same_ids(rng):
    """Of twelve rows on four devices, the last device has none of seven ids, and the third one."""
    hidden, unembedding, targets = inputs(rng, 1, 5, 4, 12)
    targets %= 7
    mesh = make_mesh(MeshShape(model=4), jax.devices()[:4])
    split = jax.device_put(unembedding, NamedSharding(mesh, PartitionSpec("model", None)))
    results = []
    for weight in (split, unembedding):
        with jax.set_mesh(mesh):
            results.append(
                jitted(hidden, weight, targets, np.ones((1, 5), bool), LogitOptions(1.0, num_ids=7))
            )
    expected = naive(hidden, unembedding[:7], targets, 1.0)
    for result in results:
        np.testing.assert_allclose(result, expected, atol=1e-5)
