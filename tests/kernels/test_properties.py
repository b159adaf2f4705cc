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

from jax_ppo.kernels import advantages, importance, kl, logprobs, losses, vocabulary_kl
from jax_ppo.kernels import masked_statistics as masked
from jax_ppo.kernels.losses import Clip, padded_batch
from jax_ppo.kernels.vocabulary_chunks import LogitOptions
from jax_ppo.registries import AGGREGATIONS, IMPORTANCE_WEIGHTS, POLICY_LOSSES
from jax_ppo.training import packing
from jax_ppo.types import Sequences
from kernels_by_name import KL, LEVELS
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


whiten = compiled(masked.whiten, static_argnums=2)
gae = compiled(jax.vmap(advantages.gae, (0, 0, 0, None, None, None)))
reward_to_go = compiled(jax.vmap(advantages.reward_to_go, (0, 0, None)))
rloo, group_mean_baseline = (
    compiled(f, static_argnums=1) for f in (advantages.rloo, advantages.group_mean_baseline)
)
grpo = compiled(advantages.grpo, static_argnums=(1, 2))


@functools.partial(compiled, static_argnums=1)
def loss_weights(lengths, mode, scale):
    return losses.loss_weights(lengths, AGGREGATIONS[mode].function, scale)


value_loss = gradient_and_result(losses.value_loss, 0)
importance_weights = compiled(importance.importance_weights, static_argnums=3)
mismatch = compiled(importance.mismatch)


@quick
@given(masks, tokens(eighths), st.booleans())
def test_whitening(mask, x, shift):
    result = whiten(*poisoned(mask, x), mask, shift)
    kept = x[mask == 1].astype(np.float64)
    mean = kept.mean() if kept.size else 0
    expected = (kept - mean) / np.sqrt((kept.var() if kept.size else 0) + 1e-8) + (
        0 if shift else mean
    )
    np.testing.assert_allclose(result[mask == 1], expected, rtol=1e-4, atol=1e-4)
    assert not result[mask == 0].any()


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


@quick
@given(arrays(np.float32, 6, elements=eighths), st.sampled_from([2, 3, 6]), eighths)
def test_group_baselines(scores, n, shift):
    others = [np.delete(scores, b)[b // n * n : b // n * n + n - 1].mean() for b in range(6)]
    np.testing.assert_allclose(rloo(scores, n), scores - others, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        group_mean_baseline(scores, n), (scores - others) * (n - 1) / n, rtol=1e-4, atol=1e-4
    )
    for by_std in (True, False):
        result = np.asarray(grpo(scores, n, by_std))
        np.testing.assert_allclose(result.reshape(-1, n).sum(1), 0, atol=1e-3)
        np.testing.assert_allclose(
            grpo((scores + shift).astype(np.float32), n, by_std), result, rtol=1e-3, atol=1e-3
        )
        assert (
            not by_std or np.abs(result).max() <= (n - 1) / math.sqrt(n) + 1e-3
        )  # the most that one of n can stand out


@quick
@given(
    arrays(np.int32, 8, elements=st.integers(0, 9)),
    arrays(np.int32, 8, elements=st.integers(0, 3)),
    st.sampled_from(tuple(AGGREGATIONS)),
)
def test_loss_weights_over_any_cut_into_micro_batches(lengths, micro_batch, mode):
    weights = np.asarray(loss_weights(lengths, mode, 5.0), np.float64)
    share = weights * (
        lengths
        if mode.endswith("token-mean")
        else (lengths > 0) * (5 if mode.endswith("norm") else 1)
    )
    np.testing.assert_allclose(
        sum(share[micro_batch == m].sum() for m in range(4)), float(lengths.any()), rtol=1e-5
    )
    assert (weights >= 0).all() and not weights[lengths == 0].any()
    absent = np.asarray(loss_weights(np.concatenate([lengths, np.zeros(8, np.int32)]), mode, 5.0))
    np.testing.assert_array_equal(absent, np.concatenate([weights, np.zeros(8)]))


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


@quick
@given(
    masks,
    tokens(log_probabilities),
    tokens(log_probabilities),
    st.sampled_from(tuple(IMPORTANCE_WEIGHTS)),
    st.floats(1, 100),
)
def test_importance_weights_and_mismatch(mask, now, sampled, level, threshold):
    arguments = (*poisoned(mask, now, sampled), mask)
    weights = importance_weights(*arguments, LEVELS[level], threshold)
    assert (
        (weights >= 0).all()
        and (weights <= np.float32(threshold)).all()
        and not weights[mask == 0].any()
    )
    figures = mismatch(*arguments)
    assert all(np.isfinite(figure) for figure in figures.values())
    assert (
        0
        <= figures["prob_difference_mean"]
        <= figures["prob_difference_max"] * (1 + 1e-6)
        <= 1 + 1e-6
    )
    assert figures["exp_abs_log_ratio_mean"] >= 1 - 1e-6 or not mask.any()
    assert -1 <= figures["prob_correlation"] <= 1


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


@jax.jit
def there_and_back(sequences, packed_rows, values):
    rows = packing.gather_rows(sequences, packed_rows)
    empty = jnp.full(values.shape, -1.0)
    return (
        packing.to_samples(packing.to_rows(values, rows), rows, empty),
        packing.to_samples(rows.targets.astype(jnp.float32), rows, empty),
    )


@quick
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=5, max_size=5), st.booleans()
)
def test_what_is_gathered_into_rows_is_scattered_back(lengths, packed):
    """Each token is the target of one position, and a value is the same after a round trip.

    This holds wherever responses end.
    """
    prompts, responses = np.array(lengths, np.int32).T
    drawn = np.random.default_rng(0).integers(1, 99, (5, 7)).astype(np.int32)
    inside = np.arange(4) < responses[:, None]
    sequences = Sequences(
        tokens=drawn,
        prompt_lengths=prompts,
        lengths=responses,
        truncated=np.zeros(5, bool),
        action_mask=inside,
    )
    packed_rows, _ = packing.pack_samples(prompts + responses, [range(5)], 5, 7, packed)

    values = np.arange(20, dtype=np.float32).reshape(5, 4)
    back, targets = there_and_back(sequences, jax.tree.map(lambda x: x[0, 0], packed_rows), values)
    np.testing.assert_array_equal(back, np.where(inside, values, -1))
    for b in range(5):
        np.testing.assert_array_equal(
            targets[b, : responses[b]], drawn[b, prompts[b] : prompts[b] + responses[b]]
        )
