"""The rows that a run trains on and holds out, and their numbers in an environment."""

import dataclasses
import types

import pytest

from character_tokenizer import CharacterTokenizer
from data_files import write_rows
from jax_ppo.config.loading import load_config
from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.config.schema import Data
from jax_ppo.environments.calculator import Calculator
from jax_ppo.errors import UserError
from jax_ppo.run import build
from jax_ppo.run.run_examples import load_examples, split_examples
from jax_ppo.types import Example


def test_rows_are_numbered_throughout():
    sampled, others = ([Example(name, "mine") for name in names] for names in ("abc", "de"))
    rows = build._RunRows(sampled, others, None, 1.0, Calculator)
    models = types.SimpleNamespace(tokenizer=CharacterTokenizer())
    training, held_out, environment = build._build_prompts(Data(), MultiTurn(), models, rows, None)
    assert (training.first_row, held_out.first_row) == (0, 3)
    examples = environment._examples
    assert [examples[row].prompt for row in (2, 3, 4)] == ["c", "d", "e"]


def write_numbers(path):
    """Write 40 rows, each prompt twice, 20 rows apart."""
    return write_rows(path, [{"prompt": f"number {row % 20}", "id": row} for row in range(40)])


def ids(examples):
    return [example.extra_info["id"] for example in examples]


def test_a_fraction_of_the_prompts_is_held_out_at_random_for_every_seed(tmp_path):
    data = Data(train_files=write_numbers(tmp_path / "a.jsonl"), val_fraction=0.2)
    training, held_out = map(ids, load_examples(data, seed=0))
    assert sorted(training + held_out) == list(range(40))
    # Four of twenty prompts, whose rows stay together and in the order of the file.
    assert len(held_out) == 8 and held_out == sorted(held_out) and training == sorted(training)
    assert [row + 20 for row in held_out[:4]] == held_out[4:]
    assert held_out[:4] not in ([0, 1, 2, 3], [16, 17, 18, 19])
    # A model of one seed or command is not evaluated on what another one has trained on.
    assert ids(load_examples(data, seed=1)[1]) == held_out
    assert list(map(ids, load_examples(data, seed=1, trains=False))) == [[], held_out]
    shaped = dataclasses.replace(data, prompt_template="Q: {prompt}", val_max_samples=3)
    fewer = load_examples(shaped, seed=2)[1]
    assert len(fewer) == 3 and set(ids(fewer)) < set(held_out)
    assert fewer[0].prompt.startswith("Q: number ")


def test_a_fraction_leaves_a_prompt_on_both_sides():
    examples = [Example(name, "mine") for name in "aab"]
    for fraction in (0.01, 0.99):
        sizes = sorted(map(len, split_examples(examples, fraction)))
        assert sizes == [1, 2]
    with pytest.raises(UserError, match=r"val_fraction=0.5: the training data have one prompt"):
        split_examples(examples[:2], 0.5)


def test_fewer_examples_are_drawn_by_the_seed_in_the_order_of_the_files(tmp_path):
    files = write_numbers(tmp_path / "a.jsonl")
    data = Data(train_files=files, val_files=files, train_max_samples=5, val_max_samples=5)
    draws = [tuple(map(ids, load_examples(data, seed))) for seed in (0, 0, 1)]
    (training, held_out), again, (other, still_held_out) = draws
    assert len(training) == len(held_out) == 5 and training == sorted(training)
    assert training != list(range(5)) and (training, held_out) == again
    assert other != training and still_held_out == held_out
    whole = dataclasses.replace(data, train_max_samples=40, val_max_samples=99)
    assert list(map(ids, load_examples(whole, 0))) == [list(range(40))] * 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"val_fraction": 0.1}, "data.val_fraction=0.1: config.data.val_files='arithmetic"),
        ({"train_max_samples": 4}, "data.train_max_samples=4: fewer than a step's"),
    ],
)
def test_options_of_the_split_that_exclude_others_are_refused(options, problem):
    with pytest.raises(UserError, match=problem):
        load_config("arithmetic", {f"data.{name}": value for name, value in options.items()})
    load_config("arithmetic", {"data.val_files": "", "data.val_fraction": 0.1})
