"""An environment numbers training and held-out rows throughout."""

import numpy as np

from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.environments.calculator import Calculator
from jax_ppo.run.run_examples import build_environment
from jax_ppo.types import Example


def make_dataset(names):
    examples = tuple(Example(name, "mine") for name in names)
    return PromptDataset(examples, [np.ones(1, np.int32)] * len(names), 4)


def test_rows_are_numbered_throughout():
    training, held_out, environment = build_environment(
        Calculator, MultiTurn(), None, make_dataset("abc"), make_dataset("de")
    )
    assert (training.first_row, held_out.first_row) == (0, 3)
    examples = environment._examples
    assert [examples[row].prompt for row in (2, 3, 4)] == ["c", "d", "e"]
