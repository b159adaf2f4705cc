"""Classes with Gymnasium's methods as environments of dialogues."""

import sys
import types

import numpy as np
import pytest

from answering import answer_text, observed
from character_tokenizer import CharacterTokenizer
from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.environments.loading import load_environment_class, make_environment, try_first_reset
from jax_ppo.errors import UserError
from jax_ppo.types import NOTHING, Example

FILE = """
class Count:
    opened, closed = [], []
    seed = None

    def __init__(self, shown="Count"):
        self.shown = shown

    def reset(self, *, seed=None, options=None):
        self.opened.append((seed, options["prompt"], options["extra_info"].get("limit", 0)))
        self.seed, self.limit, self.turns = seed, options["extra_info"].get("limit", 2), 0
        return self.shown, {"other": 1}

    def step(self, action):
        self.turns += 1
        if action == "raise":
            raise RuntimeError("no such move")
        info = {"turns": self.turns, "text": "x"}
        return f"{self.seed}{action}", 0.5, self.turns == self.limit, action == "stop", info

    def close(self):
        self.closed.append(self.seed)

def make():
    return Count()

def make_number():
    return Count(shown=5)

def make_text():
    class Text:
        def reset(self, example, seed): ...
        def step(self, text): ...
    return Text()

def fail():
    raise RuntimeError("no level")
"""
EXAMPLES = [
    Example("Count.", "mine", "", {"seed": 7}),
    Example("Count.", "mine", "", {"limit": 1, "seed": None}),
]


@pytest.fixture
def load(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)

    def load_class(name, **options):
        options = MultiTurn(environment=f"{tmp_path / 'mine.py'}:{name}", **options)
        return load_environment_class(options), options

    return load_class


def test_episodes_have_seeds_and_end_by_either_flag_and_info_becomes_metrics(load):
    made, options = load("make", info_metrics="turns,missing,turns")
    environment = make_environment(made, options, CharacterTokenizer(), EXAMPLES)
    answers = answer_text(environment, [0, 1], "ab")
    _, _, rewards, done, figures = answers
    assert observed(answers) == ["7ab", "101ab"], "the first row has a seed of its own"
    assert rewards.tolist() == [0.5, 0.5] and done.tolist() == [False, True]
    np.testing.assert_array_equal(figures, [[1, NOTHING, 0]] * 2)
    assert answer_text(environment, [0], "stop", turn=1)[3].tolist() == [True]
    Count = type(made().environment)
    assert sorted(Count.opened) == [(7, "Count.", 0), (101, "Count.", 1)]
    assert Count.closed == [None, 101, 7], "each is closed once, when it ends; first, a tried one"


def test_a_dialogue_that_failed_or_was_cut_off_is_closed_when_another_takes_its_place(load):
    made, options = load("make")
    environment = make_environment(made, options, CharacterTokenizer(), EXAMPLES)
    Count = type(made().environment)
    assert answer_text(environment, [0], "raise")[4].tolist() == [[1]]
    assert Count.closed == [None]
    answer_text(environment, [0], "x")
    answer_text(environment, [0], "x")
    assert Count.closed == [None, 7, 7]


def test_what_reset_shows_is_noted_unless_the_prompt_has_it(load):
    made, _ = load("Count")
    assert try_first_reset(made, EXAMPLES[0]) == ""
    assert made.make.closed == [7]
    note = try_first_reset(made, Example("Begin.", "mine"))
    assert "'Count': reset returns it, but the prompt does not contain it" in note


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("make_text", {}, "is a function that makes no environment with Gymnasium's methods"),
        ("fail", {}, "fail': failed: RuntimeError: no level"),
        ("Count", {"info_metrics": "a b"}, "info_metrics='a b': the name of a metric is"),
        ("Count", {"info_metrics": "failed"}, "'failed' has the name of a built-in one"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(load, name, options, message):
    with pytest.raises(UserError, match=message):
        load(name, **options)


def test_a_first_observation_that_is_no_text_is_refused(load):
    made, _ = load("make_number")
    with pytest.raises(UserError, match="observation of type int; expected text"):
        try_first_reset(made, EXAMPLES[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jax_ppo.environments.calculator:Calculator", ".* name its metrics in metric_names"),
        ("tools:calculator", "tools have no info"),
    ],
)
def test_a_class_of_text_and_tools_have_no_info(name, message):
    with pytest.raises(UserError, match=f"info_metrics='moves': {message}"):
        load_environment_class(MultiTurn(environment=name, info_metrics="moves"))


def test_an_id_is_made_by_gymnasium(load, monkeypatch):
    Count = type(load("Count")[0]().environment)
    registered = types.SimpleNamespace(make=lambda name: {"games:Count-v0": Count}[name]())
    monkeypatch.setitem(sys.modules, "gymnasium", registered)
    made = load_environment_class(MultiTurn(environment="gymnasium:games:Count-v0"))
    assert isinstance(made().environment, Count)
    with pytest.raises(UserError, match="environment='gymnasium:Other-v0': failed: KeyError"):
        load_environment_class(MultiTurn(environment="gymnasium:Other-v0"))
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match="needs Gymnasium: pip install gymnasium"):
        load_environment_class(MultiTurn(environment="gymnasium:Other-v0"))


def test_gymnasium_itself(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    (tmp_path / "guess.py").write_text(
        "import gymnasium\n"
        "class Guess(gymnasium.Env):\n"
        "    observation_space = action_space = gymnasium.spaces.Text(9, min_length=0)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return str(self.np_random.integers(9)), {}\n"
        "    def step(self, action):\n"
        "        return action, 1.0, True, False, {'length': len(action)}\n"
        "gymnasium.register('Guess-v0', entry_point='guess:Guess')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = MultiTurn(environment="gymnasium:guess:Guess-v0", info_metrics="length")
    dialogue = load_environment_class(options)()
    first = [dialogue.reset(EXAMPLES[0], seed) for seed in (3, 3)]
    assert first[0] == first[1] and dialogue.step("abc") == ("abc", 1.0, True, {"length": 3})
