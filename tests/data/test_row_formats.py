"""The meaning of columns: prompts, demonstrations, preferences and reference answers."""

import csv
import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from data_files import write_rows
from jax_ppo.data import columns as names
from jax_ppo.data.columns import Columns
from jax_ppo.data.row_formats import parse_row
from jax_ppo.data.sources import read_examples
from jax_ppo.errors import UserError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "prompt", "response", "rejected"),
    [
        (
            {"messages": [user("Hi"), assistant("Ho"), user("And?"), assistant("No")]},
            (user("Hi"), assistant("Ho"), user("And?")),
            "No",
            None,
        ),
        ({"problem": "1+1", "level": 5}, (user("1+1"),), None, None),
        (
            {"prompt": [user("Hi")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
            (user("Hi"),),
            "yes",
            "no",
        ),
    ],
)
def test_forms_that_no_public_layout_has(row, prompt, response, rejected):
    """The others are in test_public_layouts.py."""
    example = parse_row(row, "here")
    assert (example.prompt, example.response, example.rejected) == (prompt, response, rejected)
    assert (example.data_source, example.ground_truth) == ("", "")


def test_other_columns_are_kept_for_reward_functions():
    row = {"prompt": "p", "data_source": "mine", "ground_truth": 7, "level": "hard"}
    example = parse_row(row, "here")
    assert (example.data_source, example.ground_truth) == ("mine", "7")
    assert example.extra_info == {"data_source": "mine", "ground_truth": 7, "level": "hard"}


@pytest.mark.parametrize("as_text", [False, True])
def test_extra_info_is_the_rows_own_also_without_verls_reward_model(as_text):
    """Regression: a function got it one level deeper, and `extra_info.get("index", 0)` was 0."""
    own = {"index": 1, "level": "easy"}
    row = {"prompt": "p", "ground_truth": 7, "level": "hard", "other": 2}
    row["extra_info"] = json.dumps(own) if as_text else own
    assert parse_row(row, "here").extra_info == {"index": 1, "level": "easy", "other": 2}
    assert parse_row(row | {"extra_info": "a note"}, "here").extra_info["extra_info"] == "a note"
    named = parse_row(row | {"extra_info": {"answer": "7"}}, "here")
    assert named.response == "7", "as in verl's form"


def test_rows_of_skyrls_form():
    """Regression: its reference answer was not read."""
    row = {"prompt": [user("2+3?")], "env_class": "gsm8k", "extra_info": {"index": 0}}
    row["reward_spec"] = {"method": "rule", "ground_truth": "5"}
    example = parse_row(row, "here")
    assert (example.ground_truth, example.extra_info) == ("5", {"index": 0})
    with pytest.raises(UserError, match="reward_spec must have style and ground_truth, got 5"):
        parse_row(row | {"reward_spec": 5}, "here")


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
    example = parse_row(row, "here")
    assert (example.ground_truth, example.data_source) == ("seven", "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 3}, "here: prompt must be text or a list of messages, got 3"),
        ({"text": "x", "label": 1}, "columns text, label; expected a prompt as prompt, messages"),
        ({"question": 7}, "question must be text or a list of messages, got 7"),
        ({"question": "q", "answer": "seven ####"}, "has no `#### N` .it ends in 'seven"),
        (
            {"prompts": "p", "reward_model": {}},
            "lack verl's prompt; .* config.data.prompt_key. Did you mean 'prompts'",
        ),
        ({"prompt": "p", "reward_model": "4"}, "reward_model must have style and ground_truth"),
        ({"messages": "text"}, "here: messages must be a list of messages"),
        ({"messages": [assistant("Ho")]}, "no prompt before it"),
        ({"messages": [user("A"), *[assistant("x")] * 2]}, "ends with two messages of the assis"),
        ({"instruction": None}, r"the columns instruction \(no value\); expected a prompt"),
        ({"prompt": "p", "completion": [user("x")]}, "one message of the assistant"),
        ({"prompt": "p", "chosen": "yes", "rejected": None}, "must both be set"),
        ({"chosen": "\n\nHuman: A", "rejected": "\n\nHuman: B"}, "begin with the same dialogue"),
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


@pytest.mark.parametrize(
    "prompt",
    [
        *([1, 2], ["user", "2+2?"], [None], [[]], [{"role": "user"}], {"role": "user"}),
        *({"role": ["user"], "content": [7]}, {"role": ["user", "user"], "content": "ab"}),
    ],
)
def test_what_is_no_message_is_refused(prompt):
    with pytest.raises(UserError, match="^here: each message of prompt must have role and content"):
        parse_row({"prompt": prompt}, "here")


def test_messages_by_column_keep_every_column():
    columns = {"role": ["user", "user"], "content": ["a", "b"], "name": ["x", "y"], "id": None}
    example = parse_row({"prompt": columns}, "here")
    assert [message["name"] for message in example.prompt] == ["x", "y"]


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"data": rows}])
def test_a_json_file_holds_a_list(tmp_path, wrap):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(wrap([{"prompt": "one"}, {"prompt": "two\n"}]), indent=1))
    assert [e.prompt for e in read_examples(str(path))] == ["one", "two\n"]
    assert [e.prompt for e in read_examples(f"{path}[1:]")] == ["two\n"]


def test_a_csv_file_holds_texts(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([["prompt", "ground_truth"], ['a, "b"\nc', "3"], ["é" * 200_000, ""]])
    one, two = read_examples(str(path))
    assert (one.prompt, one.ground_truth) == ('a, "b"\nc', "3")
    assert two.prompt == "é" * 200_000
    path.write_text(",question, answer,ground_truth,solution\n0,q,4,,\n")
    (example,) = read_examples(str(path))
    assert (example.prompt, example.ground_truth) == ((user("q"),), "4")
    assert example.response == "4"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"a": 1, "b": 2}', "expected a list of objects, got dict"),
        ("a.json", '[{"prompt": "x"}, 3]', "row 2: expected a JSON object, got int: 3"),
        ("a.json", '[{"prompt": "x"},\n {"prompt": }]', "not JSON: .* at line 2, column 13"),
        ("a.json", '[{"prompt": "x"}\n', "not JSON: .* at line 2, column 1 of ''"),
        ("a.json", '[{"prompt": "\\ud83d"}]', "row 1: .*half of a surrogate pair"),
        ("a.jsonl", '{"prompt": "x", "b": {"c": 1, "c": 2}}', "a.jsonl:1: two values .* name 'c'"),
        ("a.csv", "prompt\nx,y\n", "a.csv:2: expected 1 values"),
        ("a.csv", '\nprompt,b\n\n"x\n\nx",1\n\ny\n', "a.csv:8: expected 2 values"),
        ("a.csv", "prompt,prompt\nx,y\n", "several columns have the same name"),
        ("a.csv", 'prompt\r\n\r\nx\r\n"x\r\n', "after line 3: cannot be read as CSV"),
        ("a.jsonl", '\n{"prompt": "x"}\n\n \n{"prompt": }\n', "a.jsonl:5: not JSON"),
        ("a.csv", "prompt\ncaf\xe9\n".encode("latin-1"), "after line .*: iconv -f WINDOWS-1252"),
        ("a.csv", "prompt\nx\n".encode("utf-16"), "cannot be read as UTF-8.*: iconv -f UTF-16"),
        ("a.json", "prompt\nx\n".encode("utf-16"), "cannot be read as UTF-8.*: iconv -f UTF-16"),
        ("a.jsonl", '[{"prompt": "x"}, {"prompt": "y"}]', "a.jsonl:1: .*list is named .json$"),
        ("a.jsonl", '{\n"prompt": "x"\n}', "a.jsonl:1: expected a whole JSON object in each line"),
        ("a.json", '{"prompt": ["x"], "b": ["y"]}', "got dict; columns are written as rows"),
        ("a.json", '{"prompt": ["x", "y"]}', "row 1: .*got str: 'x'; columns are written as rows"),
        ("a.csv", "", "has no rows"),
        ("a.jsonl", "\n", "config.data.train_files: .*a.jsonl has no rows"),
        ("a.parquet", b"\xff\xfenot what it says", "a.parquet.*: cannot be read as .*Parquet"),
        ("a.jsonl.gz", b"\xff\xfenot what it says", "a.jsonl.gz.*: cannot be read as .*gzipped"),
        ("a.csv", "prompt;answer\nx;y\n", "expected commas between columns, found ';'"),
        ("a.json", '{"prompt": "x"}\n{"prompt": "y"}', "an object per line is named .jsonl"),
        ("a.jsonl", '{"Prompt": "x", "prompt": "y"}', "a.jsonl:1: two columns .* name prompt"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        read_examples(str(path))
    assert "\n" not in str(error.value)


RULE = {"role": "system", "content": "Reply as <answer>...</answer>."}


def test_the_prompt_column_is_sampled_beside_a_question_and_its_answer():
    """Regression: question and answer won, and the system message was gone."""
    row = {"question": "6 * 7?", "answer": "42", "prompt": [RULE, user("6 * 7?")]}
    for columns in (None, Columns(prompt="prompt")):
        example = parse_row(row, "here", columns, instruction="Think.")
        assert example.prompt == (RULE, user("6 * 7?"))
        assert (example.ground_truth, example.data_source) == ("42", "")
    asked = parse_row(row, "here", Columns(prompt="question"), instruction="Think.")
    assert asked.prompt == (user("6 * 7? Think."),)
    assert parse_row(row | {"text": "hello"}, "here", Columns(prompt="text")).prompt == "hello"
    own = parse_row(row | {"answer": "So\n#### 42", "data_source": "mine"}, "here")
    assert (own.ground_truth, own.data_source) == ("42", "mine")


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [(4, "4"), (3.5, "3.5"), (4.0, "4"), (["2", "two"], ["2", "two"]), ("1/2", "1/2")],
)
def test_an_answer_beside_a_solution_is_the_reference_answer(answer, ground_truth):
    """Regression: only text was, and else the last box of the solution."""
    row = {"problem": "2 + 2?", "solution": "For comparison, $\\boxed{10}$.", "answer": answer}
    example = parse_row(row, "here")
    assert (example.ground_truth, example.response) == (ground_truth, row["solution"])
    assert example.data_source == "DigitalLearningGmbH/MATH-lighteval"
    without = parse_row(row | {"answer": float("nan")}, "here")
    assert without.ground_truth == row["solution"]


@pytest.mark.parametrize(
    ("value", "ground_truth"),
    [
        (b"4", "4"),
        (float(np.float32(0.1)), "0.1"),
        (float(np.float32(3.14)), "3.14"),
        (1234567.125, "1234567.125"),
        (0.1 + 0.2, "0.30000000000000004"),
        ([None, float("nan"), "4"], ["4"]),
        ([float(np.float32(0.1)), 2], ["0.1", 2]),
        (0.12345678901234568, "0.12345678901234568"),
        (2.0**-13, "0.0001220703125"),
        (184756 / 2**20, "0.17619705200195312"),
        (1e300, str(int(1e300))),
    ],
)
def test_a_reference_answer_is_what_was_stored(value, ground_truth):
    """Regression: 0.1 in 32 bits was 0.10000000149011612, and bytes were b'4'."""
    for name in ("answer", "ground_truth"):
        assert parse_row({"question": "q", name: value}, "here").ground_truth == ground_truth
    verl = {"prompt": "q", "reward_model": {"ground_truth": value}}
    assert parse_row(verl, "here").ground_truth == ground_truth


def test_two_reference_answers_of_a_row_must_agree():
    row = {"prompt": "q", "reward_model": {"ground_truth": "4"}, "ground_truth": 5}
    with pytest.raises(UserError, match=r"reward_model \('4'\), ground_truth .*ground_truth_key"):
        parse_row(row, "here")
    assert parse_row(row | {"ground_truth": 4}, "here").ground_truth == "4"
    for key, truth in (("ground_truth", "5"), ("reward_model", "4")):
        assert parse_row(row, "here", Columns(ground_truth=key)).ground_truth == truth
    assert parse_row(row | {"reward_model": {"style": "rule"}}, "here").ground_truth == "5"
    with pytest.raises(UserError, match="ground_truth_key='truth' names none of the columns"):
        parse_row(row, "here", Columns(ground_truth="truth"))


def test_whole_chats_beside_their_prompt_as_text_are_a_pair():
    chats = {
        "chosen": [user("Sing."), assistant("La.")],
        "rejected": [user("Sing."), assistant("")],
    }
    row = chats | {"prompt": "Sing."}
    assert parse_row(row, "here").prompt == (user("Sing."),)
    assert parse_row(row, "here", Columns(prompt="prompt")).prompt == "Sing."
    for columns in (None, Columns(prompt="prompt")):
        with pytest.raises(UserError, match="different prompts: .*config.data.prompt_key"):
            parse_row(row | {"prompt": "Name a number."}, "here", columns)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"images": [{"path": "a.png"}]}, "the column images has .* images, audio and video are"),
        ({"image": "a.png"}, "images, audio and video are not supported"),
        ({"figure": {"bytes": b"x", "path": None}}, "the column figure has"),
        ({"decoded_image_1": {"path": "a"}}, "not supported"),
        ({"prompt": [user([{"type": "image"}, {"type": "text", "text": "x"}])]}, "not text"),
    ],
)
def test_images_are_refused(extra, message):
    """Regression: they were dropped, and `<image>` was trained on as text."""
    row = {"prompt": [user("<image>Find x.")], "reward_model": {"ground_truth": "3"}}
    assert parse_row(row | {"images": []}, "here").ground_truth == "3"
    with pytest.raises(UserError, match=f"here: .*{message}"):
        parse_row(row | extra, "here")


def test_choices_that_the_prompt_would_lack_are_refused():
    row = {"question": "Which?", "choices": ["x", "y"], "answer": 1}
    with pytest.raises(UserError, match="choices would be missing .* config.data.prompt_key"):
        parse_row(row, "here")
    asked = parse_row(row, "here", Columns(prompt="question"))
    assert asked.prompt == (user("Which?"),)
    for extra in (
        dict.fromkeys("ABCD", "x"),
        {"opa": "x", "opb": "y"},
        {"option_1": "x"},
        {"passage": "A text."},
        {"Body": "Tom has 2."},
        {"history": [["Hi", "Ho"]]},
    ):
        with pytest.raises(UserError, match="would be missing from the prompt"):
            parse_row({"question": "Which?", **extra}, "here")
        assert parse_row({"question": "Which?", **dict.fromkeys(extra)}, "here").prompt
    assert parse_row({"question": "a + b?", "a": 1, "b": 2, "A": "x"}, "here").prompt
    written = parse_row(row | {"prompt": "Which? (A) x (B) y", "answer": "B"}, "here")
    assert written.ground_truth == "B"


def test_messages_as_json_text_are_messages():
    chat = [SYSTEM, user("Hi")]
    assert parse_row({"prompt": json.dumps(chat)}, "here").prompt == tuple(chat)
    assert parse_row({"prompt": json.dumps(chat[0])}, "here").prompt == (SYSTEM,)
    assert parse_row({"prompt": json.dumps(chat, indent=1)}, "here").prompt == tuple(chat)
    parts = json.dumps([user([{"type": "text", "text": "Hi"}])])
    assert parse_row({"prompt": parts}, "here").prompt == (user("Hi"),)
    call = json.dumps([user("1+2"), {"role": "assistant", "content": None, "tool_calls": [{}]}])
    assert parse_row({"prompt": call}, "here").prompt[1]["content"] == ""
    with pytest.raises(UserError, match="prompt holds messages that are not JSON"):
        parse_row({"prompt": json.dumps(chat)[:-1] + ",]"}, "here")
    quoted = json.dumps(chat) + "\nCorrect this JSON."
    assert parse_row({"prompt": quoted}, "here").prompt == quoted
    for text in ('{"a": 1}', "[1, 2]", '[{"role": 1}]', "{'a': 1}", '{"'):
        assert parse_row({"prompt": text}, "here").prompt == text
    # Data with a role or a sender are no messages.
    for text in (
        '{"from": "A", "to": "B"}',
        '{"role": "nurse", "age": 4}',
        '{"role": "user"} in {x}',
    ):
        example = parse_row({"prompt": text, "response": text}, "here")
        assert (example.prompt, example.response) == (text, text)
    with pytest.raises(UserError, match="prompt holds messages as Python prints them; write JSON"):
        parse_row({"prompt": str(chat)}, "here")
    with pytest.raises(UserError, match="prompt holds messages as Python prints them; write JSON"):
        parse_row({"prompt": f"array({chat[1:]}, dtype=object)"}, "here")


def test_sharegpts_messages_and_parts_of_text_are_read():
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    example = parse_row({"conversations": turns}, "here")
    assert (example.prompt, example.response) == ((user("Hi"),), "Ho")
    with pytest.raises(UserError, match="a message from 'dog'; expected one of human"):
        parse_row({"conversations": [{"from": "dog", "value": "x"}]}, "here")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_row({"prompt": [user(parts)]}, "here").prompt == (user("ab"),)
    for kind in ("image", "reasoning"):
        with pytest.raises(UserError, match="a part that is not text"):
            parse_row({"prompt": [user([*parts, {"type": kind, "text": "c"}])]}, "here")


@pytest.mark.parametrize(
    ("asks", "answers"),
    [("human", "gpt"), ("User", "Assistant"), ("user", "model"), ("Prompter", "bot")],
)
def test_roles_by_other_names_are_known(asks, answers):
    """Regression: the answer was sampled from as a part of the prompt."""
    messages = [{"role": asks, "content": "Hi"}, {"role": answers, "content": "Ho"}]
    share = [{"from": asks, "value": "Hi"}, {"from": answers, "value": "Ho"}]
    for chat in (messages, share):
        example = parse_row({"messages": chat}, "here")
        assert (example.prompt, example.response) == ((user("Hi"),), "Ho")


@pytest.mark.parametrize("name", ["tool_calls", "reasoning_content", "thinking"])
def test_what_the_assistant_says_besides_its_content_is_not_left_out(name):
    """Regression: it was not learned, and a call alone was dropped as an empty response."""
    last = assistant("Ho") | {name: [{"text": "x"}], "name": None}
    pair = {"chosen": [user("Hi"), last], "rejected": [user("Hi"), assistant("no")]}
    for row in ({"messages": [user("Hi"), last]}, pair, {"prompt": "Hi", "completion": [last]}):
        with pytest.raises(UserError, match=f"{name} of the last message of .* is not learned"):
            parse_row(row, "here")
        assert parse_row(row, "here", Columns(reads_responses=False)).prompt in (
            (user("Hi"),),
            "Hi",
        )
    row = {"messages": [user("Hi"), last], "whole": "Well, Ho"}
    assert parse_row(row, "here", Columns(response="whole")).response == "Well, Ho"


@pytest.mark.parametrize("wrap", [lambda tools: tools, json.dumps])
def test_tools_are_read_and_calls_need_no_content(wrap):
    tools = [{"name": "add", "parameters": {"a": None, "b": {"type": "int"}}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "x": None}]}
    answer = {"role": "tool", "content": "3"}
    row = {"messages": [user("1+2"), call, answer, assistant("3")], "tools": wrap(tools)}
    example = parse_row(row, "here")
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    assert (example.prompt, example.response) == ((user("1+2"), called, answer), "3")
    assert example.tools == ({"name": "add", "parameters": {"b": {"type": "int"}}},)
    for calls in (
        [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        [{"name": "add", "arguments": {"a": 1}}],
    ):
        for written in (calls, json.dumps(calls)):
            said = parse_row({"prompt": [call | {"tool_calls": written}, user("x")]}, "here")
            (read,) = said.prompt[0]["tool_calls"]
            assert read.get("function", read)["arguments"] == {"a": 1}
    for broken in ("add", [1], {"name": "add"}, [{"function": "add"}]):
        with pytest.raises(UserError, match="tool_calls of prompt must be a list of objects"):
            parse_row({"prompt": [call | {"tool_calls": broken}]}, "here")
    with pytest.raises(UserError, match="here: tools must be a list of objects, got 'add'"):
        parse_row({"prompt": "x", "tools": "add"}, "here")


def test_a_key_that_names_no_column_is_refused():
    row = {"question": "q", "answer": "7"}
    for columns in (Columns(prompt="questoin"), Columns(ground_truth="anwser")):
        with pytest.raises(UserError, match=r"config.data.\w+_key='.*' names none .* Did you mean"):
            parse_row(row, "here", columns)


def test_responses_that_differ_are_refused_only_where_they_are_trained_on():
    row = {"problem": "1+1", "solution": "2", "messages": [user("1+1"), assistant("two")]}
    with pytest.raises(UserError, match="different responses: .*config.supervised.response_key"):
        parse_row(row, "here")
    assert parse_row(row, "here", Columns(reads_responses=False)).prompt == (user("1+1"),)
    assert parse_row(row, "here", Columns(response="solution")).response == "2"
    assert parse_row(row, "here", Columns(prompt="messages", response="messages")).response == "two"


def test_ignored_columns_are_named_once(tmp_path, caplog):
    rows = [
        {"prompt": "a", "lang": "en", "id": 1, "seed": 2},
        {"prompt": "b", "tools_used": 2, "none": None, "": 0, "Unnamed: 0": 0},
    ]
    path = tmp_path / "a.jsonl"
    read_examples(write_rows(path, rows * 3))
    (line,) = caplog.messages
    assert f"{path}: ignored columns: lang, tools_used (" in line
    caplog.clear()
    read_examples(str(path), instruction="Think.")
    assert "config.data.instruction is not added to these rows" in caplog.messages[1]
    path.write_text('{"question": "q", "lang": "en"}')
    read_examples(str(path), instruction="Think.")
    assert len(caplog.messages) == 3


def test_the_documentation_lists_every_column():
    page = (Path(__file__).parents[2] / "docs/data-and-rewards.md").read_text()
    table = page[page.index("| column |") : page.index("**Which column wins.**")]
    assert names.KNOWN | set(names.CHOICES) <= set(re.findall(r"`(\w+)`", table))


def _value(name, question):
    """Return a value that a column of this name may have, for a question."""
    if name in names.CHATS:
        return [user(question), assistant(f"R {question}")]
    if name in (*names.GROUND_TRUTHS, "answer"):
        return f"T {question}"
    if name in names.CONTEXTS or name in names.SYSTEMS:
        return f"{name} text"
    return question if name in ("prompt", *names.REQUESTS) else f"R {question}"


def test_any_columns_are_read_by_their_meaning_or_refused_with_the_option():
    """All pairs and many larger sets of columns, equal and different prompts and responses."""
    known = sorted(names.KNOWN - {"tools", "data_source", *names.VERL, *names.PAIR, "input"})
    prompts = {"prompt", *names.CHATS, *names.REQUESTS}
    draw = random.Random(0)
    sets = [*itertools.combinations(known, 2), *(draw.sample(known, 5) for _ in range(500))]
    read = 0
    for chosen, odd in itertools.product(sets, (None, "prompt", "question", "messages")):
        row = {name: _value(name, "other?" if name == odd else "1+1?") for name in chosen}
        present = [name for name in chosen if name in prompts]
        try:
            example = parse_row(row, "here", Columns(reads_responses=bool(len(chosen) % 2)))
        except UserError as error:
            assert any(way in str(error) for way in ("config.", "plain text", "remove one")), error
            if not present:
                assert "config.data.prompt_key" in str(error)
            continue
        read += 1
        text = example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]
        # Every column of the prompt is in what is sampled.
        for name in present:
            assert ("other?" if name == odd else "1+1?") in text
        for name in names.CONTEXTS:
            if name in row and "prompt" not in row and not set(names.CHATS) & set(row):
                assert row[name] in text
        for name in names.SYSTEMS:
            if name in row:
                assert example.prompt[0] == {"role": "system", "content": row[name]}
        truths = [row[n] for n in (*names.GROUND_TRUTHS, "answer") if n in row]
        if truths:
            assert example.ground_truth == truths[0]
        if len(chosen) % 2 and any(n in row for n in (*names.CHATS, *names.RESPONSES)):
            assert example.response.startswith("R ")
    assert read > 500


ODD_VALUES = (
    "",
    "text",
    "[1]",
    '{"role": "user", "content": "x"}',
    "####",
    0,
    2.5,
    float("nan"),
    True,
    [],
    {},
    ["a"],
    [None],
    {"a": 1},
    [{"role": 1, "content": "x"}],
    [{"role": "assistant", "content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": ["x"]}],
    [{"from": ["human"], "value": "x"}],
    [{"from": "gpt", "value": None}],
    {"role": ["user"], "content": ["x"]},
    {"ground_truth": None},
)


def test_values_of_any_type_are_read_or_refused_by_row():
    draw = random.Random(0)
    known = [*sorted(names.KNOWN), *names.CHOICES, "images", "other", ""]
    refused = 0
    for _ in range(20_000):
        row = {name: draw.choice(ODD_VALUES) for name in draw.sample(known, draw.randint(0, 4))}
        key = draw.choice(["", "", "", *known])
        try:
            parse_row(row, "here", Columns(prompt=key, reads_responses=draw.random() < 0.5))
        except UserError as error:
            assert str(error).startswith("here: ")
            refused += 1
    assert 5_000 < refused < 20_000
