"""What an evaluation by itself refuses. Its figures are compared with a run's in test_train.py."""

import dataclasses
import json
import types

import pytest

import tiny
from jax_ppo.config.schema import Trainer
from jax_ppo.config.training_options import LoraOptions
from jax_ppo.errors import UserError
from jax_ppo.run import evaluation, standalone_evaluation, token_scores
from jax_ppo.run.standalone_evaluation import evaluate_model


def test_an_evaluation_needs_held_out_prompts(tmp_path):
    with pytest.raises(UserError, match="config.data.val_files=''"):
        evaluate_model(tiny.config(data__val_files=""), tmp_path)


def test_a_checkpoint_without_the_options_of_its_run_is_refused(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "3"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match="cannot read the options of its run"):
        config = tiny.config(model__path=str(checkpoint), data__val_files="arithmetic:4:heldout")
        evaluate_model(config, tmp_path)


def test_options_of_a_run_that_are_no_object_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="options of its run: .*config.json must hold a JSON objec"):
        standalone_evaluation.read_run_options(tmp_path / "checkpoints" / "3")


def test_options_of_a_run_that_are_gone_are_named(tmp_path, capsys):
    run = dataclasses.asdict(tiny.config(critic__cliprange_value=0.3))
    run["critic"]["huber_delta"] = 0.5
    run["data"]["cache"] = {"folder": "f"}
    (tmp_path / "config.json").write_text(json.dumps(run))
    options = standalone_evaluation.read_run_options(tmp_path / "checkpoints" / "3")
    assert options.critic == tiny.config(critic__cliprange_value=0.3).critic
    line = "this version does not have: critic.huber_delta=0.5, data.cache.folder='f'"
    assert capsys.readouterr().out.splitlines()[0].endswith(line)


def test_a_run_without_an_export_is_refused_with_its_newest_checkpoint(tmp_path, monkeypatch):
    """Regression: its config.json was read as that of a model."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_metrics.csv").write_text("step\n")
    config = tiny.config(model__path="~", data__val_files="arithmetic:4:heldout")
    with pytest.raises(UserError, match="it has exported no model, .*config.trainer.export.$"):
        evaluate_model(config, tmp_path / "evaluation")
    for step in (8, 12):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    with pytest.raises(UserError, match="evaluate and score take .*/checkpoints/12$"):
        evaluate_model(config, tmp_path / "evaluation")


def test_what_shapes_a_checkpoint_is_that_of_its_run(tmp_path):
    """Regression: another `reward.normalize` than the run's was an error of shapes."""
    run = tiny.config(model__dtype="bfloat16", reward__normalize="running")
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(run)))
    config, _ = token_scores._choose_models(tiny.config(), tmp_path / "checkpoints" / "3")
    assert config.model.dtype == "bfloat16" and config.critic == run.critic
    assert config.reward.normalize == "running"
    run = dataclasses.replace(run, trainer=Trainer(critic_only=True))
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(run)))
    with pytest.raises(UserError, match=f"has no actor; .*critic.path={tmp_path}/critic"):
        standalone_evaluation.read_run_options(tmp_path / "checkpoints" / "3")


@pytest.mark.parametrize("name", ["my-model", "12.damaged"])
def test_a_model_in_a_folder_called_checkpoints_is_no_checkpoint_of_a_run(tmp_path, name):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    config = tiny.config(
        model__path=str(tmp_path / "checkpoints" / name), data__val_files="arithmetic:4:heldout"
    )
    with pytest.raises(UserError, match=f"{name} has no config.json"):
        evaluate_model(config, tmp_path)


@pytest.mark.parametrize(("revision", "base"), [(None, "/models/base"), ("v2", "/models/base@v2")])
def test_exported_adapters_of_a_critic_are_read_on_their_base(
    revision, base, tmp_path, monkeypatch, capsys
):
    """Regression: a run with adapters could not be scored by the critic it exported."""
    described = {"base_model_name_or_path": "/models/base", "revision": revision}
    for name in ("adapter", "critic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(described))
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "config.json").write_text("{}")
    config = tiny.config(model__path=str(tmp_path), model__lora__path="first")
    model, critic = standalone_evaluation.with_exported_models(config.model, config.critic, True)
    assert (model.path, model.lora.path) == (base, str(tmp_path / "adapter"))
    assert critic.path == str(tmp_path / "critic")
    model, _ = standalone_evaluation.with_exported_models(config.model, config.critic, False)
    # Regression: the adapters that the run started from were added to its own, merged ones.
    assert (model.path, model.lora) == (str(tmp_path / "actor"), LoraOptions())
    assert "lora.path='first' is not read" in capsys.readouterr().out
    # A critic trained alone: its run has no adapters of an actor.
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    model, _ = standalone_evaluation.with_exported_models(config.model, config.critic, True)
    assert model.path == str(tmp_path / "actor")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "critic" / "value_unit.json").write_text("{}")
    options = dataclasses.replace(config.critic, path="~/critic")
    _, critic = standalone_evaluation.with_exported_models(config.model, options, True)
    assert critic.normalize_values, "its unit is that of the file"


def test_a_reward_function_that_fails_on_everything_gives_no_figures():
    failure = "row 0 of the batch:\nTraceback"
    rewards = types.SimpleNamespace(failures=2, scored=3, first_failure=failure)
    scored = tiny.make_evaluation(None)
    assert evaluation.count_failures(scored, [rewards]).failures == 2
    rewards.failures = 3
    with pytest.raises(UserError, match="failed on all 3 responses.* row 0 of the batch:\nTrace"):
        evaluation.count_failures(scored, [rewards])
