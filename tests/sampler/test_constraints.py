"""Stop strings and a minimum length, against plain loops over text."""

import dataclasses

import jax
import numpy as np
import pytest

from jax_ppo.config.schema import MeshShape
from jax_ppo.runtime.meshes import make_mesh
from jax_ppo.sampler import text_search
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.sampler.text_search import search_for
from tiny_actor import ARCHITECTURE, Actor, make_prompts, place_for_decoding

V = ARCHITECTURE.vocab_size
LENGTHS = (5, 16, 1, 9, 2, 12, 7)
EOS = (3, 7)
# Tokens of one to three letters of a small alphabet, so that strings often span tokens.
LETTERS = "abc"
TOKENS = [
    "".join(LETTERS[(index // 3**place) % 3] for place in range(1 + index % 3)).encode()
    for index in range(V - 4)
]


@pytest.fixture(scope="module")
def actor(shallow_actor):
    return shallow_actor


def text_of(tokens):
    return b"".join(TOKENS[token] for token in tokens if token < len(TOKENS)).decode()


@pytest.mark.parametrize(
    "strings", [("abca",), ("a", "ba"), ("cab", "abcab", "bb"), ("abca", "bc"), ("\u00e9x",)]
)
def test_a_search_finds_what_the_text_contains(strings):
    search = search_for(strings, TOKENS, V)
    rng = np.random.default_rng(0)
    tokens_BxT = rng.integers(0, V, (40, 20))
    states = np.full(40, text_search.START, np.int32)
    for position in range(20):
        states = np.asarray(search.advance(states, tokens_BxT[:, position]))
        for row in range(40):
            texts = text_of(tokens_BxT[row, : position + 1])
            assert (states[row] == search.found_state) == any(s in texts for s in strings)


def test_a_string_of_bytes_that_tokens_split_is_found():
    """The two bytes of a letter may be separate tokens."""
    search = search_for(("\u00e9",), [b"\xc3", b"\xa9", b"\xc3\xa9", b"x"], 5)
    state = np.zeros(1, np.int32)
    for token, found in ((0, False), (4, False), (1, True), (3, True)):
        state = np.asarray(search.advance(state, np.array([token])))
        assert (state[0] == search.found_state) == found


@pytest.mark.parametrize("slots", [pytest.param(None, marks=pytest.mark.exhaustive), 3])
def test_a_response_ends_with_the_token_that_completes_a_stop_string(actor, slots):
    free = actor.sample(make_prompts(LENGTHS), n=3, eos_ids=EOS)
    stop = ("cab", "bb")
    search = search_for(stop, TOKENS, V)
    stopped = actor.sample(make_prompts(LENGTHS), n=3, eos_ids=EOS, stop=search, slots=slots)
    lengths = []
    for row, length in zip(free.responses, free.lengths, strict=True):
        ends = [end for end in range(1, length + 1) if any(s in text_of(row[:end]) for s in stop)]
        lengths.append(ends[0] if ends else length)
    np.testing.assert_array_equal(stopped.lengths, lengths)
    assert sum(lengths) < sum(free.lengths)
    inside = np.arange(12) < np.array(lengths)[:, None]
    np.testing.assert_array_equal(stopped.responses, np.where(inside, free.responses, 0))
    np.testing.assert_allclose(stopped.logprobs, np.where(inside, free.logprobs, 0), atol=1e-5)
    cut = [length < free_length for length, free_length in zip(lengths, free.lengths, strict=True)]
    assert not stopped.truncated[cut].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probs_stay_those_of_the_policy(actor, temperature):
    prompts = make_prompts(LENGTHS)
    ends = tuple(range(0, V, 2))
    rollout = actor.sample(prompts, temperature=temperature, eos_ids=ends, min_new_tokens=4)
    assert (rollout.lengths >= 5).all()
    inside = rollout.action_mask
    expected = actor.logprobs(rollout)[inside]
    np.testing.assert_allclose(rollout.logprobs[inside], expected, atol=1e-4)


def test_greedy_decoding_takes_the_likeliest_token_that_is_permitted(actor):
    prompts = make_prompts(LENGTHS)
    ends = tuple(range(0, V, 2))
    rollout = actor.sample(prompts, temperature=0.0, eos_ids=ends, min_new_tokens=12)
    logits = np.array(actor.full_logits(prompts, rollout.responses))
    assert (logits.argmax(-1) % 2 == 0).any()
    logits[..., ends] = -np.inf
    inside = np.arange(12) < rollout.lengths[:, None]
    np.testing.assert_array_equal(rollout.responses[inside], logits.argmax(-1)[inside])


def test_an_end_is_drawn_and_searched_for_only_after_the_minimum(actor):
    every = tuple(range(0, V, 2))
    prompts = make_prompts(LENGTHS)
    rollout = actor.sample(prompts, n=3, eos_ids=every, min_new_tokens=3)
    early = rollout.responses[:, :3]
    assert (rollout.lengths > 3).all() and (early % 2 == 1).all()
    search = search_for(("a", "b", "c"), TOKENS, V)
    stopped = actor.sample(prompts, n=3, stop=search, min_new_tokens=3)
    # All tokens but four are text.
    assert stopped.lengths.min() == 4
    for row, length in zip(stopped.responses, stopped.lengths, strict=True):
        assert not text_of(row[3 : length - 1])


@pytest.mark.slow
def test_devices_that_split_rows_and_vocabulary_constrain_alike():
    actor = Actor(dataclasses.replace(ARCHITECTURE, vocab_size=68))
    mesh = make_mesh(MeshShape(data=2, fsdp=2, model=2))
    prompts = make_prompts(range(1, 17))
    options = {
        "n": 2,
        "eos_ids": tuple(range(0, 68, 2)),
        "stop": search_for(("cab", "bb"), TOKENS, 68),
        "min_new_tokens": 2,
    }
    with jax.set_mesh(mesh):
        split = sampler_program(actor.decoded, SamplingOptions(12, 1.0, slots=3, **options))(
            *place_for_decoding(mesh, actor, prompts)
        )
    alone = actor.sample(prompts, **options)
    np.testing.assert_array_equal(split.responses, alone.responses)
    np.testing.assert_allclose(split.logprobs, alone.logprobs, atol=1e-5)
