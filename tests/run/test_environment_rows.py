"""An environment numbers training and held-out rows throughout, wherever they are kept."""

import numpy as np
import pytest

from jax_ppo.config.schema import MultiTurn
from jax_ppo.data.prompts import PromptDataset
from jax_ppo.environments.calculator import Calculator
from jax_ppo.run.run_prompts import ConcatenatedExamples, build_environment
from jax_ppo.types import Example


class Watched(tuple):
    """Examples that are not to be read before they are needed."""

    read = ()

    def __getitem__(self, index):
        Watched.read += (index,)
        return super().__getitem__(index)

    def __iter__(self):
        raise AssertionError("all are read")


def make_dataset(names):
    examples = Watched(Example(name, "mine") for name in names)
    return PromptDataset(examples, [np.ones(1, np.int32)] * len(names), 4)


def test_rows_are_numbered_throughout_and_none_is_read_before_its_dialogue():
    training, held_out, environment = build_environment(
        Calculator,
        MultiTurn(),
        None,
        make_dataset("abc"),
        make_dataset("de"),
        max_response_length=8,
    )
    assert (training.first_row, held_out.first_row) == (0, 3)
    assert Watched.read == ()
    examples = environment._examples
    assert [examples[row].prompt for row in (2, 3, 4)] == ["c", "d", "e"]
    assert Watched.read == (2, 0, 1)


def test_concatenated_examples_are_a_sequence():
    parts = [[Example(name, "mine") for name in names] for names in ("abc", "", "de")]
    flat = parts[0] + parts[2]
    examples = ConcatenatedExamples(parts)
    assert list(examples) == flat and len(examples) == 5
    assert [examples[row] for row in range(-5, 5)] == flat * 2
    assert examples[1:4] == flat[1:4] and examples[::-2] == flat[::-2]
    for row in (5, -6):
        with pytest.raises(IndexError):
            examples[row]
