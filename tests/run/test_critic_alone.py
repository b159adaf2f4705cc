"""`jax_ppo.critic`: the critic learns from the responses of an actor that stays as it is."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tiny
from data_files import write_rows
from jax_ppo.errors import UserError
from jax_ppo.run import ppo_training
from jax_ppo.training.roles import read_networks, resolve_role_folders, resolve_roles
from jax_ppo.training.state import StateBuilder
from llama_folder import write_arithmetic_llama
from whole_run import read_lines, read_rows

STEPS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a critic alone; return its options and work directory."""
    folder = tmp_path_factory.mktemp("critic")
    write_arithmetic_llama(folder)
    config = tiny.config(
        "critic",
        model__path=str(folder / "llama"),
        data__train_files="arithmetic:32",
        data__max_prompt_length=80,
        reward__terms="length[5:200]:1",
        trainer__log_rollouts=8,
        trainer__log_rollouts_freq=1,
        trainer__save_freq=2,
        trainer__max_checkpoints=4,
        trainer__total_training_steps=STEPS,
    )
    ppo_training.train_ppo(config, folder / "run")
    return config, folder / "run"


@pytest.mark.slow
def test_only_the_critic_is_trained_saved_and_exported(trained):
    config, workdir = trained
    assert (workdir / "critic" / "model.safetensors").exists()
    assert not (workdir / "actor").exists()
    saved = {path.name for path in (workdir / "checkpoints" / str(STEPS)).iterdir()}
    assert "critic" in saved and "actor" not in saved
    shapes = StateBuilder(config, tiny.networks(config), tiny.make_mesh()).shapes()
    assert set(shapes.optimizers) == {"critic"} and "actor" in shapes.models
    rows = read_rows(workdir)
    assert len(rows) == STEPS and "actor/loss" not in rows[0]
    # The values move from 0 towards the returns, which are positive.
    assert float(rows[0]["critic/values_mean"]) == 0 < float(rows[1]["critic/values_mean"])


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_critic(trained):
    config, workdir = trained
    weights = workdir / "critic" / "model.safetensors"
    expected = weights.read_bytes()
    weights.unlink()
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    ppo_training.train_ppo(config, workdir)
    assert weights.read_bytes() == expected


@pytest.mark.slow
def test_a_critic_learns_from_the_files_of_a_run_and_resumes_exactly(trained, tmp_path):
    """Four files of eight responses, of which a broken row is refused by its line."""
    config, workdir = trained
    files = tmp_path / "rollouts"
    files.mkdir()
    scores = []
    for path in sorted((workdir / "rollouts").glob("training_*.jsonl")):
        # Later tokens can tell, which the values must learn.
        records = [x | {"score": x["response_ids"][0] % 2} for x in read_lines(path)]
        scores += [record["score"] for record in records]
        write_rows(files / path.name, records)
    with (files / "training_000004.jsonl").open("a") as file:
        file.write('{"prompt": "half')
    config = tiny.config(
        "critic",
        model__path=config.model.path,
        data__train_files="",
        data__max_prompt_length=80,
        critic__optim__lr=3e-3,
        critic__cliprange_value=0.0,
        critic__ppo_epochs=2,
        score__file=str(files),
        score__reward_key="score",
        rollout__n=4,
        trainer__save_freq=12,
        trainer__max_checkpoints=3,
        trainer__total_training_steps=24,
    )
    run = tmp_path / "run"
    ppo_training.train_ppo(config, run)
    rows = read_rows(run)
    # An epoch has each row once; the values of a step come before its update.
    first_epoch = [float(row["reward/mean"]) for row in rows[:4]]
    assert np.mean(first_epoch) == pytest.approx(np.mean(scores), abs=1e-5)
    assert float(rows[0]["critic/explained_variance"]) == 0
    assert max(float(row["critic/explained_variance"]) for row in rows[-3:]) > 0.1
    (refused,) = read_lines(run / "refused.jsonl")
    assert refused["location"].endswith("training_000004.jsonl:9")
    expected = (run / "critic" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / "24")
    ppo_training.train_ppo(config, run)
    assert (run / "critic" / "model.safetensors").read_bytes() == expected
    score = dataclasses.replace(config.score, reward_key="")
    with pytest.raises(UserError, match="data have changed"):
        ppo_training.train_ppo(dataclasses.replace(config, score=score), run)


@pytest.mark.slow
def test_ppo_starts_with_the_values_of_the_critic(trained, tmp_path):
    config, workdir = trained
    ppo = tiny.config(
        model__path=config.model.path,
        critic__path=str(workdir / "critic"),
        data__train_files="arithmetic:32",
        data__max_prompt_length=80,
        reward__terms="length[5:200]:1",
        trainer__export=False,
        trainer__save_freq=0,
        trainer__total_training_steps=1,
    )
    ppo_training.train_ppo(ppo, tmp_path / "ppo")
    (row,) = read_rows(tmp_path / "ppo")
    assert abs(float(row["critic/values_mean"])) > 0.01


@pytest.mark.exhaustive
def test_a_critic_of_normalized_returns_keeps_its_unit(trained, tmp_path):
    """Regression: a run that continued from it read its first values without their mean."""
    config, _ = trained

    def continued(folder, normalizes):
        critic = dataclasses.replace(config.critic, path=folder, normalize_values=normalizes)
        return dataclasses.replace(
            config,
            critic=critic,
            trainer=dataclasses.replace(config.trainer, total_training_steps=2),
        )

    def first_state(options):
        folders = resolve_role_folders(resolve_roles(options), options.model)
        nets = read_networks(options, folders)
        states = StateBuilder(options, nets, tiny.make_mesh())
        return states.create_models(folders, lambda name: None)

    ppo_training.train_ppo(continued("", True), tmp_path / "run")
    exported = tmp_path / "run" / "critic"
    unit = json.loads((exported / "value_unit.json").read_text())
    assert unit["count"] > 0 and unit["mean"] > 0
    state = first_state(continued(str(exported), True))
    moments = state.control.moments["returns"]._asdict()
    assert {name: float(x) for name, x in moments.items()} == unit
    head = load_file(exported / "model.safetensors")["score.weight"]
    np.testing.assert_array_equal(state.critic["score"]["kernel"][:, 0], head[0])
    with pytest.raises(UserError, match="predicts normalized returns; set it to True"):
        first_state(continued(str(exported), False))
    with pytest.raises(UserError, match="predicts rewards, or was exported without"):
        first_state(continued(str(trained[1] / "critic"), True))


@pytest.mark.exhaustive
def test_adapters_of_the_critic_are_trained_alone(trained, tmp_path):
    config, _ = trained
    lora = dataclasses.replace(config.model.lora, rank=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=lora))
    ppo_training.train_ppo(config, tmp_path / "run")
    assert (tmp_path / "run" / "critic" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.slow
def test_a_resume_on_another_actor_is_refused(trained, tmp_path):
    """No checkpoint holds the actor, nor the reference that starts as its copy."""
    config, workdir = trained
    copy = tmp_path / "llama"
    shutil.copytree(config.model.path, copy)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(copy)))
    ppo_training.train_ppo(config, tmp_path / "run")
    weights = load_file(copy / "model.safetensors")
    save_file({name: x * 2 for name, x in weights.items()}, copy / "model.safetensors")
    with pytest.raises(UserError, match=r"config\.model\.path"):
        ppo_training.train_ppo(config, tmp_path / "run")


def test_targets_are_whole_returns_unless_lambda_is_set():
    assert tiny.config("critic", algorithm__lam=0.9).algorithm.critic_lam == 1
    assert tiny.config("critic", algorithm__critic_lam=0.95).algorithm.critic_lam == 0.95


@pytest.mark.parametrize(
    "changes",
    [{"algorithm__adv_estimator": "grpo", "rollout__n": 2}, {"critic__shared_trunk": True}],
)
def test_what_no_other_run_could_use_is_refused(changes):
    with pytest.raises(UserError, match=r"config\.trainer\.critic_only=True"):
        tiny.config("critic", **changes)
