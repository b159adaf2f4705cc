"""Slots refilled from the queue draw the same samples in fewer steps, and nothing is copied."""

import dataclasses
import functools
import heapq
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.models import cache, heads
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.sampler import decode_loop, sampling
from jax_ppo.sampler import slots as slots_lib
from jax_ppo.sampler.slots import DecodeState
from jax_ppo.types import Prompts
from tiny_actor import make_prompts

LENGTHS = (5, 16, 1, 9, 2, 12, 7)
EOS = (3, 7, 11, 30)


@pytest.fixture(scope="module")
def actor(shallow_actor):
    return shallow_actor


def sample_narrowing(actor, monkeypatch, least, slots, decoding):
    """Return a rollout whose slots narrow down to `~least`."""
    monkeypatch.setattr(slots_lib, "MIN_SLOTS", least)
    monkeypatch.setattr(slots_lib, "MIN_NARROWED_TOKENS", 1)
    sampler = decode_loop.sampler_program(
        actor.decoded.clone(decoding=decoding),
        decode_loop.SamplingOptions(12, 1.0, eos_ids=EOS, slots=slots),
    )
    return jax.device_get(sampler(actor.params, make_prompts(LENGTHS * 3), jax.random.key(0)))


OTHER_NARROWING_CASES = [("cpu", None), ("gpu", None), ("tpu", 12)]


@pytest.fixture(scope="module")
def wide(actor):
    """Return samples of slots that do not narrow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return sample_narrowing(actor, monkeypatch, 99, None, "cpu")


@pytest.mark.parametrize(
    ("decoding", "slots"),
    [
        ("cpu", 12),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHER_NARROWING_CASES),
    ],
)
def test_slots_that_narrow_draw_the_samples_of_those_that_do_not(
    actor, wide, monkeypatch, decoding, slots
):
    """This holds in each layout of the cache, whether or not the cache narrows with the slots."""
    narrowed = sample_narrowing(actor, monkeypatch, 1, slots, decoding)
    for name in ("responses", "lengths", "truncated"):
        np.testing.assert_array_equal(getattr(narrowed, name), getattr(wide, name))
    np.testing.assert_allclose(narrowed.logprobs, wide.logprobs, atol=1e-5)
    assert narrowed.slot_steps[0] < wide.slot_steps[0]


@pytest.mark.parametrize(
    ("slots", "options"),
    [
        (1, {}),
        pytest.param(2, {"n": 3}, marks=pytest.mark.slow),
        pytest.param(2, {"temperature": 0.0}, marks=pytest.mark.exhaustive),
        pytest.param(5, {}, marks=pytest.mark.exhaustive),
        (5, {"n": 3}),
    ],
    ids=str,
)
def test_refilled_slots_draw_the_samples_of_a_static_batch(actor, slots, options):
    prompts = make_prompts(LENGTHS)
    static, refilled = (
        actor.sample(prompts, eos_ids=EOS, slots=s, **options) for s in (None, slots)
    )
    for name in ("responses", "lengths", "truncated"):
        np.testing.assert_array_equal(getattr(refilled, name), getattr(static, name))
    np.testing.assert_allclose(refilled.logprobs, static.logprobs, atol=1e-5)
    assert 1 < len(set(static.lengths.tolist()))
    assert static.lengths.sum() <= refilled.slot_steps[0] <= static.slot_steps[0] + 5 * 12
    if slots == 1:
        assert refilled.slot_steps[0] == static.lengths.sum() < static.slot_steps[0]


def test_prompts_prefilled_in_groups_give_the_same_samples(actor, monkeypatch):
    prompts = make_prompts(LENGTHS)
    whole = actor.sample(prompts, n=2, eos_ids=EOS, slots=4)
    # 3 prompts of width 16 per prefill: the last group is one prompt.
    monkeypatch.setattr(slots_lib, "PREFILL_TOKENS", 48)
    options = decode_loop.SamplingOptions(12, 1.0, n=2, eos_ids=EOS, slots=9)
    cut = decode_loop.sampler_program(actor.decoded, options)(
        actor.params, prompts, jax.random.key(0)
    )
    np.testing.assert_array_equal(cut.responses, whole.responses)
    np.testing.assert_array_equal(cut.lengths, whole.lengths)


def test_samples_of_a_prompt_share_its_prefill(actor, monkeypatch):
    prefilled = []
    original = decode_loop.prefill_group

    def counted(job, state):
        jax.debug.callback(lambda count: prefilled.append(int(count)), state.prefilled)
        return original(job, state)

    monkeypatch.setattr(decode_loop, "prefill_group", counted)
    options = decode_loop.SamplingOptions(12, 1.0, n=4, eos_ids=EOS, slots=8)
    decode_loop.sampler_program(actor.decoded, options)(
        actor.params, make_prompts(LENGTHS), jax.random.key(0)
    ).lengths.block_until_ready()
    jax.effects_barrier()
    # Two prompts for eight slots, four times for seven prompts.
    assert sorted(prefilled) == [0, 2, 4, 6]


def test_the_widths():
    assert slots_lib.slot_widths("cpu", 256, 224) == (256, 192, 128, 64)
    assert slots_lib.slot_widths("cpu", 40, 224) == (40, 30, 20, 10)
    assert slots_lib.slot_widths("cpu", 16, 224) == (16, 12, 8)
    assert slots_lib.slot_widths("cpu", 10, 224) == (10,)
    # cuDNN reads next to nothing of an idle slot.
    assert slots_lib.slot_widths("cudnn", 256, 224) == (256,)


def test_slots_of_short_responses_keep_their_number_so_that_one_loop_is_compiled():
    assert slots_lib.slot_widths("cpu", 256, 64) == (256, 192, 128, 64)
    assert slots_lib.slot_widths("cpu", 256, 63) == (256,)


# Counted steps: verl's lengths

# With an EOS probability of 1 / 453, lengths truncated at 512 have a mean of 307.
VERL_CHANCE = 453


@pytest.fixture(scope="module")
def uniform():
    """Return a model for which all 453 tokens are equally likely."""
    small = {"hidden_size": 2, "intermediate_size": 2, "num_heads": 1, "num_kv_heads": 1}
    architecture = dataclasses.replace(
        tiny.ARCHITECTURE, vocab_size=VERL_CHANCE, head_dim=2, max_position_embeddings=1024, **small
    )
    model = Transformer(architecture, unrolled=True)
    return model, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), decoding_shapes(architecture))


def decoding_shapes(architecture):
    def init(key):
        return unroll_params(heads.init_params(Transformer(architecture), key, "lm"))

    return jax.eval_shape(init, jax.random.key(0))


def oracle_steps(lengths, slots):
    """Return the steps of a schedule that knows the lengths: longest first."""
    loads = [0] * slots
    for length in sorted(lengths.tolist(), reverse=True):
        heapq.heappush(loads, heapq.heappop(loads) + length)
    return max(loads)


@pytest.mark.slow
def test_slot_steps_on_verls_lengths_are_near_an_oracles(uniform):
    """Four samples per slot, as in verl's example."""
    model, params = uniform
    prompts = Prompts(np.zeros((256, 2), np.int32), np.ones(256, np.int32))
    options = decode_loop.SamplingOptions(512, 1.0, eos_ids=(1,), slots=64)
    # With this key the mean of 256 lengths, whose standard error is 11, is within 12 of 307.
    rollout = decode_loop.sampler_program(model, options)(params, prompts, jax.random.key(4))
    lengths, slot_steps = np.asarray(rollout.lengths), int(rollout.slot_steps[0])
    assert 295 < lengths.mean() < 319 and lengths.max() == 512
    oracle = 64 * oracle_steps(lengths, 64)
    assert lengths.sum() < oracle
    assert slot_steps <= 1.05 * oracle
    assert 256 * 512 > 1.6 * oracle  # the cost of a static batch


# Compiled programs


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> tuple[jax.stages.Compiled, Any, DecodeState]:
    """Compile a decode step of a model dominated by its weights and cache, from shapes alone."""
    # Only one read width: the compiler counts all branches of a conditional.
    monkeypatch.setattr(cache, "MIN_READ_WIDTH", 10**6)
    large = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    architecture = dataclasses.replace(
        tiny.ARCHITECTURE, num_layers=2, tied=False, max_position_embeddings=1024, **large
    )
    options = decode_loop.SamplingOptions(480, 1.0, slots=8)
    prompts = make_prompts((3,) * 16, 32)

    def build(params: Any, key: jax.Array) -> slots_lib.DecodeJob:
        return slots_lib.DecodeJob(
            model=Transformer(architecture, unrolled=True),
            options=options,
            params=params,
            prompts=slots_lib.pad_queue(options, prompts, 16),
            keys_N=sampling.sample_keys(key, jnp.arange(16)),
            count=16,
        )

    def initial_state(params: Any, key: jax.Array) -> DecodeState:
        return slots_lib.initial_state(build(params, key))

    def decode(params: Any, key: jax.Array, state: DecodeState) -> DecodeState:
        return decode_loop.decode_step(build(params, key), state)

    key = jax.random.key(0)
    params = decoding_shapes(architecture)
    state = jax.eval_shape(initial_state, params, key)
    return jax.jit(decode, donate_argnums=2).lower(params, key, state).compile(), params, state


def count_bytes(tree: Any) -> int:
    """Return the size of arrays or their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_a_step_reads_weights_and_cache_once(step):
    """The compiler counts 4 bytes for each weight and each key and value of all layers.

    It counts a scatter as if it read the whole cache, although in place it touches only what it
    writes. The difference, measured on a program that only scatters, is subtracted.
    """
    compiled, params, state = step
    needed = count_bytes((params, state.slots.cache))
    new, columns, layer = jnp.zeros((8, 1, 2, 128)), jnp.zeros(8, jnp.int32), state.slots.cache[0]
    write = (
        jax.jit(functools.partial(cache.write_tokens, "cpu"), donate_argnums=0)
        .lower(layer, new, new, columns)
        .compile()
    )
    assert write.memory_analysis().alias_size_in_bytes == count_bytes(layer)
    overcounted = len(state.slots.cache) * (
        write.cost_analysis()["bytes accessed"] - 2 * new.nbytes
    )
    assert needed <= compiled.cost_analysis()["bytes accessed"] - overcounted <= 1.15 * needed


def test_no_cache_is_copied(actor):
    """Neither loops nor steps copy a cache: only the initial zeros are copied."""
    options = decode_loop.SamplingOptions(12, 1.0, eos_ids=EOS, slots=5)
    sampler = decode_loop.sampler_program(actor.decoded, options)
    text = sampler.lower(actor.params, make_prompts(LENGTHS), jax.random.key(0)).compile().as_text()
    loops, entry = text.split("\nENTRY ")
    for shape in (re.escape("f32[5,2,8,28]"), re.escape("f32[5,2,28,8]")):
        assert re.search(shape, loops) and re.search(shape, entry)
        assert not re.findall(rf"= {shape}\S* copy\(", loops)


@pytest.mark.parametrize("decoding", ["gpu", "tpu", "cudnn"])
def test_an_accelerators_cache_is_there_once_and_whole(actor, cudnn_anywhere, decoding):
    """Narrowing does not copy the cache to a narrower one: both would take memory at that time.

    No part is sliced off to be read, and no branch selects one: compilers for accelerators would
    copy it, and a GPU would wait for the host.
    """
    options = decode_loop.SamplingOptions(224, 1.0, eos_ids=EOS, slots=16)
    sampler = decode_loop.sampler_program(actor.decoded.clone(decoding=decoding), options)
    text = sampler.lower(actor.params, make_prompts((3,) * 16, 32), jax.random.key(0)).as_text()
    shapes = ("2x8x256", "2x256x8") if decoding == "gpu" else ("256x2x8",)
    slot_counts = set()
    for line in text.splitlines():
        rows = {
            int(rows)
            for shape in shapes
            for rows in re.findall(rf"tensor<(\d+)x{shape}xf32>", line)
        }
        assert not rows or "stablehlo.slice" not in line
        slot_counts |= rows if "stablehlo.while" in line else set()
    assert slot_counts == {16} and slots_lib.slot_widths("tpu", 16, 224) == (16, 12, 8)
    assert "stablehlo.case" not in text and "stablehlo.if" not in text
