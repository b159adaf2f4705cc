"""Dialogues whose contexts are replaced, against forward passes over one context at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.data.response_rows import starts_of_contexts
from jax_ppo.environments.host import HostEnvironment
from jax_ppo.environments.protocol import FormerContext, NewContext
from jax_ppo.errors import UserError
from jax_ppo.ppo.forward_passes import join_sequences
from jax_ppo.sampler.environment import NEW_CONTEXT as NEW
from jax_ppo.sampler.environment import SAME_CONTEXT as SAME
from jax_ppo.sampler.environment import PerDialogue
from jax_ppo.training import forward, packing
from jax_ppo.types import Example, Prompts
from tiny_actor import ARCHITECTURE as TWO_LAYERS
from tiny_actor import HYBRID, Actor, make_prompts

T = 32
LENGTHS = (5, 9, 1)
ARCHITECTURE = dataclasses.replace(TWO_LAYERS, num_layers=1)  # compiles sooner


def step(state, turn, length):
    """Replace the context after every other turn, in row 2 at last by nothing."""
    row, turns = state
    observation = (turn.sum() + jnp.arange(3) * 5) % ARCHITECTURE.vocab_size
    is_empty = (row == 2) & (turns == 3)
    length = jnp.where(is_empty, 0, 2 + turns % 2)
    return (row, turns + 1), observation, length, 1.0, False, jnp.where(turns % 2, NEW, SAME)


def branch(state, turn, length):
    """Leave contexts and return to them, also without an observation, at last to none."""
    (row, turns), observation, length, *others, _ = step(state, turn, length)
    context = jnp.array([NEW, 0, 1, NEW, 0, jnp.where(row == 1, 3, 2), -3])[turns - 1]
    length = jnp.where((turns == 3) | (turns > 5), 0, length)
    return (row, turns), observation, length, *others, context


ENVIRONMENT = PerDialogue(lambda row, key: (row, jnp.int32(0)), step, observation_length=3)
BRANCHING = PerDialogue(ENVIRONMENT._reset, branch, observation_length=3)
OPTIONS = {"max_response_length": T, "max_turn_length": 3, "slots": 2}


def with_rows(prompts):
    return Prompts(prompts.tokens, prompts.lengths, np.arange(len(prompts.lengths), dtype=np.int32))


def contexts_of(rollout, row):
    """Yield the tokens of each context of a sample, and the columns of its part of the response."""
    prompt = rollout.prompts.tokens[row][: rollout.prompts.lengths[row]]
    contexts = rollout.contexts[row, : rollout.lengths[row]]
    for number in range(contexts.max() + 1):
        (columns,) = np.nonzero(contexts == number)
        before = prompt if number == 0 else prompt[:0]
        yield np.concatenate([before, rollout.responses[row, columns]]), columns


def runs(contexts):
    """Return the numbers of contexts in the order in which they are visited."""
    return [int(n) for n, before in zip(contexts, [-1, *contexts], strict=False) if n != before]


@pytest.mark.parametrize(
    ("environment", "architecture"),
    [
        (ENVIRONMENT, ARCHITECTURE),
        pytest.param(BRANCHING, ARCHITECTURE, marks=pytest.mark.slow),
        pytest.param(ENVIRONMENT, HYBRID, marks=pytest.mark.exhaustive),
        pytest.param(BRANCHING, HYBRID, marks=pytest.mark.slow),
    ],
    ids=["replaced", "branching", "replaced-hybrid", "branching-hybrid"],
)
def test_each_context_is_sampled_and_trained_as_a_sequence_of_its_own(environment, architecture):
    actor = Actor(architecture)
    rollout = actor.sample(
        with_rows(make_prompts(LENGTHS)), environment=environment, max_contexts=3, n=2, **OPTIONS
    )
    visits = [
        runs(row[:length]) for row, length in zip(rollout.contexts, rollout.lengths, strict=True)
    ]
    if environment is ENVIRONMENT:
        # A fourth context, or one without tokens, ends the dialogue instead.
        assert visits == [[0, 1, 2]] * 4 + [[0, 1]] * 2
        assert rollout.turn_starts.sum(1).tolist() == [6, 6, 6, 6, 4, 4]
    else:
        # A new context without tokens, or a former one that does not exist, ends it, too.
        path = [0, 1, 0, 1, 2, 0, 2]
        assert visits == [path, path, path[:6], path[:6], path[:4], path[:4]]
    assert rollout.truncated.all() and (rollout.lengths < T).all()
    starts = starts_of_contexts(rollout.contexts)
    assert not (starts & rollout.action_mask).any()
    expected = np.zeros_like(rollout.logprobs)
    for row in range(len(rollout.lengths)):
        for tokens, columns in contexts_of(rollout, row):
            if not len(columns):
                continue
            padded = np.zeros((1, 16 + T), np.int32)
            padded[0, : len(tokens)] = tokens
            logprobs = np.asarray(jax.nn.log_softmax(actor.logits(padded)[0]))
            # The context's part of the response is at its end, a prompt before it.
            targets = np.arange(len(tokens) - len(columns), len(tokens))
            expected[row, columns] = logprobs[targets - 1, tokens[targets]]
    expected *= rollout.action_mask
    np.testing.assert_allclose(rollout.logprobs, expected, atol=2e-4)

    sequences = join_sequences(rollout, 16 + T)
    lengths = np.asarray(sequences.prompt_lengths) + rollout.lengths
    packed_rows, _ = packing.pack_samples(lengths, [range(len(lengths))], 6, 64)
    trained = run_rows(actor, sequences, jax.tree.map(lambda x: x[0, 0], packed_rows))
    np.testing.assert_allclose(trained, expected, atol=2e-4)


@functools.partial(jax.jit, static_argnums=0)
def run_rows(actor, sequences, packed_rows):
    """Return the log-probs of the actions by the forward pass of training, [B, T]."""
    rows = packing.gather_rows(sequences, packed_rows)
    hidden = forward.hidden_states(actor.scored, actor.stacked, rows)
    logprobs, _ = forward.target_logprobs(actor.scored, actor.stacked, hidden, rows, 1.0)
    return packing.to_samples(logprobs, rows, jnp.zeros(sequences.action_mask.shape))


def test_contexts_that_the_options_do_not_expect_are_refused(actor):
    one_context = PerDialogue(ENVIRONMENT._reset, lambda *a: step(*a)[:-1], observation_length=3)
    for environment, contexts, message in (
        (ENVIRONMENT, 1, "max_contexts=1: the environment's step returns a context"),
        (one_context, 2, "max_contexts=2: the environment's step does not return a context"),
    ):
        with pytest.raises(UserError, match=message):
            actor.sample(
                with_rows(make_prompts(LENGTHS)),
                environment=environment,
                max_contexts=contexts,
                **OPTIONS,
            )


class Letters:
    """A tokenizer of texts and chats whose tokens are characters."""

    eos_token_id = None
    chat_template = "a template"
    added_tokens_decoder = {}

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(map(chr, row)) for row in rows]

    def encode(self, text, add_special_tokens, verbose):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, tools):
        return "".join(f"{m['role'][0]}{m['content']}" for m in messages) + "a"


@pytest.mark.parametrize(
    ("context", "max_contexts", "tokens", "message"),
    [
        (NewContext("so far"), 2, "so far", ""),
        (NewContext(({"role": "user", "content": "sum"},)), 2, "usuma", ""),
        (NewContext("far too long"), 2, "", "new context has 12 tokens; expected 1 to config."),
        (NewContext(""), 2, "", "the new context has 0 tokens; expected 1 to config."),
        (NewContext(({"role": "user"},)), 2, "", "expected text, or a tuple of messages"),
        (NewContext("so far"), 1, "", "Summary replaces the context, and config."),
    ],
)
def test_new_contexts_of_host_environments(context, max_contexts, tokens, message, caplog):
    class Summary:
        def reset(self, example, seed):
            pass

        def step(self, text):
            return context, 0.5, False

    environment = HostEnvironment(
        Summary, Letters(), [Example("4", "mine")], 8, 60.0, max_contexts=max_contexts
    )
    one = (np.array([0]), np.arange(1), np.array([2]), np.zeros(1, np.int32))
    answers = environment._answer(*one, np.array([[65]]), np.array([1]))
    assert "".join(map(chr, answers[0][0, : answers[1][0]])) == tokens
    assert answers[3].tolist() == [not tokens] and message in caplog.text
    if max_contexts == 1:
        with pytest.raises(UserError, match="max_contexts=1; set it to the most contexts"):
            environment.raise_if_all_failed()
    else:
        assert answers[4].tolist() == [NEW if tokens else SAME]


def answer_turns(steps, turns, max_contexts=3, frame=None):
    """Return the answers of a host environment to turns of one dialogue."""

    class Agent:
        def reset(self, example, seed):
            self.steps = iter(steps)

        def step(self, text):
            return next(self.steps), 0.5, False

    environment = HostEnvironment(
        Agent, Letters(), [Example("4", "mine")], 8, 60.0, frame=frame, max_contexts=max_contexts
    )
    answers = []
    for number, turn in enumerate(turns):
        one = (np.array([0]), np.arange(1), np.array([2]), np.array([number], np.int32))
        ids = np.array([[ord(letter) for letter in turn]])
        tokens, lengths, _, ends, *contexts, _ = environment._answer(*one, ids, [len(turn)])
        text = "".join(map(chr, tokens[0, : lengths[0]]))
        answers.append((text, bool(ends[0]), *(x[0] for x in contexts)))
    return answers


def test_host_environments_continue_former_contexts():
    steps = [NewContext("help"), FormerContext(np.int64(0), "yes"), FormerContext(1), "on"]
    assert answer_turns(steps, "abcd") == [
        ("help", False, NEW),
        ("yes", False, 0),
        ("", False, 1),
        ("on", False, 1),
    ]


def test_a_message_follows_the_last_token_of_the_context_that_goes_on():
    """The frame ends the assistant's turn unless that context's own last token has."""

    class Frame:
        def encode(self, contents, last, length):
            return [*([] if last == ord(".") else [ord(".")]), *map(ord, "".join(contents))]

    steps = [NewContext("q"), FormerContext(0, "a"), FormerContext(1, ("b", "c"))]
    answers = answer_turns(steps, ["x.", "y", "z."], frame=Frame())
    # Context 0 was left after a full stop, context 1 without one.
    assert [text for text, *_ in answers] == ["q", "a", ".bc"]


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (FormerContext(1), "former context of a turn is 1 of type int; expected a number from 0"),
        (FormerContext(-1), "former context of a turn is -1 of type int"),
        (FormerContext("main"), "former context of a turn is 'main' of type str"),
        (FormerContext(0.0), "former context of a turn is 0.0 of type float"),
        (FormerContext(True), "former context of a turn is True of type bool"),
        (FormerContext(0, None), "the observation of a turn is None of type NoneType"),
    ],
)
def test_former_contexts_that_do_not_exist_end_the_dialogue(observation, message, caplog):
    assert answer_turns([observation], "a") == [("", True, SAME)]
    assert message in caplog.text


def test_a_former_context_needs_several(caplog):
    assert answer_turns([FormerContext(0)], "a", max_contexts=1) == [("", True)]
    assert "Agent replaces the context, and config.rollout.multi_turn.max_contexts=1" in caplog.text
