"""Dialogues in the decode loop against a Python loop over one sequence at a time."""

import asyncio
import dataclasses
import functools
import itertools
import math
import subprocess
import sys
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.config.schema import MeshShape
from jax_ppo.environments import host
from jax_ppo.environments.host import HostEnvironment
from jax_ppo.errors import UserError
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.sampler import sampling
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.dialogues import dialogue_seeds
from jax_ppo.sampler.engine import SamplingOptions, Turns
from jax_ppo.sampler.filters import Filters
from jax_ppo.types import NOTHING, Example, Prompts
from tiny_actor import ARCHITECTURE, Actor, make_prompts

V, T = ARCHITECTURE.vocab_size, 24
LONGEST = 3  # tokens of an observation
EOS = (3, 7, 11, 30, 41, 42, 43, 50, 51)
LENGTHS = (5, 16, 1, 9, 2, 12, 7)


class Numbers:
    """A tokenizer of texts that hold the ids of tokens."""

    added_tokens_decoder = {}

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]

    def encode(self, text, add_special_tokens, verbose):
        return [int(word) for word in text.split()]

    eos_token_id = None


class Dialogue:
    """Answer with up to three tokens that depend on everything that the environment has seen."""

    metric_names = ("turns",)

    def reset(self, example, seed):
        self.row, self.number, self.turns = int(example.prompt), seed % V, 0

    def step(self, text):
        turn = [int(word) for word in text.split()]
        total = sum(turn) + self.row + self.number
        observation = [(total + i * 5) % V for i in range(total % (LONGEST + 1))]
        reward, done = 0.5 * len(turn) + self.turns, self.turns == 3 or total % 7 == 0
        self.turns += 1
        return " ".join(map(str, observation)), reward, done, {"turns": self.turns}


EXAMPLES = [Example(str(row), "mine") for row in range(3 * len(LENGTHS) + 1)]


def make_environment(dialogue, timeout=60.0):
    return HostEnvironment(
        dialogue, Numbers(), EXAMPLES, LONGEST, timeout, metric_names=dialogue.metric_names
    )


class Expected(NamedTuple):
    """The rollout of one sample, by a Python loop."""

    tokens: list
    logprobs: list
    actions: list
    starts: list
    rewards: dict
    finished: bool


@pytest.fixture(scope="module")
def actor(shallow_actor):
    return shallow_actor


def talk(actor, prompt, row, sample, max_turns, max_turn_length):
    """Return the dialogue that follows a prompt, drawn with one forward pass per token."""
    keys = sampling.sample_keys(jax.random.key(0), jnp.array([sample]))
    dialogue = Dialogue()
    dialogue.reset(EXAMPLES[row], int(dialogue_seeds(keys)[0]))
    tokens, logprobs, actions, starts, rewards = [], [], [], [], {}
    turns, turn = 0, []
    while True:
        padded = np.zeros((1, 16 + T), np.int32)
        padded[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
        logits = actor.logits(padded)[:, len(prompt) + len(tokens) - 1]
        token, logprob = draw(logits, keys, len(tokens))
        tokens.append(int(token[0]))
        logprobs.append(float(logprob[0]))
        actions.append(True)
        starts.append(not turn)
        turn.append(tokens[-1])
        ends = tokens[-1] in EOS or len(tokens) == T or len(turn) == max_turn_length
        if not ends:
            continue
        text, rewards[len(tokens) - 1], done, _ = dialogue.step(" ".join(map(str, turn)))
        observation = [int(word) for word in text.split()]
        turns, turn = turns + 1, []
        if done or turns == max_turns or len(tokens) + len(observation) >= T:
            was_cut = len(tokens) == T and tokens[-1] not in EOS
            finished = bool(done) and not was_cut
            return Expected(tokens, logprobs, actions, starts, rewards, finished)
        tokens += observation
        logprobs += [0.0] * len(observation)
        actions += [False] * len(observation)
        starts += [False] * len(observation)


@jax.jit
def draw(logits, keys, position):
    return sampling.sample_tokens(
        logits, sampling.token_uniforms(keys, position), filters=Filters()
    )


def with_rows(prompts):
    rows = np.arange(len(prompts.lengths), dtype=np.int32) * 3 + 1
    return Prompts(prompts.tokens, prompts.lengths, rows)


@pytest.fixture(scope="module")
def reference(actor):
    """Return the expected dialogues of two samples per prompt under limits of turns."""

    @functools.cache
    def dialogues(max_turns, max_turn_length):
        prompts = with_rows(make_prompts(LENGTHS))
        return [
            talk(
                actor,
                prompts.tokens[i // 2][: prompts.lengths[i // 2]].tolist(),
                int(prompts.rows[i // 2]),
                i,
                max_turns,
                max_turn_length,
            )
            for i in range(2 * len(LENGTHS))
        ]

    return dialogues


def assert_equal(rollout, expected):
    for row, dialogue in enumerate(expected):
        length = len(dialogue.tokens)
        assert rollout.lengths[row] == length
        assert rollout.responses[row, :length].tolist() == dialogue.tokens
        assert not rollout.responses[row, length:].any()
        np.testing.assert_allclose(rollout.logprobs[row, :length], dialogue.logprobs, atol=1e-4)
        assert rollout.action_mask[row].tolist() == dialogue.actions + [False] * (T - length)
        assert rollout.turn_starts[row].tolist() == dialogue.starts + [False] * (T - length)
        earned = np.zeros(T)
        earned[list(dialogue.rewards)] = list(dialogue.rewards.values())
        np.testing.assert_allclose(rollout.turn_rewards[row], earned)
        assert rollout.truncated[row] == (not dialogue.finished)
        # The last figure of each dialogue, wherever it was decoded.
        assert rollout.environment_metrics["turns"][row] == sum(dialogue.starts)


@pytest.mark.parametrize(
    ("slots", "limits"),
    [
        pytest.param(None, (None, None), marks=pytest.mark.exhaustive),
        pytest.param(3, (None, None), marks=pytest.mark.slow),
        (3, (2, 4)),
    ],
)
def test_dialogues_are_those_of_a_loop_over_one_sequence(actor, reference, slots, limits):
    """Tokens, log-probs, mask and rewards are the same, in as few slots as there may be."""
    expected = reference(*limits)
    prompts = with_rows(make_prompts(LENGTHS))
    options = dict(zip(("max_turns", "max_turn_length"), limits, strict=True))
    options |= {"environment": make_environment(Dialogue), "eos_ids": EOS, "slots": slots}
    rollout = actor.sample(prompts, max_response_length=T, n=2, **options)
    assert_equal(rollout, expected)
    # The cases that differ: observations, dialogues that ended, that were cut, and long turns.
    assert any(not all(dialogue.actions) for dialogue in expected)
    assert len({dialogue.finished for dialogue in expected}) == 2
    assert len({len(dialogue.rewards) for dialogue in expected}) > 1


def talk_to_the_host(actor, shape):
    """Return the rollout of a mesh, and what each of its dialogues began with."""
    begun = []

    class Counted(Dialogue):
        def reset(self, example, seed):
            begun.append((example.prompt, seed))
            super().reset(example, seed)

    environment = make_environment(Counted)
    options = SamplingOptions(T, 1.0, n=2, eos_ids=EOS, slots=3, environment=environment)
    mesh = meshes.make_mesh(shape, jax.devices()[: shape.data * shape.model])
    prompts = with_rows(make_prompts(LENGTHS))
    with jax.set_mesh(mesh):
        layouts = sharding.tree_shardings(mesh, actor.stacked, sharding.TRAIN_RULES)
        engine = BuiltInEngine(mesh, actor.scored, jax.eval_shape(lambda: actor.stacked))
        engine.update_weights(jax.device_put(actor.stacked, layouts))
        placed = placement.place(prompts, sharding.batch_rows(mesh, len(LENGTHS)))
        rollout = jax.device_get(engine.generate(placed, jax.random.key(0), options))
    environment.raise_if_all_failed()
    assert not rollout.environment_metrics["failed"].any()
    return rollout, begun


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_holds_each_dialogue_once(actor, reference, devices):
    """Also where two devices call the host, each for different samples, and one has fewer."""
    rollout, begun = talk_to_the_host(actor, MeshShape(data=devices))
    assert_equal(rollout, reference(None, None))
    assert len(begun) == len(set(begun)) == 2 * len(LENGTHS)


@pytest.mark.exhaustive
def test_devices_that_decode_the_same_samples_call_the_host_once():
    """Two shards of rows, and two devices that split the matrices of each."""
    even = Actor(dataclasses.replace(ARCHITECTURE, vocab_size=64))
    expected, begun = talk_to_the_host(even, MeshShape(data=1))
    rollout, begun_on_mesh = talk_to_the_host(even, MeshShape(data=2, model=2))
    assert sorted(begun_on_mesh) == sorted(begun)
    for name in ("responses", "lengths", "truncated", "action_mask", "turn_starts", "turn_rewards"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name))
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=1e-4)


def answer_one(environment):
    """Return the answers to one turn of one token in the dialogue of row 0."""
    one = (np.array([0]), np.arange(1), np.array([2]), np.zeros(1, np.int32))
    return environment.answer(Turns(*one, np.array([[5]]), np.array([1])))


class Broken(Dialogue):
    """An environment that fails, from its second dialogue on if `spares` is set."""

    spares: set[int] = set()

    def step(self, text):
        if self.row in self.spares:
            return super().step(text)
        raise RuntimeError(f"row {self.row}")


def test_an_environment_that_raises_ends_its_own_dialogue():
    environment = make_environment(Broken)
    arguments = (np.array([4, 8]), np.arange(2), np.array([2, 3]), np.zeros(2, np.int32))
    turns, lengths = np.array([[5, 9, 0], [6, 0, 0]]), np.array([2, 1])
    Broken.spares = {8}
    observations, observed, rewards, done, figures = environment.answer(
        Turns(*arguments, turns, lengths)
    )
    np.testing.assert_array_equal(figures, [[NOTHING, 1], [1, 0]])  # turns, and whether it failed
    # Row 8: 6 + 8 + 3 = 17 leaves one token of observation, and 3 when divided by 7.
    assert observations.tolist() == [[0, 0, 0], [17, 0, 0]] and observed.tolist() == [0, 1]
    assert rewards.tolist() == [0.0, 0.5] and done.tolist() == [True, False]
    environment.raise_if_all_failed()
    Broken.spares = set()
    environment.answer(Turns(*arguments, turns, lengths))
    environment.raise_if_given_up()  # a further turn would be tried
    with pytest.raises(UserError, match="Broken failed at every turn of a batch, 2 times") as error:
        environment.raise_if_all_failed()
    assert "prompt '4': \nTraceback" in str(error.value) and "RuntimeError: row 4" in str(
        error.value
    )
    environment.raise_if_all_failed()  # counts anew


class Odd(Dialogue):
    """An environment that changes its example, and whose answers are not usable."""

    rewards = iter(())

    def reset(self, example, seed):
        super().reset(example, seed)
        example.extra_info["seen"].append(seed)
        assert len(example.extra_info["seen"]) == 1

    def step(self, text):
        reward = next(self.rewards)
        if isinstance(reward, str):
            raise ValueError(reward)
        return reward if isinstance(reward, tuple) else ("", reward, True)


def make_odd(*answers, tokenizer=None, **options):
    """Return an environment that answers so, and its example."""
    Odd.rewards = iter(answers)
    example = Example("4", "mine", extra_info={"seen": []})
    tokenizer = tokenizer or Numbers()
    return HostEnvironment(Odd, tokenizer, [example], LONGEST, timeout=60.0, **options), example


@pytest.mark.parametrize("failure", [1e39, "\x1b[2Jcleared"])
def test_rewards_beyond_float32_and_escape_sequences_are_failures(failure, caplog):
    """Regression: a log line sent the text to the terminal."""
    environment, example = make_odd(np.array([1.0]), failure)
    for expected in (1.0, 0.0):
        assert answer_one(environment)[2].tolist() == [expected]
    assert "Odd failed" in caplog.text and "\x1b" not in caplog.text
    assert example.extra_info == {"seen": []}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (("", "1_000", True), "the reward of a turn is '1_000' of type str; expected a fin"),
        (("", -(10**400), True), f"turn is -1{'0' * 198}... of type int; expected a finite float"),
        (("", np.ones(2), True), "is array([1., 1.]) of type ndarray; expected a finite float32"),
        (("", math.nan, True), "is nan of type float; expected a finite float32"),
        (("", 1.0, True, False, {}), "False, {}) of type tuple; expected (observation, reward,"),
        (("", 1e39, True), "is 1e+39 of type float; expected a finite float32"),
        (("", 1.0, np.ones(2)), "has ended is array([1., 1.]) of type ndarray; expected True or F"),
        (("", 1.0, "False"), "has ended is 'False' of type str; expected True or False"),
        (("", 1.0, None), "has ended is None of type NoneType; expected True or False"),
        ((5, 1.0, True), "the observation of a turn is 5 of type int; expected text"),
        (("a\ud800", 1.0, True), "can't encode character '\\ud800'"),
        (("", 1.0, True, {"move": 1}), "metric 'move'; metric_names declares moves. Did you mean"),
        (("", 1.0, True, {"moves": "1"}), "the metric 'moves' of a turn is '1' of type str"),
        (("", 1.0, True, {"moves": math.nan}), "'moves' of a turn is nan of type float; expected"),
        (("", 1.0, True, ["moves"]), "the metrics of a turn are ['moves'] of type list"),
    ],
)
def test_answers_of_a_wrong_type_are_failures(answer, message, caplog):
    """Regression: "False" ended a dialogue, "1_000" was 1000, and NaN spread to the gradients."""
    answers = answer_one(make_odd(answer, metric_names=("moves",))[0])
    assert answers[2].tolist() == [0.0] and answers[3].tolist() == [True]
    assert message in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("method", "error"),
    [
        *itertools.product(
            ("__init__", "reset", "step", "close"), (asyncio.CancelledError, SystemExit)
        ),
        # A user's Ctrl-C does not reach the threads in which turns are answered.
        *itertools.product(("reset", "step"), (KeyboardInterrupt,)),
    ],
)
def test_awaited_code_that_is_cancelled_is_a_failure(method, error, caplog):
    """Regression: `asyncio.CancelledError` is no `Exception`, and ended the run."""

    def fail(*_):
        raise error("gone")

    answers = {"reset": lambda *_: None, "step": lambda *_: ("", 1.0, True)}
    dialogue = type("Cancelled", (), {"metric_names": ()} | answers | {method: fail})
    answered = answer_one(make_environment(dialogue))
    assert answered[2].tolist() == [float(method == "close")] and "gone" in caplog.text


def test_of_an_observation_that_is_cut_off_no_more_is_encoded():
    """Regression: ten million characters occupied the tokenizer for half a minute."""

    class Longest(Numbers):
        def encode(self, text, add_special_tokens, verbose):
            self.characters = len(text)
            return super().encode(text, add_special_tokens, verbose)

    tokenizer = Longest()
    answers = answer_one(make_odd(("7 " * 10**5, 1.0, False), tokenizer=tokenizer)[0])
    assert answers[0].tolist() == [[7, 7, 7]] and tokenizer.characters < 1000


class Hanging(Dialogue):
    """An environment that waits, but for one row, until the test is over."""

    answers: int
    tried: list[int]
    over: threading.Event

    def step(self, text):
        self.tried.append(self.row)
        if self.row != self.answers:
            self.over.wait()
        return super().step(text)


@pytest.fixture
def hanging(monkeypatch):
    """Return a function that makes an environment of a row that answers, and answers all rows."""
    Hanging.tried, Hanging.over = [], threading.Event()
    monkeypatch.setattr(host, "THREADS", 2)

    def answer(answers, rows):
        Hanging.answers = answers
        environment = make_environment(Hanging, timeout=0.05)
        count = len(rows)
        state = (np.array(rows), np.arange(count), np.full(count, 3), np.zeros(count, np.int32))
        return environment, environment.answer(
            Turns(*state, np.full((count, 1), 6), np.ones(count, int))
        )

    yield answer
    Hanging.over.set()


def test_a_step_that_hangs_ends_its_own_dialogue_and_names_its_prompt(hanging, caplog):
    """Also where more steps hang than there are threads."""
    environment, answers = hanging(8, [4, 5, 6, 8, 7])
    observations, observed, rewards, done, _ = answers
    # Row 8: 6 + 8 + 3 = 17 leaves one token of observation, and 3 when divided by 7.
    assert observations[3].tolist() == [17, 0, 0] and observed.tolist() == [0, 0, 0, 1, 0]
    assert rewards.tolist() == [0, 0, 0, 0.5, 0] and done.tolist() == [True] * 3 + [False, True]
    environment.raise_if_all_failed()
    [line] = caplog.messages
    assert line.endswith(
        "prompt '4': no answer within 0.05 seconds (config.rollout.multi_turn.timeout)"
    )


def test_a_batch_of_which_nothing_is_answered_is_given_up(hanging, monkeypatch):
    """The run ends after a few time limits, not after one for each turn."""
    monkeypatch.setattr(host, "MAX_UNANSWERED_TURNS", 4)
    environment, answers = hanging(None, list(range(20)))
    assert 4 <= len(Hanging.tried) <= 4 + 2 and answers[3].all()
    with pytest.raises(
        UserError, match=r"Hanging failed at every turn of a batch, 20 times.*\n.*0'"
    ):
        environment.raise_if_given_up()


def test_each_turn_that_ends_keeps_a_long_rollout_from_counting_as_a_stall(hanging, monkeypatch):
    reports = []
    monkeypatch.setattr(host.faults, "report_progress", lambda: reports.append(1))
    hanging(8, [8, 4, 8])
    assert len(reports) == 3


@pytest.mark.slow
def test_a_step_that_hangs_does_not_keep_the_process_from_ending():
    script = (
        "import threading\n"
        "from jax_ppo.timed_threads import TimedThreads\n"
        "[late] = TimedThreads(1).call_all([threading.Event().wait], 0.01)\n"
        "print(late.exception())"
    )
    output = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=60)
    assert output == "no answer within 0.01 seconds\n"
