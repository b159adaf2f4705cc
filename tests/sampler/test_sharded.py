"""Eight devices draw the samples of one; no row leaves its device, and no logits do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hlo import read_collectives
from jax_ppo.config.schema import MeshShape
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.runtime.parallelism.vocabulary import WHOLE, split_vocabulary
from jax_ppo.sampler import sampling
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.sampler.filters import Filters
from tiny_actor import ARCHITECTURE, Actor, make_prompts, place_for_decoding

SHAPE_AXES = ("data", "fsdp", "model")
OPTIONS = SamplingOptions(12, 1.0, n=2, eos_ids=(3, 7, 11), slots=3)


@pytest.fixture(scope="module")
def actor():
    """An actor with two key-value heads and a vocabulary that four devices split.

    The last of them have rows that are never drawn.
    """
    return Actor(dataclasses.replace(ARCHITECTURE, vocab_size=68, num_ids=45))


@pytest.fixture(scope="module", params=[(8, 1, 1), (2, 2, 2), (2, 1, 4)], ids=str)
def split(actor, request):
    """Return the samples on a mesh of eight devices, and the compiled text."""
    shape = dict(zip(SHAPE_AXES, request.param, strict=True))
    mesh = meshes.make_mesh(MeshShape(**shape))
    args = place_for_decoding(mesh, actor, make_prompts(range(1, 17)))
    with jax.set_mesh(mesh):
        sampler = sampler_program(actor.decoded, OPTIONS)
        rollout = sampler(*args)
        return rollout, sampler.lower(*args).compile().as_text()


def test_eight_devices_draw_the_samples_of_one(actor, split):
    alone = sampler_program(actor.decoded, OPTIONS)(
        actor.params, make_prompts(range(1, 17)), jax.random.key(0)
    )
    rollout, _ = split
    for name in ("responses", "lengths", "truncated"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(alone, name))
    np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-5)
    assert 0 < np.asarray(rollout.truncated).sum() < 32
    assert np.max(rollout.responses) == 44


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"data": 8}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "model": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_prompts_that_the_devices_do_not_divide_get_the_samples_of_one(actor, shape):
    """Thirteen prompts: some devices have padding, which costs no decoding."""
    prompts = make_prompts(range(1, 14))
    alone = sampler_program(actor.decoded, OPTIONS)(actor.params, prompts, jax.random.key(0))
    mesh = meshes.make_mesh(MeshShape(**shape))
    with jax.set_mesh(mesh):
        rollout = sampler_program(actor.decoded, OPTIONS)(*place_for_decoding(mesh, actor, prompts))
    assert len(rollout.lengths) == 26 and rollout.responses.sharding.is_fully_replicated
    for name in ("responses", "lengths", "truncated", "action_mask"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(alone, name))
    np.testing.assert_array_equal(rollout.prompts.tokens, alone.prompts.tokens)
    if shape == {"data": 8}:
        # Two prompts on each device but the seventh, which has one, and the last.
        steps = np.asarray(rollout.slot_steps)
        assert steps[7] == 0 and (steps[:7] > 0).all()


def test_shards_of_rows_say_nothing_to_each_other(split):
    """Each shard of rows ends with its own samples.

    Where matrices are split, all shards continue together.
    """
    rollout, text = split
    shards = len(rollout.slot_steps)
    assert {shard.data.shape for shard in rollout.responses.addressable_shards} == {
        (32 // shards, 12)
    }
    steps = np.asarray(rollout.slot_steps)
    assert (steps >= np.asarray(rollout.lengths).reshape(shards, -1).sum(1)).all()
    collectives = read_collectives(text)
    if shards == 8:
        assert not collectives and len(set(steps.tolist())) > 1
        return
    assert "all-reduce" in {x.kind for x in collectives} and len(set(steps.tolist())) == 1
    # Neither logits [B, V] nor the part of one device moves.
    assert not {17, 34, 68} & {size for x in collectives for shape in x.shapes for size in shape}
    # Devices that share a key-value head compute it, and receive no part of it.
    assert "all-gather" not in {x.kind for x in collectives}


@pytest.mark.parametrize(
    "options",
    [(0.0,), (1.0,), (0.7, 40, 1.0), (1.0, -1, 0.8), (1.3, 300, 0.95)],
    ids=["greedy", "plain", "top_k", "top_p", "both"],
)
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 2)], ids=str)
def test_devices_that_split_the_vocabulary_draw_the_tokens_of_one(options, shape):
    """V = 5,000 has blocks of 128 tokens, which neither 625 nor 2,500 is a multiple of."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (64, 5000)).astype(np.float32)
    logits[:, [3, 700, 4999]] = logits.max(1, keepdims=True) - 1e-3
    # In the first rows the likeliest tokens are several, of which greedy takes the first.
    logits[:32, [3, 700, 4999]] += 1
    uniforms = rng.random((64, 2)).astype(np.float32)
    whole = jax.jit(sampling.sample_tokens, static_argnames="filters")

    def split(logits, uniforms, shards):
        return sampling.sample_tokens(logits, uniforms, filters=Filters(*options), shards=shards)

    mesh = meshes.make_mesh(MeshShape(**dict(zip(SHAPE_AXES, shape, strict=True))))
    layout = NamedSharding(mesh, PartitionSpec(meshes.ROWS, "model"))
    with jax.set_mesh(mesh):
        program = jax.jit(split_vocabulary(split))
        arguments = jax.device_put(logits, layout), placement.place(uniforms, sharding.rows(mesh))
        compiled = program.lower(*arguments).compile()
        tokens, logprobs = compiled(*arguments)
    expected_tokens, expected_logprobs = whole(logits, uniforms, filters=Filters(*options))
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-6)
    assert options != (0.0,) or (np.asarray(tokens)[:32] == 3).all()
    # Per row: 40 weights of blocks, 128 of tokens, and a few numbers.
    rows = 64 // (shape[0] * shape[1])
    moved = sum(x.bytes for x in read_collectives(compiled.as_text()))
    assert 0 < moved <= 4 * rows * (40 + 128 + 12)


def test_some_devices_search_all_of_their_tokens_while_others_need_not():
    """Rows of the first two devices are flat; of 16,500 tokens each has 256 blocks of 8 tokens."""
    rng = np.random.default_rng(0)
    scales = np.where(np.arange(8) < 2, 0.5, 5.0)[:, None]
    logits, uniforms = scales * rng.normal(0, 1, (8, 33_000)), rng.random((8, 2))

    def draw(logits, uniforms, shards):
        return sampling.sample_tokens(
            logits, uniforms, filters=Filters(1.0, 15_000, 0.8), shards=shards
        )

    arguments = jnp.float32(logits), jnp.float32(uniforms)
    whole = jax.jit(functools.partial(draw, shards=WHOLE))(*arguments)
    with jax.set_mesh(meshes.make_mesh(MeshShape(data=4, model=2))):
        layout = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(meshes.ROWS, "model"))
        logits = jax.device_put(arguments[0], layout)
        split = jax.jit(split_vocabulary(draw))(logits, arguments[1])
    np.testing.assert_array_equal(split.tokens, whole.tokens)
    # Flat rows keep more tokens than the blocks have that are read first.
    weights = np.sort(np.exp(np.asarray(arguments[0], np.float64)))[:, ::-1]
    counts = (np.cumsum(weights, 1) < 0.8 * weights.sum(1, keepdims=True)).sum(1)
    assert (counts[:2] > 2 * 256).all() and (counts[2:] < 256).all()


def test_a_nan_on_one_device_gives_a_token_of_the_vocabulary_and_shows_in_the_log_prob():
    logits = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    logits[0, 7] = np.nan
    with jax.set_mesh(meshes.make_mesh(MeshShape(data=1, model=8))):
        for temperature in (0.0, 1.0):

            def sample(logits, uniforms, shards, temperature=temperature):
                return sampling.sample_tokens(
                    logits, uniforms, filters=Filters(temperature), shards=shards
                )

            program = jax.jit(split_vocabulary(sample))
            tokens, logprobs = program(jnp.asarray(logits), jnp.full((2, 2), 0.5))
            assert 0 <= tokens[0] < 64 and np.isnan(logprobs[0]) and np.isfinite(logprobs[1])


def test_a_vocabulary_that_no_devices_divide_is_whole_on_each():
    """Regression: one token added to a tokenizer was refused."""
    odd = Actor(dataclasses.replace(ARCHITECTURE, vocab_size=69))
    mesh = meshes.make_mesh(MeshShape(data=2, fsdp=2, model=2))
    prompts = make_prompts(range(1, 17))
    params, *others = place_for_decoding(mesh, odd, prompts)
    assert params["embed"]["embedding"].sharding.spec[0] is None
    sampler = sampler_program(odd.decoded, OPTIONS)
    with jax.set_mesh(mesh):
        rollout = sampler(params, *others)
    alone = sampler(odd.params, prompts, jax.random.key(0))
    np.testing.assert_array_equal(rollout.responses, alone.responses)
    np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 4)], ids=str)
def test_attention_that_no_compiler_can_split_is_run_by_each_device(actor, cudnn_anywhere, shape):
    """Rows and heads are split; each device runs its own."""
    mesh = meshes.make_mesh(MeshShape(**dict(zip(SHAPE_AXES, shape, strict=True))))
    prompts = make_prompts(range(1, 17))
    with jax.set_mesh(mesh):
        sampler = sampler_program(actor.decoded.clone(decoding="cudnn"), OPTIONS)
        rollout = sampler(*place_for_decoding(mesh, actor, prompts))
    alone = sampler_program(actor.decoded, OPTIONS)(actor.params, prompts, jax.random.key(0))
    np.testing.assert_array_equal(rollout.responses, alone.responses)
    # Another layout rounds otherwise: by 2.4e-6 of a log-prob, measured.
    np.testing.assert_allclose(rollout.logprobs, alone.logprobs, rtol=5e-6, atol=1e-5)
