"""`python -m jax_ppo.check` on data with and without problems."""

import dataclasses
import importlib
import json
import os
import shutil

import pytest

import tiny
from data_files import write_rows
from jax_ppo.config.schema import Config, Data, Reward
from jax_ppo.data.tokenizer import load_tokenizer
from jax_ppo.errors import UserError
from jax_ppo.run import build, data_check, rule_trial
from jax_ppo.run.rule_trial import try_rule
from jax_ppo.types import Example
from llama_folder import write_arithmetic_llama

check = importlib.import_module("jax_ppo.check")  # the package has a function of this name
ROW = {"question": "1 + 1?", "answer": "It is 2.\n#### 2"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_arithmetic_llama(tmp_path_factory.mktemp("model"))


def run_check(capsys, *arguments):
    """Return the report as JSON and the exit code."""
    with pytest.raises(SystemExit) as end:
        check.main(["check", *arguments, "--json"])
    return json.loads(capsys.readouterr().out), end.value.code


def test_good_data_are_described(tmp_path, model, capsys):
    rows = [ROW, ROW, {"question": "2 + 2?", "answer": "I think 4 #### 4"}]
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
    rule = part["rule"]
    assert (rule["not_run"], rule["tried"], rule["wrong"], rule["failed"]) == ("", 3, 0, 0)
    assert rule["perfect"] == {"tried": 3, "right": 3, "impossible": []}
    tokens = part["prompt_tokens"]
    assert tokens["too_long"] == 0
    assert 0 < tokens["p0"] <= tokens["p50"] <= tokens["p100"]
    assert report["first_prompt"].endswith("1 + 1? Think.")


@pytest.mark.parametrize(
    ("options", "shown", "note"),
    [
        ((), "{long}{short}", "example 1, {all} tokens"),
        (("max_prompt_length=8",), "{short}", "example 2, {few} tokens"),
        (("max_prompt_length=8", "filter_overlong_prompts=False"), "{long}{short}", "example 1, "),
        (
            ("max_prompt_length=8", "filter_overlong_prompts=False", "truncation=left"),
            "{end}",
            "example 1, 8 tokens of {all}, config.data.truncation=left",
        ),
        (("max_prompt_length=1",), "{long}{short}", "example 1, {all} tokens"),
    ],
)
def test_the_first_prompt_is_shown_as_it_is_sampled(tmp_path, model, capsys, options, shown, note):
    """Dropped prompts are passed over, and tokens that are cut off are not shown."""
    short, long = "3 + 4 = ", "12 + 34 + 56 + "
    rows = [ROW | {"question": long + short}, ROW | {"question": short}]
    report, _ = run_check(
        capsys,
        write_rows(tmp_path / "a.jsonl", rows),
        "--config=gsm8k",
        "--config.data.val_files=",
        f"--config.model.path={model}",
        "--config.data.instruction=",
        *(f"--config.data.{option}" for option in options),
    )
    tokenizer = load_tokenizer(str(model))
    ids = tokenizer.encode(long + short)
    words = {"long": long, "short": short, "all": len(ids), "few": len(tokenizer.encode(short))}
    words["end"] = tokenizer.decode(ids[-8:])
    assert report["first_prompt"] == shown.format(**words)
    assert report["first_prompt_note"].startswith(note.format(**words))


def test_the_first_prompt_describes_the_tools(tmp_path, model, capsys):
    folder = tmp_path / "with_tools"
    shutil.copytree(model, folder)
    names = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(names + "{{ messages[0].content }}")
    rows = write_rows(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "1 + 1?"}]}])
    data = [f"--config.data.{name}=" for name in ("val_files", "instruction")]
    options = ["--config=gsm8k", *data, f"--config.model.path={folder}"]
    for tools, prompt in (("", "1 + 1?"), ("tools:calculator,python", "calculator python 1 + 1?")):
        tools = f"--config.rollout.multi_turn.environment={tools}"
        report, _ = run_check(capsys, rows, *options, tools)
        note = f"example 1, {report['training']['prompt_tokens']['p50']} tokens"
        assert (report["first_prompt"], report["first_prompt_note"]) == (prompt, note)
    # Regression: a traceback.
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    with pytest.raises(SystemExit, match="a.jsonl:1: the prompt cannot be encoded .*no such role"):
        check.main(["check", rows, *options])


def test_solutions_that_their_own_rule_rejects_are_counted(tmp_path, capsys):
    rows = [{"question": "q", "answer": "#### $4"}, ROW]
    report, code = run_check(capsys, write_rows(tmp_path / "a.jsonl", rows))
    rule = report["training"]["rule"]
    assert (code, rule["tried"], rule["wrong"]) == (0, 2, 1)
    assert rule["misses"] == ["looked for '$4', in '#### $4'"] and not report["warnings"]
    assert report["training"]["prompt_tokens"] is None


def test_a_rule_in_workers_and_a_function_are_run_and_what_is_not_is_said(tmp_path, model, capsys):
    pattern = {"prompt": "p", "data_source": "regex", "ground_truth": r"\d", "completion": "4"}
    path = write_rows(tmp_path / "a.jsonl", [pattern, pattern | {"completion": "four"}])
    rule = run_check(capsys, path)[0]["training"]["rule"]
    assert (rule["tried"], rule["wrong"]) == (2, 1)
    assert rule["perfect"] == {"tried": 0, "right": 0, "impossible": ["regex"]}
    (tmp_path / "mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1 / (solution_str != 'four'), 'acc': 1}\n"
        "def broken(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str in ('4', 'four'): raise ValueError('absent\\n\\n')\n"
        "    return 0\n"
    )
    options = ("--config=gsm8k", "--config.data.val_files=", f"--config.model.path={model}")
    options += ("--config.data.train_batch_size=1", "--config.actor.ppo_mini_batch_size=1")
    for name, failed in (("score", 1), ("broken", 2)):
        function = f"{tmp_path}/mine.py:{name}"
        report, code = run_check(capsys, path, *options, f"--config.reward.function={function}")
        rule = report["training"]["rule"]
        assert (rule["tried"], rule["wrong"], rule["failed"]) == (2, 0, failed)
        assert rule["perfect"] == {"tried": 0, "right": 0, "impossible": [function]}
        assert code == (name == "broken")
    assert "failed on each of 2 responses" in report["problems"][0]
    assert report["problems"][0].endswith(": ValueError: absent (all of it is logged)")


def test_a_function_is_called_once_for_each_source_on_a_short_and_an_empty_response(
    tmp_path, capfd
):
    """Regression: without responses in the data it was not called, and the run died."""
    rows = [{"prompt": "p", "gold": "1", "data_source": name} for name in "aabb"]
    rows[2]["gold"] = 1
    path = write_rows(tmp_path / "a.jsonl", rows)
    calls = tmp_path / "calls"
    (tmp_path / "mine.py").write_text(
        "import os, time\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    log = open({str(calls)!r}, 'a')\n"
        "    log.write(f'{os.getpid()} {data_source}{solution_str}\\n')\n"
        "    return {'score': 0.5 * (extra_info['gold'] in solution_str), 'acc': 1}\n"
        "def last(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(solution_str.split()[-1] == '1.')\n"
        "def lines(data_source, solution_str, ground_truth, extra_info):\n"
        "    raise ValueError('first\\nsecond')\n"
        "def hangs(data_source, solution_str, ground_truth, extra_info):\n"
        "    time.sleep(60)\n"
    )

    def check_function(name, *options):
        function = f"--config.reward.terms={tmp_path}/mine.py:{name}:2"
        return run_check(capfd, path, function, *options)

    report, code = check_function("score")
    found = [(x["data_source"], x["scores"], x["extra_info"]) for x in report["function_calls"]]
    keys = ["gold", "data_source"]
    assert found == [("a", [0.5, 0.0], keys), ("b", [None, None], keys)]
    (problem,) = report["problems"]
    where = "fails on 'The answer is 1.' and on '', data source 'b': TypeError: 'in <string>' req"
    assert code == 1 and f"mine.py:score {where}" in problem
    made = [line.partition(" ") for line in calls.read_text().splitlines()]
    assert [text for _, _, text in made] == [f"{x}{y}" for x in "ab" for y in rule_trial.MADE_UP]
    assert str(os.getpid()) not in {process for process, _, _ in made}

    report, code = check_function("last")
    assert (code, [call["scores"] for call in report["function_calls"]]) == (0, [[1.0, None]] * 2)
    assert "mine.py:last fails on '', data source 'a': IndexError: " in report["warnings"][1]
    report, code = check_function("lines")
    assert code == 1 and report["problems"][0].endswith("data source 'a': ValueError: first")
    # It ran out of time once, not for each source and response.
    report, code = check_function("hangs", "--config.reward.timeout=0.2")
    (problem,) = report["problems"]
    assert code == 1 and len(report["function_calls"]) == 1
    assert "'a': no result within config.reward.timeout=0.2 seconds" in problem


def test_a_column_that_may_be_the_reference_is_asked_about_once(tmp_path, capfd):
    """Regression: five of its rows were five problems."""
    rows = [{"instruction": f"{x} + 1?", "gold": x + 1} for x in range(9)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    question = f"{path}:1-9: is `gold` the reference answer"
    option = "--config.data.ground_truth_key=gold"
    report, code = run_check(capfd, path, "--config.reward.terms=exact:1")
    required = f"{question}, which the rule 'exact' requires? {option}"
    assert (code, report["problems"], report["warnings"]) == (1, [required], [])
    assert run_check(capfd, path, "--config.reward.terms=exact:1", option)[0]["problems"] == []
    report, _ = run_check(capfd, path)
    assert len(report["problems"]) == 1 and report["warnings"] == [f"{question}? {option}"]


@pytest.mark.parametrize(
    ("row", "command", "problem"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "reward_model", ""),
        ({"prompt": "p", "completion": "a"}, "reward_model", "has no rejected"),
        ({"prompt": "p", "completion": "a"}, "sft", ""),
        ({"prompt": "p", "completion": "a"}, "train", "has no built-in rule"),
        ({"prompt": "p", "completion": "a", "data_source": "exact"}, "train", "is empty"),
    ],
)
def test_data_without_rewards_are_not_asked_about_rules(tmp_path, capsys, row, command, problem):
    path = write_rows(tmp_path / "a.jsonl", [row])
    report, code = run_check(capsys, path, f"--for={command}")
    assert (report["command"], code) == (command, bool(problem))
    assert problem in str(report["problems"])
    if command != "train":
        assert report["training"]["rule"]["not_run"] == f"{command} reads no rewards"
    # These may be rows of another command.
    assert any("--for=sft" in line for line in report["warnings"]) == (command == "train")


def test_the_shipped_configuration_of_a_reward_model_is_checked_without_rules(
    tmp_path, model, capsys
):
    """Regression: every row was a problem, as its data source has no rule."""
    turns = "\n\nHuman: 1 + 1?\n\nAssistant: "
    rows = [{"chosen": f"{turns}2", "rejected": f"{turns}3"}] * 64
    path = write_rows(tmp_path / "a.jsonl", rows)
    options = (f"--config.model.path={model}", "--config.data.val_files=")
    for command, config in (("reward_model", "hh_rlhf_reward"), ("sft", "hh_rlhf_sft")):
        report, code = run_check(capsys, path, f"--config={config}", f"--for={command}", *options)
        assert (report["command"], code, report["problems"]) == (command, 0, [])
        assert not report["warnings"] or command == "sft"


def test_prompts_that_ask_for_another_form_are_a_warning(tmp_path, capsys):
    rows = [
        {"question": "1 + 1? Put it in \\boxed{}.", "answer": "so\n#### 2"},
        {"question": "1 + 1? End with #### and the answer.", "answer": "so\n#### 2"},
        {"question": "1 + 1? Reply in \\boxed{} in <answer></answer>.", "answer": "so\n#### 2"},
        {"question": "1 + 1?\nAnswer:", "answer": "so\n#### 2"},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    (warning,) = run_check(capsys, path)[0]["warnings"]
    assert warning.startswith("training data: 1 of 4 prompts ask for `\\boxed`, and their rule re")
    assert "config.reward.terms=math:1.0" in warning


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"prompt": "p"}], "a.jsonl:1: data_source='' (the rows have no such column) has no"),
        ([{"prompt": "p", "data_source": "gsm8k"}] * 9, "a.jsonl:1-9: data_source='gsm8k' has no"),
        ([ROW, ROW | {"question": " "}], "1 empty prompt, the first is /"),
    ],
)
def test_what_would_end_a_run_is_a_problem(tmp_path, capsys, rows, problem):
    report, code = run_check(capsys, write_rows(tmp_path / "a.jsonl", rows))
    assert code == 1 and any(problem in line for line in report["problems"])


def test_what_leaves_too_few_rows_is_a_problem(tmp_path, model, capsys):
    path = write_rows(tmp_path / "a.jsonl", [ROW, ROW | {"question": "1 + " * 99 + "1?"}])
    options = ("--config=gsm8k", f"--config.model.path={model}", "--config.data.val_files=")
    options += ("--config.data.max_prompt_length=100",)
    few = "config.data.train_files has 1 prompt, fewer than a step's config.data.train_batch_size"
    report, code = run_check(capsys, path, *options)
    assert code == 1 and [problem.partition("=")[0] for problem in report["problems"]] == [few]
    report, code = run_check(capsys, path, *options, "--config.data.filter_overlong_prompts=0")
    assert code == 1 and "50.0% of the prompts are longer" in report["problems"][0]
    # Regression: nothing was said of held-out prompts, and of responses that are dropped.
    report, code = run_check(capsys, path, *options, f"--config.data.val_files={path}[1:]")
    assert code == 1 and "val_files: no prompt is left of 1" in report["problems"][0]
    rows = [{"prompt": "1", "response": text} for text in ("1 + " * 999, " ", "2")]
    options += ("--for=sft", "--config.data.train_batch_size=2")
    report, code = run_check(capsys, write_rows(tmp_path / "b.jsonl", rows), *options)
    assert code == 1 and report["problems"][0].startswith(few)


def test_the_report_is_text_by_default(tmp_path, model, capsys):
    path = write_rows(tmp_path / "a.jsonl", [ROW | {"question": "1\x1b[2J"}] * 3)
    with pytest.raises(SystemExit) as end:
        check.main(["check", path])
    output = capsys.readouterr().out
    assert end.value.code == 0 and output.endswith("no problems for `train`\n")
    assert "  columns in extra_info: " in output
    assert "rows 3, of which 2 repeat" in output and "\x1b" not in output


def test_the_model_responds_to_some_of_the_prompts(tmp_path, model, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [ROW | {"question": f"{number} + 1?"} for number in range(9)]
    files = ",".join(f"{write_rows(tmp_path / name, rows)}*0.5" for name in ("a.jsonl", "b.jsonl"))
    options = [files, f"--config.model.path={model}", "--config.data.max_response_length=4"]
    options += ["--config.reward.terms=gsm8k:1,length[0:9]:0.5", "--config.data.train_batch_size=9"]
    options.append("--config.data.max_prompt_length=40")
    report, code = run_check(capsys, *options, "--samples=3")
    assert (code, report["problems"]) == (0, [])
    assert len(report["samples"]) == 3
    for record in report["samples"]:
        assert record["prompt"] in {row["question"] for row in rows}
        assert record["score"] in (0, 0.5, 1, 1.5) and len(record["response_ids"]) <= 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]
    with pytest.raises(SystemExit):
        check.main(["check", *options, "--config.data.train_batch_size=99", "--samples=3"])
    assert capsys.readouterr().out.count("no samples were drawn") == 1


def test_mistakes_are_one_line(capsys):
    for arguments, message in (
        (["a.jsonl", "--samples=three"], "error: --samples=three: expected a number of prompts"),
        (["a.jsonl", "--samples=3"], "error: --samples=3: name the model with --config.model.path"),
        (["a.jsonl", "--for=sft", "--samples=3"], "error: --samples=3: sft samples no responses"),
        (["a.jsonl", "--for=stf"], "error: --for=stf: expected train, sft.*Did you mean 'sft'"),
        ([], "error: check: name the files"),
        (["a.jsonl", "--jsn"], "error: --jsn: no such option. Did you mean '--json'"),
        (["a.jsonl", "--json=1"], "error: --json=1: --json takes no value"),
        (["a.jsonl", "--samples", "3"], "error: --samples: write --samples=VALUE, with the ="),
        (["/nowhere/a.jsonl"], "error: config.data.train_files: there is no file"),
        (["--config=gsm9k"], "error: "),
    ):
        with pytest.raises(SystemExit, match=message) as end:
            check.main(["check", *arguments])
        assert "\n" not in str(end.value)


def test_training_tries_its_rule_on_the_first_rows_before_models_are_read(tmp_path, monkeypatch):
    """Every response of the data is wrong, so the run says so before it reads a folder."""
    rows = [ROW | {"answer": "so\n#### $2"}] * 9
    path = write_rows(tmp_path / "a.jsonl", rows)
    config = dataclasses.replace(Config(), data=Data(train_files=path))

    class Read(Exception):
        """A model is read."""

    def read(*arguments):
        raise Read

    monkeypatch.setattr(build, "read_run_models", read)
    lines = []
    with pytest.raises(Read):
        build.build_run(config, tmp_path, tiny.make_mesh(), lines.append)
    (warning,) = [line for line in lines if line.startswith("warning: the rule scores")]
    assert "scores all 8 responses of the data that were tried as wrong" in warning
    assert "looked for '$2', in 'so\\n#### $2'" in warning


def test_functions_are_not_called_before_training():
    options = Reward(function="mine.py:absent")
    trial = try_rule([Example("q", "s", "1", response="1")] * 2, options, 2, calls_functions=False)
    assert trial.tried == 0 and "`check` calls them" in trial.not_run


def test_a_function_that_needs_a_column_that_no_row_has_is_refused_before_models_are_read(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [ROW])
    (tmp_path / "mine.py").write_text("def f(completions, trainer_state, **columns): pass")
    config = dataclasses.replace(
        Config(), data=Data(train_files=path), reward=Reward(function=f"{tmp_path}/mine.py:f")
    )
    message = "its argument 'trainer_state' is not a column of the data"
    with pytest.raises(UserError, match=message):
        build.build_run(config, tmp_path, tiny.make_mesh(), print)
    with pytest.raises(UserError, match=message):
        data_check.check_data(config)


def test_rows_for_sft_are_read_as_sft_reads_them(tmp_path, capsys):
    """Regression: what ends `sft` was not found, and all rows of KTO counted."""
    kto = [{"prompt": "p", "completion": text, "label": text == "a"} for text in "abc"]
    report, _ = run_check(capsys, write_rows(tmp_path / "kto.jsonl", kto), "--for=sft")
    assert (report["command"], report["training"]["rows"]) == ("sft", 1)
    two = {"prompt": "p", "completion": "a", "output": "b"}
    with pytest.raises(SystemExit, match="these columns hold different responses"):
        check.main(["check", write_rows(tmp_path / "a.jsonl", [two]), "--for=sft"])
    # `train` reads no responses.
    rule = {"ground_truth": "c", "data_source": "exact"}
    report, code = run_check(capsys, write_rows(tmp_path / "b.jsonl", [two | rule]))
    assert (report["command"], code) == ("train", 0)
    # Nor does it leave out rows by their labels.
    report, _ = run_check(capsys, write_rows(tmp_path / "c.jsonl", [row | rule for row in kto]))
    assert (report["command"], report["training"]["rows"]) == ("train", 3)


def test_a_reference_answer_is_no_response_to_try(tmp_path, capsys):
    """Regression: "4", which is not boxed, was said to score as wrong."""
    rows = [{"problem": "2+2?", "answer": "4"}]
    report, _ = run_check(capsys, write_rows(tmp_path / "a.jsonl", rows))
    assert report["training"]["rule"]["tried"] == 0 and report["warnings"] == []


def test_options_of_the_data_need_no_configuration(tmp_path, capsys):
    """Regression: a column could only be named beside a model."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": "1 + 1?"}])
    words = ("--config.data.prompt_key=text", "--config.reward.terms=length[1:9]:1")
    report, code = run_check(capsys, path, *words)
    assert (report["first_prompt"], report["problems"], code) == ("1 + 1?", [], 0)
    with pytest.raises(SystemExit, match=r"Did you mean config\.data\.prompt_key\?"):
        check.main(["check", path, "--config.data.prompt_kee=text"])
