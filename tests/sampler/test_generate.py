import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.models.transformer import Transformer
from jax_ppo.sampler import decode_loop
from jax_ppo.types import Prompts
from tiny_actor import ARCHITECTURE, Actor, T, make_prompts

FIELDS = ("responses", "lengths", "truncated", "logprobs")


def select_rows(rollout, which=slice(None)):
    """Return responses, lengths, flags and log-probs of some rows."""
    return {name: getattr(rollout, name)[which] for name in FIELDS}


def assert_same(ours, theirs):
    """Require equal rows, of rollouts or of what `select_rows` returns."""
    ours, theirs = (x if isinstance(x, dict) else select_rows(x) for x in (ours, theirs))
    for name in FIELDS[:3]:
        np.testing.assert_array_equal(ours[name], theirs[name])
    np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-5)


def expected_with_eos(rollout, eos_ids, T):
    """Return the result of sampling with EOS, computed from a rollout without.

    Tokens are drawn by address, so that a response is the same up to its first EOS.
    """
    is_eos = np.isin(rollout.responses[:, :T], eos_ids)
    truncated = ~is_eos.any(1)
    lengths = np.where(truncated, T, is_eos.argmax(1) + 1)
    mask = np.arange(T) < lengths[:, None]
    responses, logprobs = (
        np.where(mask, x[:, :T], 0) for x in (rollout.responses, rollout.logprobs)
    )
    return dict(zip(FIELDS, (responses, lengths, truncated, logprobs), strict=True))


@pytest.mark.parametrize(
    "temperature, filters", [(1.0, {}), (0.6, {}), (0.6, {"top_k": 20, "top_p": 0.9})]
)
def test_logprobs_are_those_of_a_full_forward_pass(actor, prompts, temperature, filters):
    """They are those before the filters."""
    rollout = actor.sample(prompts, temperature=temperature, n=2, **filters)
    np.testing.assert_allclose(rollout.logprobs, actor.logprobs(rollout, temperature), atol=1e-5)
    # Neither certain nor uniform.
    assert rollout.logprobs.max() < -1e-3 and rollout.logprobs.mean() > -np.log(61)


def test_greedy_is_the_argmax_of_a_full_forward_pass(actor, prompts):
    rollout = actor.sample(prompts, temperature=0.0)
    logits = actor.full_logits(prompts, rollout.responses)
    np.testing.assert_array_equal(rollout.responses, logits.argmax(-1))
    np.testing.assert_allclose(rollout.logprobs, jax.nn.log_softmax(logits).max(-1), atol=1e-5)


def test_the_contract(actor, prompts):
    rollout = actor.sample(prompts, n=2)
    B = 2 * len(prompts.lengths)
    np.testing.assert_array_equal(rollout.prompts.tokens, np.repeat(prompts.tokens, 2, 0))
    np.testing.assert_array_equal(rollout.prompts.lengths, np.repeat(prompts.lengths, 2))
    expected = {
        "responses": ((B, T), np.int32),
        "lengths": ((B,), np.int32),
        "logprobs": ((B, T), np.float32),
        "truncated": ((B,), np.bool_),
    }
    for name, (shape, dtype) in expected.items():
        assert (getattr(rollout, name).shape, getattr(rollout, name).dtype) == (shape, dtype), name


def test_bfloat16_computes_its_logprobs_in_float32(actor, prompts):
    model = Transformer(ARCHITECTURE, jnp.bfloat16, unrolled=True)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), actor.params)
    rollout = decode_loop.sampler_program(model, decode_loop.SamplingOptions(T, 1.0))(
        params, prompts, jax.random.key(0)
    )
    assert rollout.logprobs.dtype == jnp.float32
    assert np.abs(rollout.logprobs - actor.logprobs(rollout)).mean() < 0.1
    assert (rollout.logprobs.astype(jnp.bfloat16).astype(jnp.float32) != rollout.logprobs).any()


# Tokens by address


def test_samples_depend_on_key_and_index(actor):
    prompts = make_prompts((7,) * 4)
    same = Prompts(np.repeat(prompts.tokens[:1], 4, 0), prompts.lengths)
    first, again, later = actor.sample(same), actor.sample(same), actor.sample(same, seed=1)
    assert_same(first, again)
    responses = {r.tobytes() for r in (*first.responses, *later.responses)}
    assert len(responses) == 8  # the same prompt, four times in a step and in two steps


def test_samples_do_not_depend_on_the_batch_or_the_row(actor, prompts):
    rollout = actor.sample(prompts)
    for b in range(4):
        for row in range(b + 1):
            others = make_prompts((11, 2, 3, 16), seed=5 + row)
            others.tokens[row], others.lengths[row] = prompts.tokens[b], prompts.lengths[b]
            ours = select_rows(actor.sample(others, first=b - row), row)
            assert_same(ours, select_rows(rollout, b))


def test_a_batch_can_be_cut_up_and_n_laid_out(actor, prompts):
    whole = actor.sample(prompts, n=2)
    assert len({r.tobytes() for r in whole.responses}) == 8
    for start in (0, 2):
        half = Prompts(prompts.tokens[start : start + 2], prompts.lengths[start : start + 2])
        half = actor.sample(half, n=2, first=2 * start)
        assert_same(half, select_rows(whole, slice(2 * start, 2 * start + 4)))
    assert_same(actor.sample(whole.prompts), whole)


def test_what_stands_behind_a_prompt_is_never_read(actor, prompts):
    rollout = actor.sample(prompts)
    for garbage in (60, -7, 10**9):
        inside = np.arange(16) < prompts.lengths[:, None]
        tokens = np.where(inside, prompts.tokens, garbage).astype(np.int32)
        assert_same(actor.sample(Prompts(tokens, prompts.lengths)), rollout)


# The end of a response


@pytest.fixture
def eos_ids(actor, prompts):
    """The first token of row 0 and the third of row 3 in a rollout without EOS."""
    responses = actor.sample(prompts).responses
    return int(responses[0, 0]), int(responses[3, 2])


@pytest.mark.parametrize("length", [T, 3])
def test_eos_is_kept_and_nothing_comes_after_it(actor, prompts, eos_ids, length):
    rollout = actor.sample(prompts, max_response_length=length, eos_ids=eos_ids)
    assert_same(rollout, expected_with_eos(actor.sample(prompts), eos_ids, length))
    assert rollout.lengths[0] == 1 and rollout.responses[0, 0] == eos_ids[0]
    assert rollout.logprobs[0, 0] < 0
    # For length 3, this EOS is in the last column.
    assert rollout.lengths[3] == 3 and not rollout.truncated[3]
    assert rollout.truncated.any() and (rollout.lengths[rollout.truncated] == length).all()


def test_one_token_is_a_response(actor, prompts):
    rollout = actor.sample(prompts, max_response_length=1)
    assert_same(rollout, expected_with_eos(actor.sample(prompts), (), 1))


def test_pad_may_be_eos(actor, prompts, eos_ids):
    first, second, third = (
        actor.sample(make_prompts(prompts.lengths, pad=pad), eos_ids=eos_ids)
        for pad in (*eos_ids, min(set(range(61)) - set(eos_ids)))
    )
    assert_same(first, third)
    assert_same(second, third)


def test_eos_in_a_prompt_is_a_token_like_others(actor, prompts, eos_ids):
    ends = np.arange(16) == prompts.lengths[:, None] - 1
    prompts = Prompts(np.where(ends, eos_ids[1], prompts.tokens).astype(np.int32), prompts.lengths)
    expected = expected_with_eos(actor.sample(prompts), eos_ids, T)
    assert_same(actor.sample(prompts, eos_ids=eos_ids), expected)


def test_the_loop_ends_with_the_last_row(actor, prompts):
    eos_ids = tuple(map(int, actor.sample(prompts).responses[:, 3]))
    rollout = actor.sample(prompts, eos_ids=eos_ids)
    assert rollout.slot_steps.tolist() == [4 * rollout.lengths.max()] and rollout.lengths.max() <= 4


# Compiled programs


def test_one_program_a_bucket_and_the_same_samples_from_each(actor):
    sampler = decode_loop.sampler_program(actor.decoded, decode_loop.SamplingOptions(4, 1.0))
    cases = (((5, 16), 16, 1), ((2, 3), 16, 1), ((2, 3), 32, 2), ((30, 1), 32, 2), ((9, 9), 16, 2))
    for lengths, P, programs in cases:
        for seed in range(2):
            sampler(actor.params, make_prompts(lengths, P), jax.random.key(seed), 100 * seed)
        assert sampler.jitted._cache_size() == programs
    narrow, wide = (
        sampler(actor.params, make_prompts((5, 16), P, pad), jax.random.key(7), 0)
        for P, pad in ((16, 0), (32, 60))
    )
    assert_same(narrow, wide)


def test_nothing_has_the_size_of_batch_by_time_by_vocabulary(actor):
    T, prompts = 40, make_prompts((16,) * 3)

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (x.aval.size for x in equation.outvars if hasattr(x.aval, "size"))
            for value in jax.tree.leaves(equation.params):  # the bodies of loops and inner jits
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    yield from sizes(getattr(value, "jaxpr", value))

    options = decode_loop.SamplingOptions(T, 0.7, top_k=9, top_p=0.9, n=2)
    traced = jax.make_jaxpr(
        functools.partial(decode_loop.generate_responses, actor.decoded, options)
    )
    # [B, T, V] would be 14,640 numbers; a layer's cache is 5,376, its largest product 10,752.
    jaxpr = traced(actor.params, prompts, jnp.arange(6), jax.random.key(0)).jaxpr
    assert max(sizes(jaxpr)) < 6 * 40 * 61


def test_options_are_the_identity_of_a_program():
    options = decode_loop.SamplingOptions(4, 1.0, eos_ids=(1, 2))
    assert hash(options) == hash(dataclasses.replace(options))
    assert options != dataclasses.replace(options, eos_ids=(1,))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_without_text_are_never_drawn(prompts, temperature):
    """Probabilities are those of the other ids alone, as in training."""
    actor = Actor(dataclasses.replace(ARCHITECTURE, num_layers=1, num_ids=9))
    whole = Actor(dataclasses.replace(ARCHITECTURE, num_layers=1))
    rollout = actor.sample(prompts, temperature=temperature, n=4)
    assert set(rollout.responses.ravel()) <= set(range(9))
    logits = whole.full_logits(rollout.prompts, rollout.responses)
    assert logits.argmax(-1).max() >= 9
    logprobs = np.asarray(jax.nn.log_softmax(logits[..., :9]))
    expected = np.take_along_axis(logprobs, rollout.responses[..., None], 2)[..., 0]
    np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-5)
