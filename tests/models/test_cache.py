"""In every layout of the cache, a new token attends like the last token of a whole sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.models import attention, cache

PROGRAMS = ("cpu", "gpu", "tpu", "cudnn")
B, S, K, D = 3, 9, 2, 4
COLUMNS = jnp.array([8, 5, 0])
OPTION_NAMES = ("scale", "softcap", "sliding_window")
# Compiled as a whole, which takes less time than operation by operation.
xla = jax.jit(attention.xla_attention, static_argnames=OPTION_NAMES)


def attend(program, q, layer, columns, **options):
    """Compile and run `attend_to_cache`; not cached, since tests replace what it calls."""
    run = lambda *x: cache.attend_to_cache(program, *x, **options)  # noqa: E731
    return jax.jit(run)(q, layer, columns)


attend_tpu = jax.jit(functools.partial(cache.attend_to_cache, "tpu"))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def draw(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.9},
        {"sliding_window": 3},
        {"sliding_window": S},
        {"softcap": 0.5, "scale": 0.9},
        {"sliding_window": 2, "softcap": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_that_of_the_last_token(rng, cudnn_anywhere, program, options, behind):
    """Entries that must not be read are random: later columns, those before a window, idle rows."""
    if program == "cudnn" and ("softcap" in options or options.get("sliding_window", S) < S):
        pytest.skip("cuDNN has neither soft caps nor windows for the cache")
    q = draw(rng, B, S, 2 * K, D)
    k = draw(rng, B + behind, S, K, D)
    v = draw(rng, B + behind, S, K, D)
    last = np.take_along_axis(np.asarray(q), np.asarray(COLUMNS)[:, None, None, None], 1)
    whole = xla(q, k[:B], v[:B], None, **options)
    expected = np.take_along_axis(np.asarray(whole), np.asarray(COLUMNS)[:, None, None, None], 1)
    layer = cache.cache_layout(program, k, v)
    assert cache.cache_length(program, (layer,)) == S
    out = attend(program, last, layer, COLUMNS, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("longest", range(S))
def test_a_cpu_reads_as_few_columns_as_hold_every_row(rng, monkeypatch, longest):
    """All other columns are NaN, which would show in the result."""
    monkeypatch.setattr(cache, "MIN_READ_WIDTH", 2)
    assert cache.read_widths(S) == (3, 5, 9)
    read = next(width for width in (3, 5, 9) if width > longest)
    unread = jnp.where(jnp.arange(S)[:, None, None] < read, 0, jnp.nan)
    q, k, v = draw(rng, B, 1, K, D), draw(rng, B, S, K, D), draw(rng, B, S, K, D)
    columns = jnp.array([0, longest, longest // 2])
    # Other tests compile it with another MIN_READ_WIDTH.
    out = attend("cpu", q, cache.cache_layout("cpu", k + unread, v + unread), columns)
    np.testing.assert_allclose(
        out, attend_tpu(q, cache.cache_layout("tpu", k, v), columns), atol=1e-5
    )


def test_what_a_cpu_reads():
    assert cache.read_widths(1088) == (136, 272, 544, 1088)
    assert cache.read_widths(255) == (255,)
    assert cache.read_widths(257) == (129, 257)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_row_writes_its_own_column(rng, program):
    k, v, new_k, new_v = (draw(rng, B + 1, T, K, D) for T in (S, S, 1, 1))
    expected = [x.at[jnp.arange(B), COLUMNS].set(new[:B, 0]) for x, new in ((k, new_k), (v, new_v))]
    layer = cache.write_tokens(
        program, cache.cache_layout(program, k, v), new_k[:B], new_v[:B], COLUMNS
    )
    jax.tree.map(np.testing.assert_array_equal, layer, cache.cache_layout(program, *expected))


@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_that_enter(rng, program):
    """There is no slot for the second row."""
    k, v, new_k, new_v = (draw(rng, B, T, K, D) for T in (S, S, 4, 4))
    expected = [
        x.at[2, :4].set(new[0]).at[0, :4].set(new[2]) for x, new in ((k, new_k), (v, new_v))
    ]
    layer = cache.write_rows(
        program,
        cache.cache_layout(program, k, v),
        jnp.array([2, B, 0]),
        cache.cache_layout(program, new_k, new_v),
    )
    jax.tree.map(np.testing.assert_array_equal, layer, cache.cache_layout(program, *expected))


@pytest.mark.parametrize(
    ("requested", "platform", "whole", "window", "chosen"),
    [
        ("auto", "cpu", "xla", None, "cpu"),
        ("auto", "cuda", "xla", None, "gpu"),
        ("auto", "rocm", "xla", None, "gpu"),
        ("auto", "tpu", "splash", None, "tpu"),
        ("auto", "cuda", "cudnn", None, "cudnn"),
        ("xla", "cuda", "cudnn", None, "gpu"),
        ("auto", "cuda", "cudnn", S - 1, "gpu"),
        ("auto", "cuda", "cudnn", S, "cudnn"),
        ("cudnn", "cuda", "cudnn", S, "cudnn"),
    ],
)
def test_the_choice(requested, platform, whole, window, chosen):
    assert cache.select_cache_program(requested, platform, whole, architecture(window), S) == chosen


@pytest.mark.parametrize(
    ("whole", "window", "why"),
    [("xla", None, "not xla"), ("cudnn", S - 1, "this model's is 8")],
)
def test_what_cudnn_cannot_read(whole, window, why):
    with pytest.raises(ValueError, match=why):
        cache.select_cache_program("cudnn", "cuda", whole, architecture(window), S)


def architecture(window):
    return dataclasses.replace(
        tiny.ARCHITECTURE, sliding_window=window, local_layers=(False, True) if window else ()
    )
