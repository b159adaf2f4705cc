"""Rows of prompts and responses, usable or refused one by one."""

import json

import pytest

from data_files import write_rows
from jax_ppo.data.response_rows import GivenResponses, RefusedRow, ResponseReader
from jax_ppo.data.row_formats import parse_row

SAMPLED = {"prompt": "ab", "prompt_ids": [1, 2], "response_ids": [3, 4, 5]}


def read(path, letters, **changes):
    options = {
        "tokenizer": letters,
        "parse": parse_row,
        "chat_template": True,
        "vocab_size": 256,
        "max_prompt_length": 4,
        "max_response_length": 4,
        "reward_key": "",
        "find_obstacle": lambda example: "",
    }
    return list(ResponseReader(**options | changes).read(path, "config.score.file"))


def read_line(line, tmp_path, letters, **changes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line if isinstance(line, bytes) else json.dumps(line).encode())
    (row,) = read(path, letters, **changes)
    return row


def test_texts_become_tokens_with_an_end(tmp_path, letters):
    row = read_line({"prompt": "ab", "response": "c"}, tmp_path, letters)
    assert row.prompt_ids.tolist() == [97, 98] and row.response_ids.tolist() == [99, 0]
    assert row.action_mask.tolist() == [True, True] and not row.truncated


def test_tokens_are_used_as_they_are(tmp_path, letters):
    logged = SAMPLED | {
        "truncated": True,
        "action_mask": [1, 0, 1],
        "turn_rewards": [0.5, 0, 0.25],
        "score": 1.0,
        "ground_truth": "4",
    }
    row = read_line(logged, tmp_path, letters, reward_key="score")
    assert row.response_ids.tolist() == [3, 4, 5] and row.truncated
    assert row.action_mask.tolist() == row.turn_starts.tolist() == [True, False, True]
    # The logged score contains the rewards of turns.
    assert row.reward == 0.25 and row.turn_rewards.tolist() == [0.5, 0, 0.25]
    assert row.example.ground_truth == "4" and row.example.prompt == "ab"


def test_turns_start_where_a_row_says_and_after_other_tokens(tmp_path, letters):
    logged = SAMPLED | {"response_ids": [3, 4, 5, 6], "action_mask": [1, 1, 0, 1]}
    assert read_line(logged, tmp_path, letters).turn_starts.tolist() == [True, False, False, True]
    row = read_line(logged | {"turn_starts": [1, 1, 1, 0]}, tmp_path, letters)
    assert row.turn_starts.tolist() == [True, True, False, True]


def test_a_response_of_several_contexts_is_refused(tmp_path, letters):
    row = read_line(SAMPLED | {"contexts": [0, 0, 0]}, tmp_path, letters)
    assert row.response_ids.tolist() == [3, 4, 5]
    row = read_line(SAMPLED | {"contexts": [0, 1, 1]}, tmp_path, letters)
    assert row.reason == "has several contexts, which jax_ppo 0.1 reads"
    # Texts may have a column of this name for something else.
    line = {"prompt": "ab", "response": "c", "contexts": ["a passage that was found"]}
    assert read_line(line, tmp_path, letters).response_ids.tolist() == [99, 0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]", "expected a whole JSON object"),
        (b'{"prompt": "a", "respon', "not JSON"),
        (b"\xff{}", "cannot be read as UTF-8 text"),
        ({"response": "b"}, "prompt"),
        ({"prompt": "a"}, "has no response"),
        ({"prompt": "a", "response": " "}, "the response is empty"),
        ({"prompt": "a", "response": 7}, "response"),
        ({"prompt": "a", "response": "bcde"}, "5 tokens, and config.data.max_response_length=4"),
        ({"prompt": "abcde", "response": "b"}, "5 tokens, and config.data.max_prompt_length=4"),
        (SAMPLED | {"response_ids": [3, "4"]}, "response_ids: expected a list of the model's tok"),
        (SAMPLED | {"response_ids": [256]}, "0 to 255, got"),
        (SAMPLED | {"response_ids": []}, "the response is empty"),
        (SAMPLED | {"action_mask": [1]}, "action_mask: expected 3 numbers"),
        (SAMPLED | {"action_mask": [0, 0, 0]}, "has no token that the policy chose"),
        (SAMPLED | {"turn_rewards": [0, 0, None]}, "turn_rewards: expected a finite number"),
        (SAMPLED | {"data_source": 3}, "data_source must be text, got 3"),
        (SAMPLED | {"truncated": []}, "truncated: expected true or false, got []"),
    ],
)
def test_a_broken_row_is_refused_with_its_place_and_its_text(line, reason, tmp_path, letters):
    row = read_line(line, tmp_path, letters)
    assert isinstance(row, RefusedRow) and reason in row.reason
    assert row.location == f"{tmp_path}/rows.jsonl:1" and row.location not in row.reason
    assert row.row == (line if isinstance(line, bytes) else json.dumps(line).encode()).decode(
        errors="replace"
    )


@pytest.mark.parametrize("reward", [None, "one", float("nan"), float("inf"), [1]])
def test_a_reward_that_is_no_finite_number_is_refused(reward, tmp_path, letters):
    row = read_line(SAMPLED | {"points": reward}, tmp_path, letters, reward_key="points")
    assert row.reason.startswith("points: expected a finite number")


def test_the_text_of_a_csv_file_is_read_as_what_it_says(tmp_path, letters):
    path = tmp_path / "rows.csv"
    path.write_text(
        "prompt,response,truncated,points\nab,c,False,0.5\nab,c,True,-1\nab,c,maybe,1\n"
    )
    first, second, third = read(path, letters, reward_key="points")
    assert (first.truncated, first.reward) == (False, 0.5)
    assert (second.truncated, second.reward) == (True, -1.0)
    assert (len(first.response_ids), second.response_ids.tolist()) == (2, [99])
    assert third.reason.startswith("truncated: expected true or false, got 'maybe'")


def test_a_ground_truth_of_zero_is_kept(tmp_path, letters):
    assert read_line(SAMPLED | {"ground_truth": 0}, tmp_path, letters).example.ground_truth == 0


def test_rows_of_other_prompt_tokens_have_another_fingerprint(tmp_path, letters):
    first, second = (
        read_line({"prompt_ids": ids, "response_ids": [3]}, tmp_path, letters)
        for ids in ([1, 2], [3, 4])
    )
    datasets = (GivenResponses.from_rows([row], 4, 4) for row in (first, second))
    assert len({str(dataset.fingerprint) for dataset in datasets}) == 2


def test_a_row_that_no_rule_can_score_is_refused(tmp_path, letters):
    row = read_line(SAMPLED, tmp_path, letters, find_obstacle=lambda example: "no rule")
    assert row.reason == "no rule"


def test_rows_of_parquet_are_numbered_and_none_is_lost(tmp_path, letters):
    rows = [{"prompt": "a", "response": text} for text in ("b", "", "c")]
    path = tmp_path / "rows.parquet"
    write_rows(path, rows)
    first, refused, last = read(path, letters)
    assert (first.number, last.number) == (1, 3)
    assert refused.location == f"{path}, row 2" and json.loads(refused.row)["prompt"] == "a"
