"""Every program computes the same attention; other platforms' are interpreted or lowered."""

import functools
import itertools
import re
import types
from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from attention_inputs import OPTIONS, make_inputs
from jax_ppo.errors import UserError
from jax_ppo.models import attention
from jax_ppo.models.attention_kernels import (
    PLATFORM_PROGRAMS,
    AttentionFacts,
    program_for_length,
    round_row_length,
    select_attention_program,
)
from jax_ppo.training import decoders, networks
from jax_ppo.training.networks import Folders
from jax_ppo.training.roles import read_networks

OPTION_NAMES = ("scale", "softcap", "sliding_window")
# Compiled as a whole, which takes less time than operation by operation.
xla = jax.jit(attention.xla_attention, static_argnames=OPTION_NAMES)


@functools.partial(jax.jit, static_argnames=OPTION_NAMES)
def packed_and_single(q, k, v, segments, **options):
    """Return xla's attention with segments, and with one segment per row."""
    packed = attention.xla_attention(q, k, v, segments, **options)
    return packed, attention.run_attention("xla", q, k, v, None, **options)


def attention_by_definition(q, k, v, segments, scale=None, softcap=None, sliding_window=None):
    """Compute softmax(q k^T / sqrt(d)) v, head by head and row by row, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, d = q.shape
    out = np.zeros(q.shape)
    for b, h in np.ndindex(B, H):
        kv_head = h // (H // k.shape[2])
        seen = np.tril(np.ones((T, T), bool)) & (segments[b][:, None] == segments[b])
        seen &= ~np.tril(np.ones((T, T), bool), -(sliding_window or T))
        scores = q[b, :, h] @ k[b, :, kv_head].T * (scale or d**-0.5)
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.where(seen, np.exp(scores), 0)
        out[b, :, h] = weights / weights.sum(1, keepdims=True) @ v[b, :, kv_head]
    return out


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"length": 12, "kv_heads": 4}, {}),
        ({"length": 12, "heads": 3, "kv_heads": 1}, {}),
        # In one block, in two, and in four that begin after the first key.
        *itertools.product(({"length": length} for length in (12, 100, 300)), [{}, *OPTIONS]),
    ],
    ids=str,
)
def test_xla_is_the_definition(shape, options):
    *qkv, segments = make_inputs(**shape)
    packed, single = packed_and_single(*qkv, segments, **options)
    expected = attention_by_definition(*qkv, np.asarray(segments), **options)
    np.testing.assert_allclose(packed, expected, atol=1e-5)
    expected = attention_by_definition(*qkv, np.zeros(segments.shape), **options)
    np.testing.assert_allclose(single, expected, atol=1e-5)


# Three blocks of 512 queries.
BLOCKS = {"rows": 1, "length": 1216, "heads": 2, "kv_heads": 1}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        # 64 keys, to which two are added, and fewer.
        *itertools.product(
            ({"length": 12}, {"length": 64}), ({}, {"sliding_window": 7}, {"scale": 0.6})
        ),
        (BLOCKS, {}),
        # Of the last two blocks, the window spares keys.
        (BLOCKS, {"sliding_window": 200}),
    ],
    ids=str,
)
def test_cudnn_is_called_with_what_makes_it_equal_to_xla(cudnn_anywhere, shape, options):
    *qkv, segments = make_inputs(**shape)
    for own in (segments, None) if shape is not BLOCKS else (segments,):
        ours = attention.cudnn_attention(*qkv, own, **options)
        expected = attention.xla_attention(*qkv, own, **options)
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_cudnn_has_no_block_of_less_than_a_tile():
    def sizes(length):
        return [
            (queries.stop - queries.start, keys.stop)
            for queries, keys in attention.blocks_of_queries(length, 512, None, tile=128)
        ]

    assert sizes(12) == [(12, 12)]
    assert sizes(1150) == [(512, 512), (638, 1150)]
    assert sizes(1152) == [(512, 512), (512, 1024), (128, 1152)]


@pytest.mark.parametrize(("packed", "window"), [(False, None), (False, 100), (True, None)])
def test_a_program_for_cuda_has_no_mask_of_a_whole_row(monkeypatch, packed, window):
    """A mask of four blocks of 512 queries, or no mask, also with a window."""
    library = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{library}.check_cudnn_version", lambda: 91000)
    *qkv, segments = make_inputs(rows=1, length=2048, dtype=jnp.bfloat16)

    def loss(*x):
        own = segments if packed else None
        return attention.cudnn_attention(*x, own, sliding_window=window).astype(float).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*qkv)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    shapes = {tuple(map(int, x.split("x"))) for x in re.findall(r"<((?:\d+x)+\d+)x[a-z]", program)}
    assert not any(x.count(2048) > 1 for x in shapes)
    assert ((1, 1, 512, 2048) in shapes) == packed
    # A block of queries has a forward and a backward kernel, which returns no gradient of a mask.
    calls = re.findall(r"custom_call @__cudnn\$fmha.*", program)
    assert len(calls) == (8 if packed else 2)
    backward = [x.rpartition("->")[2] for x in calls if "Backward" in x]
    assert not any("512x2048" in results for results in backward)
    lengths = set(re.findall(r"sliding_window_length\\22: (\d+)", program))
    assert lengths == {str(window or 0)}
    if not packed:
        assert set(re.findall(r"mask_type\\22: \\22(\w+)", program)) == {"CAUSAL"}


def test_xla_spares_the_keys_before_a_window():
    """Count the keys that four blocks of 256 queries read, with a window of 64 and without.

    256 + 3 (256 + 63) = 1,213 and 256 (1 + 2 + 3 + 4) = 2,560.
    """

    def flops(window):
        run = lambda *x: attention.xla_attention(*x, sliding_window=window)  # noqa: E731
        return jax.jit(run).lower(*make_inputs(length=1024)).compile().cost_analysis()["flops"]

    assert 0.45 < flops(64) / flops(None) < 0.5


def test_xla_spares_the_keys_behind_a_block(monkeypatch):
    """Four blocks multiply (1 + 2 + 3 + 4) / 16 of the square."""

    def flops(blocks):
        monkeypatch.setattr(attention, "MAX_QUERY_BLOCKS", blocks)
        run = jax.jit(lambda *x: attention.xla_attention(*x))
        return run.lower(*make_inputs(length=256)).compile().cost_analysis()["flops"]

    assert 0.6 < flops(4) / flops(1) < 0.65


def test_xla_in_bfloat16_sums_in_float32():
    *qkv, segments = make_inputs(dtype=jnp.bfloat16)
    out = xla(*qkv, segments)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32), attention_by_definition(*qkv, np.asarray(segments)), atol=0.03
    )


def gradient(program, inputs, **options):
    """Return the gradient of the tokens that are read."""
    *qkv, segments = inputs

    def loss(*x):
        return jnp.sum(
            jnp.sin(program(*x, segments, **options)).astype(jnp.float32)
            * (segments >= 0)[..., None, None]
        )

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv)


@pytest.mark.parametrize(
    "options",
    [OPTIONS[3], *(pytest.param(more, marks=pytest.mark.exhaustive) for more in ({}, OPTIONS[1]))],
)
def test_splash_interpreted_is_xla(options):
    inputs = make_inputs(rows=1, heads=2, kv_heads=1)
    interpreted = lambda *x: attention.splash_attention(*x, interpret=True, **options)  # noqa: E731
    np.testing.assert_allclose(jax.jit(interpreted)(*inputs), xla(*inputs, **options), atol=1e-5)
    for one, other in zip(
        gradient(interpreted, inputs),
        gradient(attention.xla_attention, inputs, **options),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "head_dim", "options"),
    [
        (128, 64, {}),
        (384, 128, {}),
        (1024, 64, {}),
        (1024, 256, {"sliding_window": 512, "softcap": 50.0}),
    ],
)
def test_splash_lowers_for_tpu(length, head_dim, options):
    shapes = jax.eval_shape(lambda: make_inputs(1, length, head_dim=head_dim, dtype=jnp.bfloat16))
    traced = jax.jit(lambda *x: gradient(attention.splash_attention, x, **options)).trace(*shapes)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    # Forward, and the gradients of queries and of keys and values.
    assert text.count("tpu_custom_call") >= 3


def test_each_device_runs_its_rows_and_heads():
    """This is how programs that no compiler can split are run, here with xla's in their place."""
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    inputs = make_inputs(rows=4, length=8)
    seen = []

    def program(*x):
        seen.append([y.shape for y in x])
        return attention.xla_attention(*x)

    with jax.set_mesh(mesh):
        out = jax.jit(attention.split_heads(program))(*inputs)
    assert seen[0] == [(1, 8, 2, 16), (1, 8, 1, 16), (1, 8, 1, 16), (1, 8)]
    np.testing.assert_allclose(out, xla(*inputs), atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "length", "chosen"),
    [
        ("cpu", "bfloat16", 64, 128, "xla"),
        ("rocm", "bfloat16", 64, 128, "xla"),
        ("cuda", "bfloat16", 64, 130, "cudnn"),
        ("cuda", "float32", 64, 128, "xla"),
        ("cuda", "bfloat16", 256, 128, "xla"),
        ("cuda", "bfloat16", 64, 129, "xla"),
        ("tpu", "bfloat16", 64, 384, "splash"),
        ("tpu", "float32", 64, 200, "xla"),
    ],
)
def test_auto(platform, dtype, head_dim, length, chosen):
    facts = AttentionFacts(platform, dtype, head_dim, length)
    assert select_attention_program("auto", facts) == chosen


@pytest.mark.parametrize(
    ("wanted", "platform", "length", "rounded"),
    [
        ("auto", "tpu", 18, 128),
        ("auto", "tpu", 600, 640),
        ("auto", "tpu", 1000, 1024),
        ("auto", "tpu", 1500, 1536),
        # 17 x 512; 67 blocks of 128 would be more, and slower.
        ("auto", "tpu", 8512, 8704),
        ("splash", "tpu", 129, 256),
        ("xla", "tpu", 1000, 1000),
        ("auto", "cuda", 1001, 1002),
        ("auto", "cpu", 1001, 1001),
        ("auto", "rocm", 1001, 1001),
    ],
)
def test_rows_are_rounded_up_so_that_the_platforms_program_runs(wanted, platform, length, rounded):
    assert round_row_length(wanted, platform, length) == rounded
    chosen = select_attention_program(wanted, AttentionFacts(platform, "bfloat16", 64, rounded))
    own = PLATFORM_PROGRAMS.get(platform, "xla")
    assert chosen == (own if wanted == "auto" else wanted)


def test_each_part_of_a_row_has_two_blocks():
    assert round_row_length("auto", "cpu", 18, 2) == 20
    assert round_row_length("auto", "cuda", 1001, 4) == 1008
    # Eight parts of 4,160 tokens, rounded up to 9 x 512.
    assert round_row_length("auto", "tpu", 33280, 8) == 8 * 4608


def test_a_run_packs_rounded_rows_and_prints_what_attends_on_a_tpu(monkeypatch):
    monkeypatch.setattr(networks, "read_architecture", lambda folder, *_: tiny.ARCHITECTURE)

    def describe(decodes=False, **changes):
        config = tiny.config(**changes)
        actor = read_networks(config, Folders(actor=Path("actor"))).actor
        length = decoders.packed_row_length(config)
        return length, decoders.describe_attention(config.model, actor, length, decodes=decodes)

    assert describe(decodes=True, packing__row_length=1000) == (1000, "")
    monkeypatch.setattr(decoders, "_platform", lambda: "tpu")
    long = {"data__max_prompt_length": 500, "data__max_response_length": 500}
    line = "attention: splash for packed rows of 1024 tokens, xla for decoding"
    assert describe(decodes=True, **long) == (1024, line)
    # A length that the user sets is kept, and what it costs is printed.
    assert describe(packing__row_length=1000) == (
        1000,
        "attention: xla for packed rows of 1000 tokens (splash attention needs rows of a multiple "
        "of 128 tokens, not 1000)",
    )


def test_prompts_whose_length_the_rows_program_does_not_take_are_xlas():
    takes = {("cudnn", 512), ("splash", 512), ("cudnn", 200), ("xla", 200), ("xla", 513)}
    for program, length in itertools.product(("xla", "cudnn", "splash"), (512, 200, 513)):
        expected = program if (program, length) in takes else "xla"
        assert program_for_length(program, length) == expected


@pytest.mark.parametrize(
    ("generation", "chosen"), [(None, "xla"), (8, "xla"), (9, "cudnn"), (10, "xla")]
)
def test_heads_of_256_run_on_hopper(generation, chosen):
    """Gemma's; on other GPUs cuDNN has no gradient for them."""

    def select(wanted, head_dim):
        facts = AttentionFacts("cuda", "bfloat16", head_dim, 128, gpu_generation=generation)
        return select_attention_program(wanted, facts)

    assert select("auto", 256) == chosen
    assert select("auto", 128) == "cudnn"
    limit = 256 if chosen == "cudnn" else 128
    with pytest.raises(ValueError, match=f"a multiple of 8 and at most {limit} on this GPU"):
        select("cudnn", 264)


@pytest.mark.parametrize(
    ("platform", "version", "generation"),
    [("gpu", "cuda 12090", 9), ("gpu", "rocm 60000", None), ("cpu", "cpu", None)],
)
def test_the_generation_is_that_of_this_machines_gpu(monkeypatch, platform, version, generation):
    device = types.SimpleNamespace(compute_capability="9.0")
    backend = types.SimpleNamespace(
        platform=platform, platform_version=version, local_devices=lambda: [device]
    )
    monkeypatch.setattr(jax.extend.backend, "get_backend", lambda: backend)
    monkeypatch.setattr(decoders, "target_platform", lambda: platform)
    assert decoders._gpu_generation() == generation
    # A plan for GPUs on another machine does not know.
    monkeypatch.setattr(decoders, "target_platform", lambda: "cuda")
    assert decoders._gpu_generation() is None


def test_soft_caps_choose_too():
    cuda, tpu = (AttentionFacts(x, "bfloat16", 64, 128, softcap=50.0) for x in ("cuda", "tpu"))
    assert select_attention_program("auto", cuda) == "xla"
    assert select_attention_program("auto", tpu) == "splash"
    with pytest.raises(
        ValueError, match="cuDNN's attention does not support the model's soft cap of logits, 50.0"
    ):
        select_attention_program("cudnn", cuda)


@pytest.mark.parametrize(
    ("requested", "platform", "dtype", "length", "why"),
    [
        ("cudnn", "cpu", "bfloat16", 128, "needs an NVIDIA GPU, not cpu"),
        ("cudnn", "cuda", "float32", 128, "not float32"),
        ("splash", "cuda", "bfloat16", 128, "needs a TPU"),
        ("splash", "tpu", "bfloat16", 200, "a multiple of 128 tokens"),
    ],
)
def test_what_cannot_run_says_why(requested, platform, dtype, length, why):
    with pytest.raises(ValueError, match=why):
        select_attention_program(requested, AttentionFacts(platform, dtype, 64, length))


def test_an_impossible_choice_names_the_option(monkeypatch):
    monkeypatch.setattr(networks, "read_architecture", lambda *_: tiny.ARCHITECTURE)
    folders = Folders(actor=Path("actor"))
    assert read_networks(tiny.config(), folders).actor.attention == "xla"
    with pytest.raises(
        UserError, match="config.model.attention='splash': splash attention needs a TPU"
    ):
        read_networks(tiny.config(model__attention="splash"), folders)
    with pytest.raises(
        UserError, match="config.rollout.attention='cudnn': cuDNN reads the cache only with"
    ):
        read_networks(tiny.config(rollout__attention="cudnn"), folders)
