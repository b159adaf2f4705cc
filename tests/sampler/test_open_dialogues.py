"""Partial rollouts of dialogues, which stay open between calls, within turns and observations."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.environments.host import HostEnvironment
from jax_ppo.environments.protocol import FormerContext, NewContext
from jax_ppo.environments.recorded_turns import read_turns
from jax_ppo.sampler import sampling
from jax_ppo.sampler.continuation import (
    begin_dialogues,
    begin_draws,
    begin_responses,
    continuation_program,
    has_ended,
)
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.environment import NEW_CONTEXT, PerDialogue
from jax_ppo.types import Example
from tiny_actor import ARCHITECTURE, HYBRID, Actor, make_prompts

V, T = ARCHITECTURE.vocab_size, 32
LENGTHS = (5, 16, 1, 9, 2, 12, 7)
EOS = (3, 7, 11)
LENGTH = 4  # tokens of a call


def step(state, turn, length):
    """Answer with up to three tokens, by chance and by what was seen; end some dialogues."""
    row, turns, key = state
    total = turn.sum() + row + jax.random.bits(jax.random.fold_in(key, turns)) % 100
    observation = ((total + jnp.arange(3) * 5) % V).astype(jnp.int32)
    ends = (row == 3) & (turns == 2)
    return (row, turns + 1, key), observation, total % 4, 0.5 * length + turns, ends


def branch(state, turn, length):
    """Do that in new and in former contexts."""
    state, observation, length, reward, ends = step(state, turn, length)
    context = jnp.array([NEW_CONTEXT, 1, 0, NEW_CONTEXT, 0, 2, 1])[(state[1] - 1) % 7]
    length = jnp.where(context == NEW_CONTEXT, jnp.maximum(length, 1), length)
    return state, observation, length, reward, ends, context


def begin(row, key):
    return row, jnp.int32(0), key


PLAIN = PerDialogue(begin, step, 3, metrics=lambda state: {"turns": state[1]})
BRANCHING = PerDialogue(begin, branch, 3)
CASES = {
    "plain": {"environment": PLAIN, "max_turn_length": 5},
    "few turns": {"environment": PLAIN, "max_turn_length": 3, "max_turns": 3},
    "contexts": {"environment": BRANCHING, "max_turn_length": 3, "max_contexts": 3},
}


@functools.cache
def make_actor(architecture, seed=0):
    actor = Actor(architecture)
    actor.stacked, actor.params = actor.init(jax.random.key(seed))
    return actor


@functools.cache
def make_continuation(architecture, options):
    return continuation_program(make_actor(architecture).decoded, options)


def make_options(**case):
    return SamplingOptions(T, 1.0, eos_ids=EOS, slots=3, partial_length=LENGTH, **case)


def prompts_with_rows():
    return dataclasses.replace(make_prompts(LENGTHS), rows=np.arange(len(LENGTHS), dtype=np.int32))


def begin_all(options):
    numbers = jnp.arange(len(LENGTHS))
    draws = begin_draws(sampling.sample_keys(jax.random.key(0), numbers))
    rollout = begin_responses(prompts_with_rows(), T)
    return begin_dialogues(options, rollout, draws, numbers)


def continue_all(continuation, actor, rollout, draws, version):
    rollout, draws = continuation(actor.params, rollout, draws, version)
    return dataclasses.replace(rollout, slot_steps=None), draws


def assert_equal(rollout, expected):
    for name, value in vars(expected).items():
        if name in ("prompts", "slot_steps", "versions"):
            continue
        compare = functools.partial(np.testing.assert_allclose, atol=1e-4)
        compare = compare if name == "logprobs" else np.testing.assert_array_equal
        jax.tree.map(compare, getattr(rollout, name), value)


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        ("plain", ARCHITECTURE),
        ("contexts", ARCHITECTURE),
        pytest.param("few turns", ARCHITECTURE, marks=pytest.mark.slow),
        pytest.param("contexts", HYBRID, marks=pytest.mark.slow),
    ],
)
def test_with_unchanged_weights_dialogues_are_those_of_one_rollout(case, architecture):
    """Calls end within turns, within observations, and between the two; dialogues enter later."""
    actor, options = make_actor(architecture), make_options(**CASES[case])
    continuation = make_continuation(architecture, options)
    begun = begin_all(options)
    later = np.arange(len(LENGTHS)) >= 4
    first = continue_all(continuation, actor, *begun, 0)

    def enter(new, old):
        return jnp.where(later.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    rollout, draws = jax.tree.map(enter, begun, first)
    seen, calls = set(), 1
    while not (ended := np.asarray(has_ended(rollout, draws))).all():
        places = np.sign(np.asarray(rollout.lengths) - np.asarray(draws.dialogues.turn_start))
        seen |= set(places[~ended & (np.asarray(rollout.lengths) > 0)].tolist())
        before = np.asarray(rollout.lengths)
        rollout, draws = continue_all(continuation, actor, rollout, draws, calls)
        assert 0 < (np.asarray(rollout.lengths) - before).max() <= LENGTH
        calls += 1
    assert seen == {-1, 0, 1} and calls > 3
    expected = actor.sample(
        prompts_with_rows(), max_response_length=T, eos_ids=EOS, slots=3, **CASES[case]
    )
    assert_equal(jax.device_get(rollout), expected)
    assert len(set(expected.lengths.tolist())) > 1 and not expected.truncated.all()
    versions = np.where(expected.action_mask, rollout.versions, 0)
    assert versions.max() == calls - 1
    if case == "contexts":
        assert expected.contexts.max() == 2 and (np.diff(expected.contexts) < 0).any()


@pytest.mark.parametrize("case", ["plain", pytest.param("contexts", marks=pytest.mark.slow)])
def test_each_tokens_log_prob_is_that_of_the_weights_that_its_version_names(case):
    actor, newer = make_actor(ARCHITECTURE), make_actor(ARCHITECTURE, 1)
    options = make_options(**CASES[case])
    continuation = make_continuation(ARCHITECTURE, options)
    rollout, draws = begin_all(options)
    # Two calls with the older weights, then the newer ones.
    for version, policy in ((4, actor), (4, actor), *((6, newer),) * 9):
        rollout, draws = continue_all(continuation, policy, rollout, draws, version)
    assert has_ended(rollout, draws).all()
    rollout = jax.device_get(rollout)
    contexts = np.zeros_like(rollout.responses) if rollout.contexts is None else rollout.contexts
    is_token = np.arange(T) < rollout.lengths[:, None]
    recomputed = {4: np.zeros((len(LENGTHS), T)), 6: np.zeros((len(LENGTHS), T))}
    for row, number in np.ndindex(len(LENGTHS), contexts.max() + 1):
        (columns,) = np.nonzero(is_token[row] & (contexts[row] == number))
        prompt = rollout.prompts.tokens[row, : LENGTHS[row] if number == 0 else 0]
        tokens = np.concatenate([prompt, rollout.responses[row, columns]])
        padded = np.zeros((1, 16 + T), np.int32)
        padded[0, : len(tokens)] = tokens
        for version, policy in ((4, actor), (6, newer)):
            logprobs = np.asarray(jax.nn.log_softmax(policy.logits(padded)[0]))
            targets = np.arange(len(prompt), len(tokens))
            recomputed[version][row, columns] = logprobs[targets - 1, tokens[targets]]
    for version in (4, 6):
        drawn = rollout.action_mask & (rollout.versions == version)
        others = rollout.action_mask & ~drawn
        assert drawn.sum() > 20
        np.testing.assert_allclose(rollout.logprobs[drawn], recomputed[version][drawn], atol=2e-4)
        assert np.abs(rollout.logprobs - recomputed[version])[others].max() > 0.1
    # Dialogues go on across the border, and turns as well.
    assert (rollout.versions[rollout.action_mask].reshape(-1) == 4).any()
    border = (rollout.versions[:, :-1] == 4) & (rollout.versions[:, 1:] == 6)
    both = rollout.action_mask[:, :-1] & rollout.action_mask[:, 1:] & ~rollout.turn_starts[:, 1:]
    assert (border & both).any() and (border & ~both).any()


class Letters:
    """A tokenizer whose tokens are characters."""

    chat_template = None
    eos_token_id = None
    added_tokens_decoder = {}

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(map(chr, row)) for row in rows]

    def encode(self, text, add_special_tokens, verbose):
        return [ord(letter) for letter in text]


class Host:
    """Answers by chance and by all turns so far, in new and former contexts."""

    metric_names = ("turns",)
    closed: list = []
    salt = 0

    def reset(self, example, seed):
        self.chance, self.turns = random.Random(seed), 0
        self.total = int(example.prompt) + self.salt

    def step(self, text):
        self.total += sum(map(ord, text)) + self.chance.randrange(100)
        self.turns += 1
        text = "".join(chr((self.total + i) % V) for i in range(self.total % 4))
        contexts = {2: NewContext(text or "a"), 4: FormerContext(0, text), 5: FormerContext(1)}
        ends = self.turns == 8 or self.total % 11 == 0
        return contexts.get(self.turns, text), self.total % 5, ends, {"turns": self.turns}

    def close(self):
        self.closed.append(self)


@pytest.fixture(scope="module")
def host_run():
    """Return an environment on the host, what continues its dialogues, and the begun ones."""
    environment = HostEnvironment(
        Host,
        Letters(),
        [Example(str(row), "mine") for row in range(len(LENGTHS))],
        3,
        60.0,
        metric_names=Host.metric_names,
        max_contexts=2,
        chat_template=False,
    )
    options = make_options(environment=environment, max_turn_length=2, max_contexts=2)
    actor = make_actor(ARCHITECTURE)
    go_on = functools.partial(continue_all, make_continuation(ARCHITECTURE, options), actor)
    return environment, go_on, begin_all(options)


def repeat_turns(environment, rollout, draws):
    recorded = (rollout.responses, rollout.lengths, draws.dialogues)
    responses, lengths, dialogues = jax.device_get(recorded)
    turns = read_turns(responses, lengths, dialogues)
    environment.repeat_turns(dialogues.environment, turns)
    return turns


def test_repeated_turns_bring_new_environments_to_the_places_of_open_dialogues(host_run, caplog):
    environment, go_on, (rollout, draws) = host_run
    calls = []
    for number in range(9):
        rollout, draws = go_on(rollout, draws, number)
        calls.append((rollout, draws))
    expected = jax.device_get(rollout)
    assert has_ended(*calls[-1]).all() and not expected.environment_metrics["failed"].any()
    open_turns = set()
    for number in (1, 3, 4):
        environment._dialogues.clear()
        rollout, draws = calls[number]
        turns = repeat_turns(environment, rollout, draws)
        answered = np.where(draws.dialogues.closed, 0, draws.dialogues.turns)
        assert [len(of_one) for of_one in turns] == answered.tolist()
        open_turns |= set(answered.tolist())
        for later in range(number + 1, 9):
            rollout, draws = go_on(rollout, draws, later)
        assert_equal(jax.device_get(rollout), expected)
        np.testing.assert_array_equal(rollout.versions, expected.versions)
    assert len(open_turns) > 4 and max(open_turns) >= 6, "all kinds of contexts were left"
    assert not caplog.text


def test_an_environment_that_does_not_repeat_its_answers_fails_in_the_open(host_run, caplog):
    environment, go_on, (rollout, draws) = host_run
    for number in range(3):
        rollout, draws = go_on(rollout, draws, number)
    ends_later = ~np.asarray(has_ended(rollout, draws)) & (draws.dialogues.turns > 0)
    assert ends_later.sum() > 2
    environment._dialogues.clear()
    Host.closed.clear()
    Host.salt = 1
    repeat_turns(environment, rollout, draws)
    Host.salt = 0
    count = int(ends_later.sum())
    assert len(Host.closed) == count
    assert (
        f"Host: {count} of {count} open dialogues end, as the environment does not" in caplog.text
    )
    for number in range(3, 12):
        rollout, draws = go_on(rollout, draws, number)
    failed = np.asarray(rollout.environment_metrics["failed"]) == 1
    np.testing.assert_array_equal(failed, ends_later)
    assert "a resumed run got another answer" in caplog.text and "Traceback" not in caplog.text
