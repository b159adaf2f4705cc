"""Environments by name: what is accepted, and what is refused in one line."""

import pytest

from jax_ppo.config.schema import MultiTurn
from jax_ppo.environments.host import HostEnvironment
from jax_ppo.environments.loading import load_environment_class, make_environment
from jax_ppo.errors import UserError
from jax_ppo.sampler.environment import PerDialogue

FILE = """
class Tool:
    def reset(self, example, seed): ...
    def step(self, text): ...

class Game(Tool):
    observation_length = 2
    def __init__(self, tokenizer, examples): ...

class Spaced(Tool):
    metric_names = ("my metric",)

class Failing(Tool):
    metric_names = ("failed",)

class Single(Tool):
    metric_names = "moves"

class Silent:
    def reset(self, example, seed): ...

class Needy(Tool):
    def __init__(self, address): ...
"""


def load(tmp_path, name):
    (tmp_path / "mine.py").write_text(FILE)
    options = MultiTurn(environment=f"{tmp_path / 'mine.py'}:{name}")
    return load_environment_class(options), options


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Silent", "has no method step; expected a class as in"),
        ("Spaced", "the name of a metric is 'my metric'; expected letters, digits and"),
        ("Failing", "its metric 'failed' has the name of a built-in one"),
        ("Single", "metric_names is 'moves'; expected a tuple"),
        ("Needy", "expected signature f\\(\\), got \\(address\\)"),
        ("Toll", "has no function 'Toll'.*Did you mean 'Tool'"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, name)


def test_responses_are_one_turn_without_a_name():
    assert load_environment_class(MultiTurn()) is None


def test_a_class_with_the_length_of_its_observations_is_traced_and_any_other_is_called(tmp_path):
    tool, options = load(tmp_path, "Tool")
    made = make_environment(tool, options, None, ())
    assert isinstance(made, HostEnvironment)
    assert made.observation_length == options.max_observation_length
    game, options = load(tmp_path, "Game")
    made = make_environment(game, options, None, ())
    assert isinstance(made, PerDialogue) and made.observation_length == 2
