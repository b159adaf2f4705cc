"""Rows of prompts, demonstrations and preferences, as TRL, Alpaca and chats have them."""

import csv
import json

import pytest

from jax_ppo.data.columns import Columns
from jax_ppo.data.row_formats import parse_row
from jax_ppo.data.sources import load_examples
from jax_ppo.errors import UserError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"prompt": "Once"}, "Once", None),
        ({"prompt": [user("Hi")]}, (user("Hi"),), None),
        ({"prompt": "Once", "completion": " upon"}, "Once", " upon"),
        ({"prompt": [user("Hi")], "completion": [assistant("Ho")]}, (user("Hi"),), "Ho"),
        ({"prompt": "Once", "answer": "upon"}, "Once", "upon"),
        ({"messages": [SYSTEM, user("Hi")]}, (SYSTEM, user("Hi")), None),
        (
            {"messages": [user("Hi"), assistant("Ho"), user("And?"), assistant("No")]},
            (user("Hi"), assistant("Ho"), user("And?")),
            "No",
        ),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, (user("Add.\n\n1 2"),), "3"),
        ({"instruction": "Sing.", "input": ""}, (user("Sing."),), None),
        ({"question": "Why?"}, (user("Why?"),), None),
        ({"problem": "1+1", "level": 5}, (user("1+1"),), None),
    ],
)
def test_prompts_and_demonstrations(row, prompt, response):
    example = parse_row(row, "here")
    assert (example.prompt, example.response, example.rejected) == (prompt, response, None)
    assert (example.data_source, example.ground_truth) == ("", "")


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "Once", "chosen": "yes", "rejected": "no"}, "Once"),
        (
            {
                "prompt": [user("Hi")],
                "chosen": [assistant("yes")],
                "rejected": [assistant("no")],
            },
            (user("Hi"),),
        ),
        (
            {
                "chosen": [SYSTEM, user("Hi"), assistant("yes")],
                "rejected": [SYSTEM, user("Hi"), assistant("no")],
            },
            (SYSTEM, user("Hi")),
        ),
    ],
)
def test_preferences(row, prompt):
    example = parse_row(row, "here")
    assert (example.prompt, example.response, example.rejected) == (prompt, "yes", "no")


def test_other_columns_are_kept_for_reward_functions():
    row = {"prompt": "p", "data_source": "mine", "ground_truth": 7, "level": "hard"}
    example = parse_row(row, "here")
    assert (example.data_source, example.ground_truth) == ("mine", "7")
    assert example.extra_info == {"data_source": "mine", "ground_truth": 7, "level": "hard"}


def test_rows_of_maths_form():
    row = {"problem": "1+1?", "solution": "It is $\\boxed{2}$.", "level": "Level 1"}
    example = parse_row(row, "here", instruction="Box it.")
    assert example.prompt == (user("1+1? Box it."),)
    assert example.data_source == "DigitalLearningGmbH/MATH-lighteval"
    assert example.ground_truth == example.response == row["solution"]
    own = row | {"answer": "2", "data_source": "math"}
    assert parse_row(own, "here").ground_truth == "2"
    assert parse_row(own, "here").data_source == "math"
    with pytest.raises(UserError, match="here: solution must be text, got 3"):
        parse_row(row | {"solution": 3}, "here")


def test_a_chosen_column_of_answers_wins_over_gsm8ks_form():
    row = {"question": "q", "answer": "seven"}
    example = parse_row(row, "here", columns=Columns(ground_truth="answer"))
    assert example.ground_truth == "seven"
    with pytest.raises(UserError, match="no `#### N`"):
        parse_row(row, "here")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 3}, "here: prompt must be text or a list of messages, got 3"),
        ({"messages": "text"}, "here: messages must be a list of messages"),
        ({"messages": [assistant("Ho")]}, "no prompt before it"),
        ({"instruction": None}, "here: instruction must be text, got None"),
        ({"prompt": "p", "completion": [user("x")]}, "one message of the assistant"),
        ({"prompt": "p", "chosen": "yes", "rejected": None}, "must both be set"),
        (
            {"chosen": [user("A"), assistant("x")], "rejected": [user("B"), assistant("y")]},
            "must differ only in their last message",
        ),
        (
            {"chosen": [user("A")], "rejected": [user("A"), assistant("y")]},
            "must be the assistant's",
        ),
        ({"prompt": "p", "data_source": 5}, "data_source must be text, got 5"),
    ],
)
def test_wrong_rows_are_named(row, message):
    with pytest.raises(UserError, match=message):
        parse_row(row, "here")


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"data": rows}])
def test_a_json_file_holds_a_list(tmp_path, wrap):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(wrap([{"prompt": "one"}, {"prompt": "two\n"}]), indent=1))
    assert [e.prompt for e in load_examples(str(path))] == ["one", "two\n"]
    assert [e.prompt for e in load_examples(f"{path}[1:]")] == ["two\n"]


def test_a_csv_file_holds_texts(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([["prompt", "ground_truth"], ['a, "b"\nc', "3"], ["é" * 200_000, ""]])
    one, two = load_examples(str(path))
    assert (one.prompt, one.ground_truth) == ('a, "b"\nc', "3")
    assert two.prompt == "é" * 200_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"a": 1, "b": 2}', "expected a list of objects, got dict"),
        ("a.json", '[{"prompt": "x"}, 3]', "row 2: expected a JSON object, got int: 3"),
        ("a.json", '[{"prompt": "x"},\n {"prompt": }]', "not JSON: .* at line 2, column 13"),
        ("a.json", '[{"prompt": "x"}\n', "not JSON: .* at line 2, column 1 of ''"),
        ("a.json", '[{"prompt": "\\ud83d"}]', "row 1: .*half of a surrogate pair"),
        ("a.json", "[" * 100_000, "nested more than 100 levels"),
        ("a.csv", "prompt,b\nx\n", "row 1: expected 2 values"),
        ("a.csv", "prompt\nx,y\n", "row 1: expected 1 values"),
        ("a.csv", "prompt,prompt\nx,y\n", "several columns have the same name"),
        ("a.csv", 'prompt\n"x\n', "after row 0: cannot be read as CSV"),
        ("a.csv", b"prompt\n\xff\n", "cannot be read as CSV: .*utf-8"),
        ("a.csv", "", "has no rows"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        load_examples(str(path))
    assert "\n" not in str(error.value)
