"""`python -m jax_ppo.check` on data with and without problems."""

import json

import pytest

from jax_ppo import check
from jax_ppo.data import arithmetic
from llama_folder import write_llama

ROW = {"question": "1 + 1?", "answer": "It is 2.\n#### 2"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    texts = [text for pair in arithmetic.generate_worked_solutions(50, 0.5, 0) for text in pair]
    write_llama(folder, texts, tokens=192)
    return folder / "llama"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run_check(capsys, *arguments):
    """Return the report as JSON and the exit code."""
    with pytest.raises(SystemExit) as end:
        check.main(["check", *arguments, "--json"])
    return json.loads(capsys.readouterr().out), end.value.code


def test_good_data_are_described(tmp_path, model, capsys):
    rows = [ROW, ROW, ROW | {"question": "2 + 2?", "answer": "5\n#### 4\nor #### 5"}]
    rows[2]["answer"] = "I think 4 #### 4"
    training = write_rows(tmp_path / "a.jsonl", rows)
    held_out = write_rows(tmp_path / "b.jsonl", [ROW])
    report, code = run_check(
        capsys,
        training,
        "--config=gsm8k",
        f"--config.data.val_files={held_out}",
        f"--config.model.path={model}",
        "--config.data.instruction=Think.",
        "--config.data.train_batch_size=2",
        "--config.actor.ppo_mini_batch_size=2",
    )
    assert (code, report["problems"], report["overlap"]) == (0, [], 1)
    part = report["training"]
    assert (part["rows"], part["duplicates"], part["with_ground_truth"]) == (3, 1, 3)
    assert part["data_sources"] == {"openai/gsm8k": 3}
    assert part["columns"] == {"question": 3, "answer": 3}
    assert part["rejected_solutions"] == 0
    tokens = part["prompt_tokens"]
    assert sum(tokens["histogram"].values()) == 3 and tokens["too_long"] == 0
    assert 0 < tokens["p0"] <= tokens["p50"] <= tokens["p100"]
    assert report["first_prompt"].endswith("1 + 1? Think.")


def test_solutions_that_their_own_rule_rejects_are_counted(tmp_path, capsys):
    rows = [{"question": "q", "answer": "#### $4"}, ROW]
    report, code = run_check(capsys, write_rows(tmp_path / "a.jsonl", rows))
    assert (code, report["training"]["rejected_solutions"]) == (0, 1)
    assert report["training"]["prompt_tokens"] is None


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"prompt": "p"}], "example 1: data_source='' (the rows have no such column) has no"),
        ([{"prompt": "p", "data_source": "gsm8k"}] * 9, "9 examples in all cannot be scored"),
        ([ROW, ROW | {"question": " "}], "1 prompts are empty, the first is example 2"),
    ],
)
def test_what_would_end_a_run_is_a_problem(tmp_path, capsys, rows, problem):
    report, code = run_check(capsys, write_rows(tmp_path / "a.jsonl", rows))
    assert code == 1 and any(line.startswith(problem) for line in report["problems"])


def test_too_few_or_too_long_prompts_are_a_problem(tmp_path, model, capsys):
    path = write_rows(tmp_path / "a.jsonl", [ROW, ROW | {"question": "1 + " * 99 + "1?"}])
    options = ("--config=gsm8k", f"--config.model.path={model}", "--config.data.val_files=")
    report, code = run_check(capsys, path, *options, "--config.data.max_prompt_length=100")
    assert code == 1 and report["problems"] == [
        "1 prompts are left, and config.data.train_batch_size=256 asks for that many per step"
    ]
    overrides = ("--config.data.max_prompt_length=100", "--config.data.filter_overlong_prompts=0")
    report, code = run_check(capsys, path, *options, *overrides)
    assert code == 1 and "50.0% of the prompts are longer" in report["problems"][0]


def test_the_report_is_text_by_default(tmp_path, model, capsys):
    path = write_rows(tmp_path / "a.jsonl", [ROW | {"question": "1\x1b[2J"}] * 3)
    with pytest.raises(SystemExit) as end:
        check.main(["check", path])
    output = capsys.readouterr().out
    assert end.value.code == 0 and output.endswith("no problems\n")
    assert "rows 3, of which 2 repeat" in output and "\x1b" not in output


def test_mistakes_are_one_line(capsys):
    for arguments, message in (
        ([], "error: check: name the files"),
        (["/nowhere/a.jsonl"], "error: config.data.train_files: there is no file"),
        (["--config=gsm9k"], "error: "),
    ):
        with pytest.raises(SystemExit, match=message) as end:
            check.main(["check", *arguments])
        assert "\n" not in str(end.value)
