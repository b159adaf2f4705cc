import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jax_ppo.sampler import filters, sampling
from jax_ppo.sampler.filters import Filters

# jax.random.uniform stays below it, draw need not rely on that.
LAST = np.nextafter(np.float32(1), np.float32(0))
draw_tokens = jax.jit(lambda logits, uniforms: filters.draw_tokens(weigh(logits), uniforms))
_sample = jax.jit(sampling.sample_tokens, static_argnames="filters")
keep_top_k, keep_min_p = (
    jax.jit(f, static_argnums=1) for f in (filters.keep_top_k, filters.keep_min_p)
)
keep_top_p = jax.jit(lambda w, p: filters.keep_top_p(w, p, w.sum(-1)), static_argnums=1)


def sample_tokens(logits, uniforms, *options):
    return _sample(logits, uniforms, filters=Filters(*options))


def weigh(logits):
    """Return the weights that filters take: softmax, relative to the largest."""
    return jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_many(logits, draws, options=(1.0,)):
    """Draw `~draws` tokens from one distribution, one sample each."""
    uniforms = sampling.token_uniforms(
        sampling.sample_keys(jax.random.key(3), jnp.arange(draws)), 5
    )
    return sampling.sample_tokens(
        jnp.broadcast_to(logits, (draws, len(logits))), uniforms, filters=Filters(*options)
    )[0]


def random_logits(B, V, scale=3.0, seed=0):
    return np.random.default_rng(seed).normal(0, scale, (B, V)).astype(np.float32)


def is_kept(weights):
    return np.asarray(weights) > 0


@pytest.mark.parametrize("V", [50, 1000])
def test_draws_follow_softmax(V):
    logits, draws = random_logits(1, V, scale=1.5)[0], 50_000
    expected = draws * np.asarray(jax.nn.softmax(logits.astype(np.float64)), np.float64)
    counts = np.bincount(draw_many(logits, draws), minlength=V)
    rare = expected < 5  # the chi-square law needs five expected draws per bin
    bins = [np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (counts, expected)]
    assert scipy.stats.chisquare(bins[0], bins[1] * draws / bins[1].sum()).pvalue > 1e-3


@pytest.mark.parametrize("temperature, k, p", [(1.0, 5, 1.0), (0.5, 50, 0.7), (2.0, 9, 0.8)])
def test_draws_follow_the_filtered_distribution(temperature, k, p):
    logits, draws = random_logits(1, 50)[0], 50_000
    probability = np.exp(logits / temperature - (logits / temperature).max())
    order = np.argsort(-probability)
    probability[order[k:]] = 0
    sums = np.cumsum(probability[order]) / probability.sum()
    probability[order[np.searchsorted(sums, p) + 1 :]] = 0
    counts = np.bincount(draw_many(logits, draws, (temperature, k, p)), minlength=50)
    assert (counts[probability == 0] == 0).all()
    distance = np.abs(counts / draws - probability / probability.sum()).sum() / 2
    assert distance < 0.01  # chance accounts for about 0.005


@pytest.mark.parametrize("V", [1, 3, 64, 65, 4097])
def test_never_draws_what_has_probability_0(V):
    """Random sets of -inf, one token left at either end, huge logits, extreme uniforms."""
    rng = np.random.default_rng(V)
    logits = np.concatenate(
        [random_logits(24, V, scale, seed=V) for scale in (0.0, 1.0, 30.0, 1e4, 1e30)]
    )
    logits = np.where(rng.random(logits.shape) < rng.random((len(logits), 1)), -np.inf, logits)
    logits[np.arange(len(logits)), rng.integers(0, V, len(logits))] = (
        0.0  # some token always remains
    )
    only = np.full((3, V), -np.inf)
    only[[0, 1, 2], [0, V // 2, V - 1]] = 5.0
    logits = np.concatenate([logits, only]).astype(np.float32)
    for u in [(0, 0), (0, LAST), (LAST, 0), (LAST, LAST), (1, 1), (0.5, LAST), *rng.random((4, 2))]:
        tokens = np.asarray(draw_tokens(logits, np.tile(np.float32(u), (len(logits), 1)))[0])
        assert ((tokens >= 0) & (tokens < V)).all()
        weights = np.exp(np.take_along_axis(logits, tokens[:, None], 1)[:, 0] - logits.max(1))
        assert (weights > 0).all()
        np.testing.assert_array_equal(tokens[-3:], [0, V // 2, V - 1])


def test_running_sums_that_round_never_pick_weight_0():
    """Over 512 weights, rounding makes sums grow at weights of 0, which uniforms hit."""
    rng = np.random.default_rng(0)
    weights = (rng.random((200, 512)) * (rng.random((200, 512)) < 0.5)).astype(np.float32)
    sums = np.asarray(jax.jit(lambda x: jnp.cumsum(x, -1))(weights))
    row, before = np.nonzero(np.diff(sums) * (weights[:, 1:] == 0))
    pick = jax.jit(filters.invert_cdf)
    for nudge in (0, 1, -1):
        uniforms = sums[row, before] / sums[row, -1]
        picked, _ = pick(weights[row], uniforms + nudge * np.spacing(uniforms))
        assert (weights[row, picked] > 0).all()


def test_a_nan_gives_a_token_of_the_vocabulary_and_shows_in_the_log_prob():
    logits = random_logits(2, 50)
    logits[0, 7] = np.nan
    tokens, logprobs = sample_tokens(logits, np.full((2, 2), 0.5, np.float32), 1.0)
    assert 0 <= tokens[0] < 50 and np.isnan(logprobs[0]) and np.isfinite(logprobs[1])


def test_the_address_alone_makes_the_uniforms():
    key = jax.random.key(0)
    keys = sampling.sample_keys(key, jnp.arange(6))
    assert (
        len(np.unique(np.concatenate([sampling.token_uniforms(keys, t).ravel() for t in range(4)])))
        == 6 * 4 * 2
    )
    # A different position in each row.
    together = sampling.token_uniforms(keys, jnp.array([3, 1, 4, 1, 5, 9]))
    for b, t in enumerate([3, 1, 4, 1, 5, 9]):
        alone = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, b), t), (2,))
        np.testing.assert_array_equal(together[b], alone)


def test_top_k_by_hand():
    logits = jnp.array([[1.0, 4.0, 2.0, 3.0, -jnp.inf], [0.0, 0.0, 1.0, 0.0, -1.0]])
    expected = [[0, 1, 0, 1, 0], [1, 1, 1, 1, 0]]  # all ties with the second largest remain
    weights = weigh(logits)
    np.testing.assert_array_equal(is_kept(keep_top_k(weights, 2)), np.array(expected, bool))
    for everything in (-1, 0, 5, 99):
        np.testing.assert_array_equal(keep_top_k(weights, everything), weights)


def test_top_p_by_hand():
    probability = np.array([0.125, 0.5, 0.05, 0.25, 0.075])
    weights = jnp.array(probability, jnp.float32)[None] / 0.5
    for p, expected in [
        (1e-6, [1]),
        (0.49, [1]),
        (0.51, [1, 3]),
        (0.74, [1, 3]),
        (0.76, [1, 3, 0]),
        (0.90, [1, 3, 0, 4]),
        (0.96, [0, 1, 2, 3, 4]),
    ]:
        assert set(np.flatnonzero(is_kept(keep_top_p(weights, p))[0])) == set(expected), p
    # All are equally likely: none comes before another.
    assert is_kept(keep_top_p(jnp.ones((1, 4)), 0.5)).all()
    np.testing.assert_array_equal(keep_top_p(weights, 1.0), weights)


def test_log_prob_is_from_before_the_filters():
    logits = random_logits(64, 50)
    uniforms = np.random.default_rng(0).random((64, 2)).astype(np.float32)
    tokens, logprobs = sample_tokens(logits, uniforms, 0.7, 3, 0.9)
    expected = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits / 0.7)), np.asarray(tokens)[:, None], 1
    )[:, 0]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_min_p_keeps_what_is_a_fraction_as_likely_as_the_likeliest():
    weights = np.array([[0.5, 0.25, 0.2, 0.05], [0.1, 0.2, 0.3, 0.4]]) / [[0.5], [0.4]]
    # At least 0.195 and at least 0.156.
    kept = is_kept(keep_min_p(weights, 0.39))
    assert kept.tolist() == [[True, True, True, False], [False, True, True, True]]
    assert is_kept(keep_min_p(weights, 0.0)).all()


def test_greedy_takes_the_first_of_the_likeliest_at_temperature_1():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0]])
    tokens, logprobs = sample_tokens(logits, jnp.full((1, 2), 0.9), 0.0, 2, 0.1)
    assert tokens.tolist() == [1] and tokens.dtype == jnp.int32
    np.testing.assert_allclose(logprobs, 2 - np.log(1 + 2 * np.exp(2) + np.exp(1)), rtol=1e-6)


def test_plain_sampling_neither_sorts_nor_bisects():
    def has_a_loop_or_sort(*options):
        args = random_logits(2, 50), np.zeros((2, 2), np.float32)
        text = str(
            jax.make_jaxpr(lambda *args: sampling.sample_tokens(*args, filters=Filters(*options)))(
                *args
            )
        )
        return any(name in text for name in (" sort[", " top_k[", " while[", " scan["))

    assert not has_a_loop_or_sort(0.7) and not has_a_loop_or_sort(0.7, 50, 1.0)
    assert has_a_loop_or_sort(0.7, 49) and has_a_loop_or_sort(0.7, -1, 0.9)


def kept_by_sorting(logits, k=0, p=1.0):
    """Return what top-k and then top-p keep, found with a sort; equal logits stay together."""
    kept = []
    for row in np.asarray(logits, np.float64):
        descending = np.sort(row)[::-1]
        if k:
            descending = descending[descending >= descending[k - 1]]
        probability = np.exp(descending - descending[0])
        last = np.searchsorted(np.cumsum(probability) / probability.sum(), p)
        kept.append(row >= descending[min(last, len(descending) - 1)])
    return np.array(kept)


def test_filters_find_the_last_token_in_or_outside_of_the_heaviest_blocks():
    """V = 20,011 has blocks of 8 tokens, the heaviest 256 of which top-p reads first."""
    V = 20_011
    peaked, flat = random_logits(4, V, scale=4.0), random_logits(4, V, scale=0.5, seed=1)
    # Ties over all blocks, and the likeliest tokens in one block, be it the first or the last.
    tied = np.where(random_logits(1, V, seed=2) > 5, 1.0, 0.0).astype(np.float32)
    together = np.tile(np.linspace(0, -20, V, dtype=np.float32), (2, 1))
    together[1] = together[1, ::-1]
    # Of 200 tokens equal to the 37th, top-p after top-k adds up those of other blocks, too.
    added = np.full((1, V), -20, np.float32)
    added[0, :20_000:100], added[0, :500:100] = 0, 3
    logits = np.concatenate([peaked, flat, tied, together, added])
    uniforms = np.random.default_rng(3).random((len(logits), 2)).astype(np.float32)
    for k, p in ((37, 1.0), (37, 0.6), (0, 0.9)):
        tokens, logprobs = sample_tokens(logits, uniforms, 1.0, k, p)
        # The draw is the one over the whole vocabulary.
        kept, weights = kept_by_sorting(logits, k, p), np.asarray(weigh(logits))
        expected, _ = jax.jit(filters.draw_tokens)(np.where(kept, weights, 0), uniforms)
        np.testing.assert_array_equal(tokens, expected)
        rows = np.arange(len(logits))
        expected = np.log(weights[rows, tokens] / weights.sum(1, dtype=np.float64))
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
        # A row alone is drawn as among others, of which more than an eighth reads everything.
        for row in (0, 4):
            alone = sample_tokens(logits[row : row + 1], uniforms[row : row + 1], 1.0, k, p)
            assert alone.tokens == tokens[row]
    assert (kept[4:8].sum(1) > 256).all() and (kept[:4].sum(1) < 256).any()
