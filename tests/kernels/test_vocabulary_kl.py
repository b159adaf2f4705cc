import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import vocabulary_kl as kernel
from jax_ppo.kernels.vocabulary_chunks import LogitOptions

jitted = jax.jit(kernel.full_kl, static_argnames=("options",))


def full_kl(*arrays, temperature=1.0, chunk_size=0, mask=None, cap=None):
    """Compute the KL at all positions if no mask is passed."""
    mask = jnp.ones(arrays[0].shape[:2], bool) if mask is None else mask
    return jitted(*arrays, mask, LogitOptions(temperature, cap, chunk_size=chunk_size))


def naive(hidden, unembedding, ref_hidden, ref_unembedding, temperature, cap=None):
    """Compute the definition with all logits at once, in the dtype of the arguments."""

    def log_softmax(hidden, unembedding):
        logits = hidden @ unembedding.T
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return jax.nn.log_softmax(logits / temperature)

    log_p, log_q = log_softmax(hidden, unembedding), log_softmax(ref_hidden, ref_unembedding)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def exact(*arguments):
    """Compute the definition in float64."""
    with jax.enable_x64(True):
        return np.asarray(naive(*(np.asarray(x, np.float64) for x in arguments)))


def inputs(rng, groups, places, width, ref_width, vocabulary):
    shapes = (
        (groups, places, width),
        (vocabulary, width),
        (groups, places, ref_width),
        (vocabulary, ref_width),
    )
    return [rng.normal(0, 1, shape).astype(np.float32) for shape in shapes]


MASK = np.array([[1, 0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0]], bool)


def test_by_hand():
    # p = (3/4, 1/4), q = (1/2, 1/2): 3/4 ln 3/2 + 1/4 ln 1/2 = 0.1308.
    # At T = 1/2 p = (9/10, 1/10): 0.9 ln 1.8 + 0.1 ln 0.2 = 0.3681.
    hidden, ref_hidden = jnp.array([[[math.log(3), 0.0]]]), jnp.zeros((1, 1, 2))
    for temperature, expected in ((1.0, 0.1308), (0.5, 0.3681)):
        kl = full_kl(hidden, jnp.eye(2), ref_hidden, jnp.eye(2), temperature=temperature)
        np.testing.assert_allclose(kl, [[expected]], atol=5e-5)


@pytest.mark.parametrize(
    ("chunk_size", "cap"), [(3, None), (4, None), (128, None), (3, 2.0), (128, 2.0)]
)
def test_value_and_gradient_are_those_of_the_definition(chunk_size, cap, rng, poison):
    """The reference has another width, and masked positions hold NaN."""
    arrays, weights = inputs(rng, 2, 7, 4, 6, 11), rng.normal(0, 1, (2, 7)).astype(np.float32)
    dirty = [
        poison(x, np.broadcast_to(MASK[..., None], x.shape)) if x.ndim == 3 else x for x in arrays
    ]
    options = {"temperature": 0.7, "chunk_size": chunk_size, "mask": MASK, "cap": cap}
    result = full_kl(*dirty, **options)
    assert result.dtype == jnp.float32
    truth = exact(*arrays, 0.7, *([cap] if cap else []))
    np.testing.assert_allclose(result, np.where(MASK, truth, 0), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(result[~MASK], 0)
    cotangent = np.where(MASK, weights, np.nan)

    def definition(*x):
        return jnp.sum(jnp.where(MASK, weights * naive(*x, 0.7, cap), 0))

    got = jax.grad(lambda *x: jnp.sum(cotangent * full_kl(*x, **options)), (0, 1, 2, 3))(*dirty)
    expected = jax.grad(definition, (0, 1))(*arrays)
    for one, other in zip(got, expected, strict=False):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert not got[2].any() and not got[3].any()  # the reference stays what it is


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_exactly_zero_where_actor_equals_reference(dtype, temperature, rng):
    hidden, unembedding, *_ = inputs(rng, 2, 40, 16, 1, 300)
    hidden = jnp.asarray(5 * hidden, dtype)
    value, pullback = jax.vjp(
        lambda h, u: full_kl(h, u, hidden, unembedding, temperature=temperature, chunk_size=16),
        *(hidden, unembedding),
    )
    np.testing.assert_array_equal(value, 0)
    assert not any(np.any(x) for x in pullback(jnp.ones_like(value)))


def test_a_small_kl_is_never_negative_and_keeps_its_digits(rng):
    """Logits near 30: sum p (log p - log q) in float32 is off by 1e-6, where the truth is 1e-6."""
    hidden, unembedding, *_ = inputs(rng, 1, 200, 16, 1, 300)
    hidden = 5 * hidden
    near = (hidden + 1e-3 * rng.normal(0, 1, hidden.shape)).astype(np.float32)
    arguments = hidden, unembedding, near, unembedding
    truth, result = exact(*arguments, 1.0), full_kl(*arguments)
    assert np.median(truth) < 5e-6 and result.min() >= 0
    wrong = lambda x: np.median(np.abs(np.asarray(x) / truth - 1))  # noqa: E731
    assert wrong(result) < 0.03 and wrong(naive(*arguments, 1.0)) > 0.1


@pytest.mark.parametrize("scale", [10.0, 100.0, 1000.0])
def test_finite_where_a_policy_gives_next_to_nothing(scale, rng):
    """exp(log q - log p) overflows float32 if the reference makes a token e^89 times as likely."""
    hidden, unembedding, ref_hidden, ref_unembedding = inputs(rng, 2, 20, 8, 8, 30)
    arguments = scale * hidden, unembedding, scale * ref_hidden, ref_unembedding
    value, pullback = jax.vjp(lambda h, u: full_kl(h, u, *arguments[2:]), *arguments[:2])
    assert value.min() >= 0 and all(np.isfinite(x).all() for x in pullback(jnp.ones_like(value)))
    np.testing.assert_allclose(value, exact(*arguments, 1.0), rtol=1e-3, atol=1e-4)


def test_gradient_in_bfloat16(rng):
    """Products of rounded factors with float32 sums: within 2^-8 of the float32 gradient."""
    hidden, unembedding, *reference = inputs(rng, 2, 40, 16, 16, 50)
    slope = jax.grad(lambda h, u: full_kl(h, u, *reference, chunk_size=8).sum(), (0, 1))
    low, high = slope(jnp.asarray(hidden, jnp.bfloat16), unembedding), slope(hidden, unembedding)
    assert [x.dtype for x in low] == [jnp.bfloat16, jnp.float32]
    for one, other in zip(low, high, strict=True):
        assert np.abs(one - other).max() < 0.05 * np.abs(other).max()


def test_gradient_of_the_master_is_summed_in_float32():
    """Summed in bfloat16 over 1024 chunks, equal addends stop counting after 256 of them."""
    ones, log3 = jnp.ones((1, 1024, 1), jnp.bfloat16), jnp.array([[math.log(3)], [0.0]])
    slope = jax.grad(lambda u: full_kl(ones, u, ones, log3, chunk_size=1).sum())(jnp.zeros((2, 1)))
    # p = (1/2, 1/2), q = (3/4, 1/4): d = (ln 2/3, ln 2), and
    # 1/2 (d_0 - mean) = 1/4 (ln 2/3 - ln 2) = -ln 3 / 4.
    assert slope.dtype == jnp.float32
    np.testing.assert_allclose(slope[:, 0], [-256 * math.log(3), 256 * math.log(3)], rtol=4e-3)


@pytest.mark.parametrize(
    "wrong", [{0: (2, 3, 5)}, {1: (5, 3)}, {1: (6, 4)}, {2: (2, 4, 4)}, {3: (5, 3)}, {4: (2, 4)}]
)
def test_wrong_shapes_are_refused(wrong):
    shapes = {0: (2, 3, 4), 1: (5, 4), 2: (2, 3, 4), 3: (5, 4), 4: (2, 3)} | wrong
    with pytest.raises(AssertionError):
        kernel.full_kl(*(jnp.ones(shape) for shape in shapes.values()), LogitOptions(1.0))


def test_ids_beyond_the_last_are_in_neither_distribution(rng):
    hidden, unembedding, ref_hidden, ref_unembedding = inputs(rng, 2, 7, 4, 6, 11)
    mask, slope = np.ones((2, 7), bool), rng.normal(size=(2, 7))

    def weighted(hidden, unembedding, ref_unembedding, num_ids):
        options = LogitOptions(0.7, num_ids=num_ids, chunk_size=3)
        kl = kernel.full_kl(hidden, unembedding, ref_hidden, ref_unembedding, mask, options)
        return jnp.sum(slope * kl)

    compute = jax.value_and_grad(weighted, (0, 1))
    ours, gradients = compute(hidden, unembedding, ref_unembedding, 8)
    expected, short = compute(hidden, unembedding[:8], ref_unembedding[:8], None)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(gradients[0], short[0], atol=1e-5)
    np.testing.assert_allclose(gradients[1][:8], short[1], atol=1e-5)
    np.testing.assert_array_equal(gradients[1][8:], 0)
