"""Properties of the kernels for any mask, EOS position, temperature, division and packing.

There are few shapes, because each is compiled; which of their positions count varies freely.
Masked positions hold garbage, and no result may be non-finite.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jax_ppo.kernels import advantages, kl, logprobs, losses, vocabulary_kl
from jax_ppo.kernels.losses import Clip, padded_batch
from jax_ppo.kernels.vocabulary_chunks import LogitOptions
from jax_ppo.registries import POLICY_LOSSES
from jax_ppo.training import packing
from kernels_by_name import KL
from padded_loss import padded_loss

B, T = 3, 6
quick = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
eighths = st.integers(-400, 400).map(
    lambda i: i / 8
)  # few digits, so that an oracle is not off by cancellation
log_probabilities = st.one_of(
    st.floats(-5, 0, width=32), st.sampled_from([0.0, -1e-6, -100.0, -1e4])
)
lengths_B = arrays(np.int32, B, elements=st.integers(0, T))
prefixes = lengths_B.map(
    lambda lengths: (np.arange(T) < lengths[:, None]).astype(np.int32)
)  # responses, wherever they end
masks = st.one_of(prefixes, arrays(np.int32, (B, T), elements=st.integers(0, 1)))


def tokens(elements):
    return arrays(np.float32, (B, T), elements=elements)


def poisoned(mask, *xs):
    garbage = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), mask.shape)
    return [np.where(mask == 1, x, garbage).astype(np.float32) for x in xs]


def compiled(function, **options):
    """Compile a function; return numpy arrays, whose comparisons compile nothing."""
    run = jax.jit(function, **options)
    return lambda *arguments: jax.device_get(run(*arguments))


def gradient_and_result(kernel, *argnums):
    """Compile a kernel together with its gradient.

    The gradient is that of the sum of its loss, or of all its results; both are returned.
    """

    def total(*arguments):
        result = kernel(*arguments)
        return jnp.sum(getattr(result, "loss", result)), result

    return compiled(jax.grad(total, argnums, has_aux=True))


gae = compiled(jax.vmap(advantages.gae, (0, 0, 0, None, None, None)))
reward_to_go = compiled(jax.vmap(advantages.reward_to_go, (0, 0, None)))
rloo, group_mean_baseline = (
    compiled(f, static_argnums=1) for f in (advantages.rloo, advantages.group_mean_baseline)
)
grpo = compiled(advantages.grpo, static_argnums=(1, 2))


value_loss = gradient_and_result(losses.value_loss, 0)


@quick
@given(
    prefixes,
    tokens(eighths),
    tokens(eighths),
    st.floats(0, 1, width=32),
    st.floats(0, 1, width=32),
    eighths,
)
def test_gae(mask, rewards, values, gamma, lam, bootstrap):
    result, returns = gae(*poisoned(mask, rewards, values), mask, gamma, lam, bootstrap)
    for b, length in enumerate(mask.sum(1)):
        advantage, value = 0.0, bootstrap
        for t in reversed(range(length)):
            advantage = (
                float(rewards[b, t]) + gamma * value - float(values[b, t]) + gamma * lam * advantage
            )
            value = float(values[b, t])
            np.testing.assert_allclose(
                [result[b, t], returns[b, t]], [advantage, advantage + value], rtol=1e-4, atol=1e-3
            )
        assert not result[b, length:].any() and not returns[b, length:].any()
    to_go = reward_to_go(*poisoned(mask, rewards), mask, gamma)
    np.testing.assert_allclose(
        to_go, gae(*poisoned(mask, rewards, 0 * values), mask, gamma, 1.0, 0.0)[0], rtol=1e-6
    )


def policy_kernel(name):
    def compute(logprobs, old, advantages, mask, low, high, dual):
        batch = padded_batch(logprobs, old, advantages, mask)
        return padded_loss(name, batch, Clip(low, high, dual))

    return gradient_and_result(compute, 0, 1, 2)


POLICY_KERNELS = {name: policy_kernel(name) for name in POLICY_LOSSES}
KL_KERNELS = {
    kind: gradient_and_result(functools.partial(kl.kl_estimate, estimator=KL[kind]), 0)
    for kind in KL
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@quick
@given(
    masks,
    tokens(log_probabilities),
    tokens(log_probabilities),
    tokens(eighths),
    st.floats(0.01, 0.9),
    st.floats(0.01, 3),
    st.floats(1.1, 10),
)
def test_policy_losses(name, mask, now, old, advantages_BxT, low, high, dual):
    batch = poisoned(mask, now, old, advantages_BxT)
    gradients, result = POLICY_KERNELS[name](*batch, mask, low, high, dual)
    for x in (*gradients, *result):
        assert np.isfinite(x).all()
    for x, value in zip((*gradients, *result), (0, 0, 0, 0, 1, 0, 0, 0), strict=True):
        assert (x[mask == 0] == value).all()
    assert (np.abs(result.log_ratio) <= 20).all() and (result.ratio > 0).all()
    if name != "cispo":
        assert not gradients[0][(result.clipped == 1) | (result.dual_clipped == 1)].any()
    if name in (
        "vanilla",
        "gspo",
    ):  # pessimistic: never a smaller loss than the unclipped one's, but for the dual clip
        unclipped = -result.ratio * np.where(mask == 1, advantages_BxT, 0)
        assert ((result.loss >= unclipped) | (result.dual_clipped == 1)).all()
    # At the old policy: -A grad log pi, and nothing is clipped.
    gradients, result = POLICY_KERNELS[name](batch[0], batch[0], batch[2], mask, low, high, dual)
    np.testing.assert_allclose(gradients[0], np.where(mask == 1, -advantages_BxT, 0), rtol=1e-6)
    assert (result.ratio == 1).all() and not result.clipped.any() and not result.dual_clipped.any()


@quick
@given(masks, tokens(eighths), tokens(eighths), tokens(eighths), st.floats(0.1, 10))
def test_value_loss(mask, values, old, returns, clip):
    plain, clipped = (
        value_loss(*poisoned(mask, values, old, returns), mask, bound) for bound in (None, clip)
    )
    for (gradient,), result in (plain, clipped):
        assert np.isfinite(gradient).all() and np.isfinite(result.loss).all()
        assert (result.loss >= 0).all()
        assert not gradient[mask == 0].any() and not result.loss[mask == 0].any()
        assert not gradient[result.clipped == 1].any()
    assert (clipped[1].loss >= plain[1].loss).all()


@pytest.mark.parametrize("kind", KL)
@quick
@given(masks, tokens(log_probabilities), tokens(log_probabilities))
def test_kl_estimates(kind, mask, now, reference):
    (gradient,), result = KL_KERNELS[kind](*poisoned(mask, now, reference), mask)
    assert np.isfinite(gradient).all() and np.isfinite(result).all()
    assert not gradient[mask == 0].any() and not result[mask == 0].any()
    assert kind == "k1" or (result >= 0).all()
    (gradient,), result = KL_KERNELS[kind](*poisoned(mask, now, now), mask)
    assert not result.any() and (kind in ("k1", "abs") or not gradient.any())


G, N, D, V = 2, 5, 3, 7
places = arrays(np.int32, (G, N), elements=st.integers(0, 1))


@functools.cache
def vocabulary_kernels(temperature, chunk_size):
    options = LogitOptions(temperature, chunk_size=chunk_size)

    def total(hidden, unembedding, targets, mask):
        of_tokens, entropy = logprobs.token_logprobs(hidden, unembedding, targets, mask, options)
        return of_tokens.sum() + entropy.sum(), (of_tokens, entropy)

    def divergence(hidden, unembedding, ref_hidden, mask):
        result = vocabulary_kl.full_kl(hidden, unembedding, ref_hidden, unembedding, mask, options)
        return result.sum(), result

    return [compiled(jax.grad(f, (0, 1), has_aux=True)) for f in (total, divergence)]


@quick
@given(
    places,
    st.integers(0, 99),
    st.sampled_from([0.1, 1.0, 30.0]),
    st.sampled_from([(1.0, 0), (0.6, 2), (1.7, 1), (1.0, 4)]),
)
def test_logprobs_entropy_and_full_kl(mask, seed, scale, option):
    rng = np.random.default_rng(seed)
    temperature, _ = option
    hidden, ref_hidden = (scale * rng.normal(size=(2, G, N, D))).astype(np.float32)
    unembedding, targets = rng.normal(size=(V, D)).astype(np.float32), rng.integers(0, V, (G, N))
    dirty, ref_dirty = (
        np.where(mask[..., None] == 1, x, np.float32(np.nan)) for x in (hidden, ref_hidden)
    )
    of_tokens, of_divergence = vocabulary_kernels(*option)

    gradients, (result, entropy) = of_tokens(
        dirty, unembedding, np.where(mask == 1, targets, -9), mask
    )
    z = hidden.astype(np.float64) @ unembedding.T / temperature
    log_p = z - z.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    expected = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(result, np.where(mask == 1, expected, 0), rtol=1e-4, atol=1e-4)
    assert (entropy >= 0).all() and (entropy <= math.log(V) + 1e-5).all() and (result <= 0).all()
    np.testing.assert_allclose(
        entropy, np.where(mask == 1, -(np.exp(log_p) * log_p).sum(-1), 0), rtol=1e-3, atol=1e-4
    )
    divergence_gradients, divergence = of_divergence(dirty, unembedding, ref_dirty, mask)
    assert (divergence >= 0).all() and not divergence[mask == 0].any()
    for gradient in (*gradients, *divergence_gradients):
        assert np.isfinite(gradient).all()
    assert not gradients[0][mask == 0].any() and not divergence_gradients[0][mask == 0].any()
    assert not of_divergence(dirty, unembedding, dirty, mask)[1].any()


@quick
@given(st.data(), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_a_packing_puts_every_token_in_one_place(data, row_length, rows_per_micro_batch, packed):
    groups = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(12)[:10].reshape(2, 5)
    lengths = np.array(data.draw(st.lists(st.integers(1, row_length), min_size=12, max_size=12)))
    packed_rows, counts = packing.pack_samples(
        lengths, groups, rows_per_micro_batch, row_length, packed
    )
    for group, sample, position, count in zip(
        groups, packed_rows.sample, packed_rows.position, counts, strict=True
    ):
        held = list(zip(sample[sample >= 0].tolist(), position[sample >= 0].tolist(), strict=True))
        assert sorted(held) == sorted(
            (b, t) for b in group.tolist() for t in range(lengths[b])
        )  # each token once, no other
        assert (sample[count:] == -1).all() and all(
            (micro_batch >= 0).any() for micro_batch in sample[:count]
        )
        for b in group:  # one run of a row, in order
            places = np.flatnonzero(sample == b)
            assert np.ptp(places) == lengths[b] - 1
            assert places[0] % row_length + lengths[b] <= row_length
            assert (np.diff(position.ravel()[places]) == 1).all()
    rows = packing.assign_to_rows(lengths, row_length, packed)
    assert sorted(sum(rows, [])) == list(range(12))
    assert all(lengths[row].sum() <= row_length for row in rows)
    if packed:  # no two rows could have been one
        filled = sorted(lengths[row].sum() for row in rows)
        assert len(filled) < 2 or filled[0] + filled[1] > row_length
