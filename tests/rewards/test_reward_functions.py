import dataclasses
import decimal
import fractions
import logging
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError
from jax_ppo.rewards import row_rules
from jax_ppo.rewards.batch import score_batch
from jax_ppo.rewards.custom import assign_step_rewards, parse_reward_output, read_reward_output
from jax_ppo.rewards.reward_functions import resolve_reward_function
from jax_ppo.rewards.row_rules import validate_data_sources
from jax_ppo.rewards.samples import RewardResult
from jax_ppo.types import Example

GSM8K = Example("q", "openai/gsm8k", "42")
SUM = Example("q", "arithmetic", "5")
STORY = Example("Once", "stories")

MODULE = """
import sys

import numpy as np

def by_length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str)

def echo(**given):
    text = given["solution_str"] + given["ground_truth"]
    return {"score": 0.5, "acc": True, "arguments": len(given), "pred": text}

def stumbles(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "bad":
        raise KeyError("stumbled here")
    if solution_str == "exit":
        sys.exit(0)
    if solution_str == "escape":
        raise ValueError("\\x1b[2Jcleared")
    special = {"nan": float("nan"), "inf": np.inf, "huge": 1e39, "text": "0.5", "none": None}
    return special.get(solution_str, np.float64(0.49))

def three(data_source, solution_str, ground_truth):
    return 0.0

_hidden = NUMBER = 3
"""


@pytest.fixture
def module(tmp_path):
    """Return the path of a file with the reward functions above."""
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return str(path)


def test_the_built_in_rule_goes_by_the_data_source():
    batch = score_batch(
        resolve_reward_function(Reward()),
        [GSM8K, SUM, STORY, GSM8K],
        ["#### 42.0", "#### 6", "a happy friend", "42"],
    )
    np.testing.assert_array_equal(batch.scores, np.float32([1, 0, 0.4, 0]))
    np.testing.assert_array_equal(batch.correct, [1, 0, math.nan, 0])
    np.testing.assert_array_equal(batch.extra["answered"], [1, 1, math.nan, 0])
    np.testing.assert_array_equal(batch.extra["joyful_words"], [math.nan, math.nan, 2, math.nan])
    assert batch.failures == 0


def test_all_methods_are_reachable():
    """Regression: verl#7789."""
    responses = ["#### 42\n#### 5\nso it is 42"]
    for terms, score in (("", 0), ("gsm8k[first]:1", 1), ("gsm8k[flexible]:1", 1)):
        rule = resolve_reward_function(Reward(terms=terms))
        assert score_batch(rule, [GSM8K], responses).scores == [score]


def test_a_function_of_a_file(module):
    batch = score_batch(
        resolve_reward_function(Reward(function=f"{module}:by_length")), [GSM8K, STORY], ["abc", ""]
    )
    np.testing.assert_array_equal(batch.scores, [3, 0])
    assert np.isnan(batch.correct).all()
    assert (batch.failures, batch.extra) == (0, {})


def test_a_function_of_an_importable_module(module, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    batch = score_batch(resolve_reward_function(Reward(function="mine:echo")), [GSM8K], ["abc"])
    assert (batch.scores, batch.correct) == ([0.5], [1])
    assert batch.extra == {"arguments": [4]}, "what is not a number is left out"


def test_a_failing_sample_costs_nobody_else_anything(module, caplog):
    """Regression: one crashing score stopped the run or set the scores of the whole batch to 0.

    See verl#6673, trl#5281 and AReaL#1426. And `sys.exit()` ended the run with exit code 0.
    """
    responses = ["fine", "bad", "nan", "inf", "huge", "text", "none", "exit", "fine"]
    examples = [Example("q", "mine", "4", {"index": i}) for i in range(9)]
    with caplog.at_level(logging.WARNING):
        batch = score_batch(
            resolve_reward_function(Reward(function=f"{module}:stumbles")),
            examples,
            responses,
            options=Reward(fallback_score=-1.0),
        )
    assert batch.scores.dtype == batch.correct.dtype == np.float32
    np.testing.assert_array_equal(batch.scores, np.float32([0.49, *[-1] * 7, 0.49]))
    assert batch.failed.tolist() == [False, *[True] * 7, False]
    (record,) = caplog.records
    message = record.getMessage()
    for words in (
        "7 of 9 responses",
        "config.reward.fallback_score=-1",
        "row 1 of the batch, data_source='mine'",
        "'index': 1",
        "response ending in 'bad'",
        "Traceback",
        "KeyError: 'stumbled here'",
        "mine.py",
    ):
        assert words in message


def test_ctrl_c_in_a_function_ends_the_run():
    def interrupted(row, response):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_batch(interrupted, [GSM8K], ["x"])


def test_an_error_cannot_send_escape_sequences_to_the_terminal(module, caplog):
    function = resolve_reward_function(Reward(function=f"{module}:stumbles"))
    batch = score_batch(function, [GSM8K], ["escape"])
    assert "ValueError: ·[2Jcleared" in batch.first_failure
    assert "\x1b" not in caplog.text and "\n" in batch.first_failure


def test_a_function_that_changes_its_row_changes_it_for_its_call_only():
    """The same row is scored once per response, and again in each epoch."""

    def make_example():
        prompt = ({"role": "user", "content": "q"},)
        return Example(prompt, "mine", ["4"], {"calls": []})

    def changes(row, response):
        row.prompt[0]["content"] += response
        row.extra_info["calls"].append(response)
        row.extra_info["seen"] = row.extra_info.get("seen", 0) + 1
        score = int(row.ground_truth.pop()) + len(row.extra_info["calls"]) + row.extra_info["seen"]
        return RewardResult(score=score, answer=row.prompt[0]["content"])

    example = make_example()
    for _ in range(2):
        batch = score_batch(changes, [example] * 2, ["a", "b"])
        assert batch.scores.tolist() == [6, 6] and batch.answers == ["qa", "qb"]
    assert example == make_example()


def test_a_built_in_rule_that_can_not_be_had_is_a_failure_of_that_sample():
    batch = score_batch(
        resolve_reward_function(Reward()),
        [Example("q", "unknown"), SUM],
        ["x", "#### 5"],
        options=Reward(fallback_score=0.25),
    )
    np.testing.assert_array_equal(batch.scores, [0.25, 1])
    assert batch.failures == 1


def test_as_many_responses_as_examples():
    with pytest.raises(ValueError, match="zip"):
        score_batch(resolve_reward_function(Reward()), [SUM], ["a", "b"])


def test_nothing_to_score():
    batch = score_batch(resolve_reward_function(Reward()), [], [])
    assert batch.scores.shape == batch.correct.shape == (0,)


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (1, RewardResult(1.0)),
        (True, RewardResult(1.0)),
        ({"score": 0.5}, RewardResult(0.5)),
        ({"score": 0, "acc": np.bool_(True)}, RewardResult(0.0, True)),
        (
            {"score": 0, "acc": float("nan"), "format": True, "pred": "7"},
            RewardResult(0.0, None, {"format": 1.0}, answer="7"),
        ),
    ],
)
def test_what_a_function_may_return(value, result):
    assert parse_reward_output(value) == result


NUMBERS = st.floats(-1e6, 1e6, width=32)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@given(score=NUMBERS, extra=NUMBERS, correct=st.booleans())
@settings(deadline=None)
def test_a_number_of_any_library_is_a_number(library, score, extra, correct):
    expected = RewardResult(score, correct, {"extra": extra})
    arrays = pytest.importorskip(library)
    tensor = arrays.tensor if library == "torch" else arrays.array
    makes = (
        float,
        lambda value: tensor(value, dtype=arrays.float32),
        lambda value: tensor([[value]], dtype=arrays.float64),
        lambda value: jnp.array(value, jnp.float32),
        fractions.Fraction,
        decimal.Decimal,
    )
    for make in makes:
        assert parse_reward_output(make(score)) == RewardResult(score)
        output = {"score": make(score), "extra": make(extra), "acc": make(float(correct))}
        assert parse_reward_output(output) == expected
    steps = parse_reward_output({"score": 0, "step_rewards": tensor([[2.0, score]])}).step_rewards
    assert steps == ((2, pytest.approx(score)),)
    with pytest.raises(UserError, match="expected a number that a float32 can hold"):
        parse_reward_output(tensor([score, extra]))
    if library == "torch":
        learned = tensor([1.5], dtype=arrays.bfloat16, requires_grad=True)
        assert parse_reward_output(learned) == RewardResult(1.5)


def test_what_cannot_be_reported_is_named_once(caplog):
    output = {"score": 1, "said": "x", "absent": None, "two": np.ones(2), "one": np.ones(1)}
    result = parse_reward_output(output)
    assert result.ignored == ("said", "two") and result.extra == {"one": 1.0}
    beyond = parse_reward_output({"score": 1, "n": 10**400, "m": np.array(["3"])})
    assert (beyond.ignored, beyond.extra) == (("n", "m"), {})
    for _ in range(2):
        score_batch(lambda row, response: result, [SUM] * 2, ["a", "b"])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("is not a number: it is not reported" in message for message in messages)
    assert "'said'" in messages[0] and "'two'" in messages[1]


class Unprintable:
    def __repr__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1", "'1': the score is of the type str; expected a number"),
        (None, "None: the score is of the type NoneType; expected a number"),
        (
            -(10**400),
            f"-1{'0' * 198}...: the score is of the type int; expected a number that a fl",
        ),
        (10**5000, "a value of the type int: the score is of the type int; expected a number that"),
        (fractions.Fraction(10**400), "the score is of the type Fraction; expected a number that"),
        (decimal.Decimal("1e400"), "Decimal('1E+400'): the score is inf; expected a finite"),
        (decimal.Decimal("sNaN"), "Decimal('sNaN'): the score is of the type Decimal; expected"),
        (np.ones(2), "array([1., 1.]): the score is of the type ndarray; expected a number"),
        (np.array(["1.0"]), "array(['1.0'], dtype='<U3'): the score is of the type ndarray"),
        (np.array([None]), "array([None], dtype=object): the score is of the type ndarray"),
        (np.complex64(1), "np.complex64(1+0j): the score is of the type complex64; expected"),
        (np.ma.array([1.0], mask=True), "the score is of the type MaskedArray; expected a number"),
        (Unprintable(), "a value of the type Unprintable: the score is of the type Unprintable"),
        ({"reward": 1.0}, "{'reward': 1.0}: expected 'score' among its names"),
        ({"score": "1"}, "{'score': '1'}: the score is of the type str; expected a number"),
        ({"score": 1, "acc": "yes"}, "'yes'}: acc is of the type str; expected a number"),
    ],
    ids=range(16),
)
def test_what_a_function_may_not_return_is_named_in_one_line(value, message):
    """Regression: some of them ended in a traceback of our own, and arrays of text were read."""
    with pytest.raises(UserError) as raised:
        read_reward_output(value, "abc", "my.py:score")
    assert str(raised.value).startswith("my.py:score returned ") and message in str(raised.value)
    batch = score_batch(lambda *_: read_reward_output(value, "abc", "my.py:score"), [SUM], ["abc"])
    assert batch.first_failure.endswith(f"response ending in 'abc': {raised.value}")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("by_length", "expected module:function or path/to/file.py:function"),
        (
            "FILE:by_lenght",
            "has no function 'by_lenght'; it has by_length, echo, stumbles, three. "
            "Did you mean 'by_length'?",
        ),
        ("FILE:NUMBER", "has no function 'NUMBER'"),
        (
            "FILE:three",
            "got (data_source, solution_str, ground_truth): got an unexpected keyword argument "
            "'extra_info'",
        ),
        ("FOLDER/mien.py:echo", "there is no file"),
        ("FOLDER/mien.py:echo", "Did you mean 'mine.py'?"),
        ("FOLDER/broken.py:echo", "importing FOLDER/broken.py failed: ZeroDivisionError"),
        ("FOLDER/exits.py:echo", "importing FOLDER/exits.py failed: SystemExit: 0"),
        (
            "no_such_module_here:echo",
            "ModuleNotFoundError: No module named 'no_such_module_here'. Expected a module that",
        ),
    ],
)
def test_a_wrong_function_is_explained_before_the_run(module, tmp_path, function, words):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "exits.py").write_text("import sys; sys.exit(0)")
    function = function.replace("FILE", module).replace("FOLDER", str(tmp_path))
    with pytest.raises(UserError) as error:
        resolve_reward_function(Reward(function=function))
    assert str(error.value).startswith(f"config.reward.function={function!r}: ")
    assert words.replace("FOLDER", str(tmp_path)) in str(error.value)


def test_check_sources():
    validate_data_sources([GSM8K, SUM, STORY])
    validate_data_sources([Example("q", "anything", "x")], Reward(function="mine:echo"))
    known = "data_source='openai/gsm8' .*'openai/gsm8k', 'arithmetic', 'sums', 'stories'"
    with pytest.raises(UserError, match=f"example 2: {known}.*reward.function=module:function"):
        validate_data_sources([SUM, Example("q", "openai/gsm8")])


@pytest.mark.parametrize(
    ("source", "suggestion"),
    [
        ("gsm8k", "function. Did you mean 'openai/gsm8k'?"),
        ("nq", "function. Did you mean 'searchR1_nq'?"),
        ("RUC-NLPIR/HotpotQA", "function. Did you mean 'searchR1_hotpotqa'?"),
        ("math500", "function. Did you mean 'HuggingFaceH4/MATH-500'?"),
        ("countdown", "function. The equations of Countdown need a function."),
        ("mine", "function."),
    ],
)
def test_a_source_by_the_name_of_its_task_gets_its_suggestion(source, suggestion):
    with pytest.raises(UserError) as error:
        validate_data_sources([Example("q", source)])
    assert str(error.value).endswith(suggestion)


@pytest.mark.parametrize("name", ["label", "target", "gold_answer", "answerKey"])
def test_a_column_that_may_be_the_missing_reference_answer_is_named(name):
    row = Example("q", "openai/gsm8k", extra_info={"id": 3, name: "5"})
    asked = f"is `{name}` the reference answer, which .* --config.data.ground_truth_key={name}$"
    with pytest.raises(UserError, match=asked):
        validate_data_sources([row])
    with pytest.raises(UserError, match="config.reward.function=module:function$"):
        validate_data_sources([dataclasses.replace(row, ground_truth="five")])


def test_rows_with_one_obstacle_are_one_line():
    def row(number, truth="five", source="arithmetic", file="a.csv:"):
        return Example("q", source, truth, location=f"{file}{number}")

    lines = row_rules.find_obstacles(
        [row(2), row(3, "4"), row(4, "six"), *(row(n, file="b.parquet, row ") for n in (1, 2))]
    )
    assert [line.partition(" is not")[0] for line in lines] == [
        "a.csv:2-4 (2 rows), b.parquet, row 1-2: ground_truth='five', for example,"
    ]
    same = row_rules.find_obstacles([row(number, source="mine") for number in (7, 8, 9)])
    assert [line[:30] for line in same] == ["a.csv:7-9: data_source='mine' "]


def test_rewards_of_steps_are_read_and_checked():
    def function(row, response):
        steps = [(2, 0.5), (np.int64(4), np.float32(-1))] if response else [(1, 0.5)]
        return parse_reward_output({"score": 1, "step_rewards": steps})

    scored = score_batch(function, [SUM, SUM], ["abcd", ""], options=Reward(fallback_score=-3.0))
    assert scored.step_rewards == [((2, 0.5), (4, -1.0)), ()]
    # The empty text has no first character.
    assert scored.scores.tolist() == [1.0, -3.0] and scored.failures == 1


NO_PAIRS = [5, np.array(5.0), "ab", [3], [(1,)], {"a": 1}, [(1.5, 0.1)], [(math.inf, 1.0)]]
NO_PAIRS += [[("1", 1.0)], [(1, 10**400)]]


@pytest.mark.parametrize("steps", NO_PAIRS, ids=range(10))
def test_rewards_of_steps_that_are_no_pairs_are_refused(steps):
    with pytest.raises(UserError, match=r"step_rewards has .*; expected \(characters, reward\)"):
        parse_reward_output({"score": 1, "step_rewards": steps})


def test_a_step_is_rewarded_at_the_token_that_ends_it():
    words = ["ab", "c", "", "def"]
    rewards = assign_step_rewards(
        [(0, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (6, 16.0)],
        [0, 1, 2, 3],
        lambda tokens: "".join(words[token] for token in tokens),
        6,
    )
    assert rewards.tolist() == [3.0, 4.0, 0.0, 24.0, 0.0, 0.0]
    # A character made of two pieces exists from its second piece on.
    pieces = assign_step_rewards(
        [(2, 1.0)], [0, 1, 2], lambda tokens: ["a", "a\ufffd", "aé"][len(tokens) - 1], 3
    )
    assert pieces.tolist() == [0.0, 0.0, 1.0]
