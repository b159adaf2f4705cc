"""Scores of given responses are what a run has learned from them."""

import json
import types

import numpy as np
import pytest

from data_files import write_rows
from jax_ppo import command
from jax_ppo.config import loading
from jax_ppo.errors import UserError
from jax_ppo.run import ppo_training, token_scores
from jax_ppo.run.token_scores import FIGURES, score_file
from jax_ppo.training.roles import SMALL_MODEL
from whole_run import finish, read_lines, start_processes

OPTIONS = {
    "data.train_files": "arithmetic:24",
    "data.val_files": "",
    "data.train_batch_size": 6,
    "data.val_batch_size": 4,
    "actor.ppo_mini_batch_size": 6,
    "rollout.n": 2,
    "algorithm.lam": 0.9,
    "algorithm.gamma": 0.99,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.kl_coef": 0.1,
    "reward.missing_eos_penalty": 0.5,
    "reward.length_penalty": 0.1,
    "trainer.critic_warmup": 0,
    "trainer.total_training_steps": 2,
    "trainer.save_freq": 1,
    "trainer.log_rollouts_freq": 1,
    "trainer.log_rollouts": 12,
}


def load(command="score", **changes):
    overrides = {name.replace("__", "."): value for name, value in changes.items()}
    values = loading.read_config_file("arithmetic")
    for name, value in {**OPTIONS, **overrides}.items():
        values.update_from_flattened_dict({name: value})
    return loading.from_config_dict(values, command)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a run of two steps with all responses of the second one."""
    workdir = tmp_path_factory.mktemp("run")
    ppo_training.train_ppo(load("train"), workdir)
    return workdir


def columns(tokens, name):
    """Return the numbers of a column, a list for each response."""
    responses = {}
    for token in tokens:
        responses.setdefault(token["row"], []).append(token[name])
    return list(responses.values())


@pytest.mark.slow
def test_a_file_of_rollouts_gets_what_the_step_has_learned_from(trained, tmp_path):
    """The first checkpoint sampled the second step; rewards of all rows whiten advantages."""
    file = trained / "rollouts" / "training_000002.jsonl"
    config = load(
        model__path=str(trained / "checkpoints" / "1"),
        score__file=str(file),
        reward__normalize="running",  # not the run's, which its checkpoint's moments follow
    )
    summary = score_file(config, tmp_path)
    note = "normalize='running': not read; the checkpoint was saved with 'none'"
    assert note in summary["notes"][0]
    records = read_lines(file)
    tokens = read_lines(tmp_path / "tokens.jsonl")
    assert len(records) == summary["rows"] == 12
    for column, name in FIGURES.items():
        if name in records[0]:
            logged = [record[name] for record in records]
            assert np.any(np.concatenate(logged)), name
            for ours, theirs in zip(columns(tokens, column), logged, strict=True):
                # A KL that rounding explains is 0, and so is not a record's plain difference.
                atol = 2e-4 if name == "kl" else 2e-5
                np.testing.assert_allclose(ours, theirs, atol=atol, err_msg=name)
    assert {"logprobs", "kl", "values", "rewards", "advantages", "returns"} <= records[0].keys()
    assert [record["tokens"] for record in records] == columns(tokens, "text")
    assert [record["response_ids"] for record in records] == columns(tokens, "token")
    logprobs, references, kls = (
        np.concatenate(columns(tokens, name)) for name in ("logprob", "ref_logprob", "kl")
    )
    np.testing.assert_allclose(logprobs - references, kls, atol=2e-4)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "reference_logprobs" in page and "12 responses of" in page
    assert not read_lines(tmp_path / "refused.jsonl")


@pytest.mark.slow
def test_texts_are_scored_without_a_critic_and_broken_rows_are_refused(trained, tmp_path):
    """The exported critic is left out by the estimator; rewards come from a column."""
    row = {"prompt": "What is 1 + 1?", "response": "2", "data_source": "arithmetic"}
    rows = [
        row | {"ground_truth": "2", "points": 1.0},
        row | {"response": "", "ground_truth": "2", "points": 1.0},
        row | {"ground_truth": "2", "points": float("nan")},
        row | {"ground_truth": "2", "points": 3.0},
    ]
    file = tmp_path / "rows.jsonl"
    write_rows(file, rows)
    with file.open("a") as opened:
        opened.write('{"prompt": "half')
    config = load(
        model__path=str(SMALL_MODEL),
        algorithm__use_kl_in_reward=False,
        reward__missing_eos_penalty=0.0,
        reward__length_penalty=0.0,
        algorithm__whiten_advantages=False,
        score__file=str(file),
        score__reward_key="points",
    )
    (tmp_path / "scores").mkdir()
    summary = score_file(config, tmp_path / "scores")
    tokens = read_lines(tmp_path / "scores" / "tokens.jsonl")
    assert {token["row"] for token in tokens} == {1, 4}
    refused = read_lines(tmp_path / "scores" / "refused.jsonl")
    assert [row["location"] for row in refused] == [f"{file}:{line}" for line in (2, 3, 5)]
    reasons = ("response is empty", "points: expected a finite number, got nan", "not JSON")
    for row, reason in zip(refused, reasons, strict=True):
        assert reason in row["reason"]
    assert refused[2]["row"] == '{"prompt": "half'
    assert "no critic" in summary["notes"][0]
    last = [values[-1] for values in columns(tokens, "reward")]
    assert last == [1.0, 3.0]
    # Rewards to go, discounted by 0.99 per token.
    for values, reward in zip(columns(tokens, "advantage"), last, strict=True):
        expected = reward * 0.99 ** np.arange(len(values))[::-1]
        np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert {token["value"] for token in tokens} == {None}


@pytest.mark.slow
def test_an_exported_run_is_scored_with_its_critic(trained):
    config, notes = token_scores._choose_models(
        load(model__path=str(trained), score__file="rows.jsonl"), None
    )
    assert config.model.path == str(trained / "actor") and not notes
    assert config.critic.path == str(trained / "critic") and config.has_critic


def test_groups_are_whole_and_adjacent():
    """Prompts a, b, a, a, b, c in groups of two: the third a and c have no partner."""
    rows = [
        types.SimpleNamespace(
            prompt_ids=np.array([prompt], np.int32), example=types.SimpleNamespace(ground_truth="")
        )
        for prompt in (1, 2, 1, 1, 2, 3)
    ]
    assert token_scores._group_rows("grpo", 2, rows).tolist() == [0, 2, 1, 4]
    assert len(token_scores._group_rows("gae", 2, rows)) == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows.txt", "config.score.file=.*expected a name in .jsonl"),
        ("row.jsonl", "config.score.file: there is no file .*row.jsonl. Did you mean 'rows.jsonl'"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_loaded(name, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    options = ["--config.model.path=model", f"--config.score.file={tmp_path / name}"]
    with pytest.raises(SystemExit, match=message):
        command.run_command(["score", "--config=arithmetic", *options], "score")


def test_options_without_a_file_or_a_model_are_refused():
    with pytest.raises(UserError, match="config.score.file=''"):
        load(model__path="model")
    with pytest.raises(UserError, match="config.model.path=''"):
        load(score__file="rows.jsonl")


@pytest.mark.slow
def test_an_exported_critic_without_a_unit_has_not_learned_normalized_returns(trained, tmp_path):
    """Regression: its values were taken for rewards."""
    file = str(trained / "rollouts" / "training_000002.jsonl")
    config = load(model__path=str(trained), score__file=file, critic__normalize_values=True)
    with pytest.raises(UserError, match="normalize_values=True: the critic in .* predicts rewards"):
        score_file(config, tmp_path)


@pytest.mark.exhaustive
def test_an_exported_critic_of_normalized_values_is_read_as_its_checkpoint_is(tmp_path):
    run = tmp_path / "run"
    options = {
        "critic__normalize_values": True,
        "data__val_files": "arithmetic:4:heldout",
        "rollout__val_kwargs__n": 2,
        "rollout__val_kwargs__temperature": 1.0,
    }
    ppo_training.train_ppo(load("train", **options, trainer__test_freq=-1), run)
    file = str(run / "rollouts" / "training_000002.jsonl")
    values = []
    for number, model in enumerate((run / "checkpoints" / "2", run)):
        folder = tmp_path / str(number)
        folder.mkdir()
        score_file(load(model__path=str(model), score__file=file), folder)
        values.append(np.concatenate(columns(read_lines(folder / "tokens.jsonl"), "value")))
    np.testing.assert_allclose(*values, atol=1e-5)
    assert np.std(values[0]) > 1e-3


@pytest.mark.exhaustive
def test_two_processes_score_as_one_does(trained, tmp_path, coordinator_address):
    broken = tmp_path / "rows.jsonl"
    rows = (trained / "rollouts" / "training_000002.jsonl").read_text()
    broken.write_text(rows + '{"prompt": "half')
    models = {"model.path": str(trained / "checkpoints" / "2"), "score.file": str(broken)}
    (tmp_path / "one").mkdir()
    expected = score_file(load(**models), tmp_path / "one")
    arguments = [f"--config.{name}={value}" for name, value in (OPTIONS | models).items()]
    command = ["-m", "jax_ppo.score", "--config=arithmetic", f"--workdir={tmp_path}/two"]
    finish(start_processes(*command, *arguments, address=coordinator_address))
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    for name in ("rows", "refused", "tokens", "reward_mean", "without_advantage"):
        assert summary[name] == pytest.approx(expected[name], abs=1e-6), name
    one, two = (read_lines(tmp_path / name / "tokens.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) and summary["refused"] == 1
    for name, value in one[0].items():
        ours, theirs = ([token[name] for token in tokens] for tokens in (two, one))
        if isinstance(value, float):
            np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=name)
        else:
            assert ours == theirs, name
    assert read_lines(tmp_path / "one/refused.jsonl") == read_lines(tmp_path / "two/refused.jsonl")
