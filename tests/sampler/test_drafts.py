"""Responses that older weights drafted become those that the newest weights would draw."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import tiny
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.sampler import drafts as drafts_lib
from jax_ppo.sampler import sampling
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.drafts import continuation_options, draft_program
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.text_search import search_for
from tiny_actor import ARCHITECTURE, Actor, T, make_prompts

LENGTHS = (5, 16, 1, 9, 2, 12, 7)
EOS = (3, 7, 11)
OPTIONS = {"eos_ids": EOS, "slots": 3, "n": 2}
TOKENS = [bytes([ord("a") + index % 3]) for index in range(ARCHITECTURE.vocab_size)]
CONSTRAINTS = {
    "top_k": 20,
    "min_new_tokens": 3,
    "stop": search_for(("abca", "bbb"), TOKENS, ARCHITECTURE.vocab_size),
}


@pytest.fixture(scope="module")
def actor():
    """Return an actor of one layer, which compiles fast."""
    return Actor(dataclasses.replace(ARCHITECTURE, num_layers=1))


def perturb(actor, size, seed=1):
    """Return an actor whose weights differ from another's by this share of their deviation."""
    newer = Actor(actor.scored.architecture)
    leaves, structure = jax.tree.flatten(actor.params)
    rng = np.random.default_rng(seed)
    newer.params = jax.tree.unflatten(
        structure, [x + size * np.std(x) * rng.normal(size=x.shape) for x in leaves]
    )
    newer.params = jax.tree.map(lambda x: x.astype(jnp.float32), newer.params)
    return newer


@functools.cache
def completion(architecture, options):
    return draft_program(Transformer(architecture, unrolled=True), options)


def draw_keys(drafts, seed=0):
    keys = sampling.sample_keys(jax.random.key(seed), jnp.arange(len(drafts.lengths)))
    return jax.random.key_data(keys)


def complete(actor, drafts, seed=0, temperature=1.0, longest=T, **options):
    """Return completed drafts and the numbers of accepted tokens as NumPy arrays."""
    program = completion(
        actor.scored.architecture, SamplingOptions(longest, temperature, **options)
    )
    drafts = dataclasses.replace(drafts, slot_steps=None)
    return jax.device_get(program(actor.params, drafts, draw_keys(drafts, seed)))


def assert_same_responses(completed, expected):
    for name in ("responses", "lengths", "truncated", "action_mask"):
        np.testing.assert_array_equal(getattr(completed, name), getattr(expected, name), name)
    np.testing.assert_allclose(completed.logprobs, expected.logprobs, atol=1e-5)
    assert completed.versions is None


@pytest.mark.parametrize(
    "constraints", [{}, pytest.param(CONSTRAINTS, marks=pytest.mark.slow)], ids=["free", "all"]
)
def test_completed_drafts_are_what_the_newest_weights_draw(actor, constraints, monkeypatch):
    # Several groups of drafts, of which the last one is padded.
    monkeypatch.setattr(drafts_lib, "PREFILL_TOKENS", 60)
    newer = perturb(actor, 0.03 if constraints else 0.1)
    options = OPTIONS | constraints
    drafts = actor.sample(make_prompts(LENGTHS), **options)
    expected = newer.sample(make_prompts(LENGTHS), **options)
    completed, accepted = complete(newer, drafts, **options)
    assert_same_responses(completed, expected)
    # Kept up to the first token that differs, or to the end of what agrees.
    differs = drafts.responses != expected.responses
    first = np.where(differs.any(1), differs.argmax(1), T)
    np.testing.assert_array_equal(accepted, np.minimum(first, drafts.lengths))
    kept = accepted == drafts.lengths
    assert kept.any() and (accepted == 0).any(), "both kinds occur"
    assert ((accepted > 0) & ~kept).any() and (drafts.lengths != expected.lengths).any()
    # Slots draw the rest alone.
    drawn = (completed.lengths - accepted).sum()
    assert drawn <= completed.slot_steps.sum() < 3 * drawn


def test_drafts_of_the_same_weights_are_kept_without_a_step(actor):
    drafts = actor.sample(make_prompts(LENGTHS), **OPTIONS)
    completed, accepted = complete(actor, drafts, **OPTIONS)
    assert_same_responses(completed, drafts)
    np.testing.assert_array_equal(accepted, drafts.lengths)
    assert completed.slot_steps.sum() == 0


@pytest.mark.slow
def test_any_draft_is_completed_to_the_same_response(actor):
    """Tokens after an EOS, responses cut before their end, and tokens drawn uniformly."""
    prompts = make_prompts(LENGTHS)
    expected = actor.sample(prompts, **OPTIONS)
    count = len(expected.lengths)
    rng = np.random.default_rng(0)
    drafts = dataclasses.replace(
        expected,
        responses=rng.integers(0, ARCHITECTURE.vocab_size, (count, T)).astype(np.int32),
        lengths=rng.integers(1, T + 1, count).astype(np.int32),
        truncated=np.ones(count, bool),
    )
    drafts.responses[::2] = expected.responses[::2]
    completed, accepted = complete(actor, drafts, **OPTIONS)
    assert_same_responses(completed, expected)
    assert 0 < accepted.sum() < drafts.lengths.sum()
    # What these weights draw after an EOS, too.
    endless = actor.sample(prompts, **OPTIONS | {"eos_ids": ()})
    assert (endless.lengths > expected.lengths).any()
    completed, accepted = complete(actor, endless, **OPTIONS)
    assert_same_responses(completed, expected)
    np.testing.assert_array_equal(accepted, expected.lengths)


@pytest.mark.slow
def test_responses_have_the_new_distribution_by_enumeration():
    """All responses of up to three tokens of five, and a chi-square test of many drafts."""
    small = dataclasses.replace(ARCHITECTURE, vocab_size=5)
    older = Actor(small)
    newer = perturb(older, 0.15)
    newer.stacked = {
        **{name: newer.params[name] for name in newer.stacked if name != "layers"},
        "layers": jax.tree.map(
            lambda *x: jnp.stack(x), *(newer.params[f"layer_{i}"] for i in range(small.num_layers))
        ),
    }
    longest, eos = 3, 1
    prompts = make_prompts((4,), P=4)
    prompts = dataclasses.replace(prompts, tokens=prompts.tokens % small.vocab_size)
    count = 6000
    options = {"n": count, "eos_ids": (eos,), "slots": 256}
    drafts = older.sample(prompts, max_response_length=longest, **options)
    completed, accepted = complete(newer, drafts, longest=longest, **options)
    # The probability of each response under the newer weights, from passes over whole rows.
    every = np.array(list(itertools.product(range(5), repeat=longest)), np.int32)
    repeated = jax.tree.map(lambda x: np.repeat(x, len(every), axis=0), prompts)
    logprobs = np.asarray(jax.nn.log_softmax(newer.full_logits(repeated, every)))
    logprobs = np.take_along_axis(logprobs, every[..., None], 2)[..., 0]
    probabilities = {}
    for tokens, logprob in zip(every.tolist(), logprobs, strict=True):
        length = tokens.index(eos) + 1 if eos in tokens else longest
        probabilities[tuple(tokens[:length])] = np.exp(logprob[:length].sum())
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-4)

    def p_value(rollout):
        rows = zip(rollout.responses.tolist(), rollout.lengths, strict=True)
        drawn = [tuple(tokens[:length]) for tokens, length in rows]
        counts = np.array([drawn.count(response) for response in probabilities])
        assert counts.sum() == count
        expected = np.array(list(probabilities.values()), np.float64)
        expected *= count / expected.sum()
        assert expected.min() > 5 and len(expected) > 80
        return scipy.stats.chisquare(counts, expected).pvalue

    assert p_value(completed) > 1e-3
    # Neither the drafts nor what is left of them has that distribution.
    assert p_value(drafts) < 1e-9 and 0.2 < (accepted == drafts.lengths).mean() < 0.8
    # With other random numbers than the drafts', they have it too. But then a draft is kept whole
    # only with the probability that the new weights give it.
    anew, kept = complete(newer, drafts, seed=1, longest=longest, **options)
    assert p_value(anew) > 1e-3
    rows = zip(drafts.responses.tolist(), drafts.lengths, strict=True)
    expected = np.mean([probabilities[tuple(tokens[:length])] for tokens, length in rows])
    assert (kept == drafts.lengths).mean() == pytest.approx(expected, abs=0.01)
    assert kept.sum() < 0.5 * accepted.sum()


@pytest.mark.parametrize("stage_length", [None, 4])
def test_the_continuation_takes_the_memory_of_the_slots(stage_length):
    """Six slots of 8 + 4 or 8 + 12 columns have room for 3 or 6 of 8 + 12."""
    options = SamplingOptions(12, 1.0, slots=6, stage_length=stage_length, n=4)
    continued = continuation_options(options, prompt_length=8)
    assert continued.slots == (6 if stage_length is None else 3)
    assert (continued.n, continued.stage_length) == (1, 12)


@pytest.mark.slow
def test_devices_complete_alike_however_they_divide_drafts():
    """Seven prompts on four devices are padded; two devices split each vocabulary."""
    architecture = dataclasses.replace(ARCHITECTURE, vocab_size=64)
    older = Actor(architecture)
    newer = Actor(architecture)
    newer.stacked = jax.tree.map(lambda x: x * 1.03, older.stacked)
    options = SamplingOptions(T, 1.0, eos_ids=EOS, slots=2)
    results = []
    for shape in ({"data": 1}, {"data": 2, "fsdp": 2, "model": 2}):
        mesh = tiny.make_mesh(int(np.prod(list(shape.values()))), **shape)
        layout = sharding.tree_shardings(mesh, older.stacked, sharding.TRAIN_RULES)
        prompts = placement.place(make_prompts(LENGTHS), sharding.batch_rows(mesh, len(LENGTHS)))
        key = jax.device_put(jax.random.key(0), sharding.replicated(mesh))
        with jax.set_mesh(mesh):
            engine = BuiltInEngine(mesh, Transformer(architecture), older.stacked)
            engine.update_weights(jax.device_put(older.stacked, layout))
            drafts = engine.generate(prompts, key, options)
            engine.update_weights(jax.device_put(newer.stacked, layout))
            expected = jax.device_get(engine.generate(prompts, key, options))
            keys = jax.device_put(draw_keys(drafts), sharding.batch_rows(mesh, len(LENGTHS)))
            completed, accepted = jax.device_get(engine.complete_drafts(drafts, keys, options))
        assert_same_responses(completed, expected)
        assert 0 < accepted.sum() < completed.lengths.sum()
        results.append((completed.responses, accepted))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
