"""Environments by name: what is accepted, and what is refused in one line."""

import pytest

from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.environments.loading import load_environment_class
from jax_ppo.errors import UserError

FILE = """
class Tool:
    def reset(self, example, seed): ...
    def step(self, text): ...

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
