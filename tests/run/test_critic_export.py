"""The critic that a run exports, and a run that continues from it."""

import json

import jax
import numpy as np
import pytest

from jax_ppo.config import loading
from jax_ppo.errors import UserError
from jax_ppo.run import ppo_training, standalone_evaluation
from jax_ppo.training.state import StateBuilder

OPTIONS = {
    "data.train_files": "arithmetic:64",
    "data.val_files": "",
    "data.train_batch_size": 8,
    "actor.ppo_mini_batch_size": 8,
    "critic.optim.lr": 1e-2,
    "reward.missing_eos_penalty": 1.0,
    "trainer.critic_warmup": 0,
    "trainer.val_before_train": False,
    "trainer.total_training_steps": 2,
    "trainer.save_freq": 0,
}


def train(monkeypatch, workdir, **changes):
    """Train; return the critics that the run has started from and ended with, on the host."""
    seen = []
    create_state, finish = StateBuilder.create, ppo_training.export_models

    def created(*arguments, **options):
        state = create_state(*arguments, **options)
        seen.append(jax.device_get(state.critic or state.actor))
        return state

    def finished(run, state, *arguments):
        seen.append(jax.device_get(state.critic or state.actor))
        finish(run, state, *arguments)

    named = {name.replace("__", "."): value for name, value in changes.items()}
    with monkeypatch.context() as patch:
        patch.setattr(StateBuilder, "create", created)
        patch.setattr(ppo_training, "export_models", finished)
        ppo_training.train_ppo(loading.load_config("arithmetic", OPTIONS | named), workdir)
    return seen


@pytest.mark.slow
def test_a_critic_with_frozen_attention_resumes_exactly_and_is_exported_whole(
    tmp_path, monkeypatch
):
    frozen = {"critic__freeze": "attention", "trainer__save_freq": 1}
    started, whole = train(monkeypatch, tmp_path / "whole", **frozen)
    train(monkeypatch, tmp_path / "cut", **frozen, trainer__total_training_steps=1)
    _, resumed = train(monkeypatch, tmp_path / "cut", **frozen)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    exported = {"critic__path": f"{tmp_path}/whole/critic", "trainer__total_training_steps": 1}
    continued, _ = train(monkeypatch, tmp_path / "next", **exported)
    jax.tree.map(np.testing.assert_array_equal, continued, whole)
    for name, tensors in started["layers"].items():
        same = jax.tree.map(np.array_equal, tensors, whole["layers"][name])
        assert set(jax.tree.leaves(same)) == {name == "attention"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_continues_from_an_exported_critic_with_its_head(rank, tmp_path, monkeypatch, capsys):
    train(monkeypatch, tmp_path / "base")
    base = {"model__path": f"{tmp_path}/base/actor", "model__lora__rank": rank}
    started, ended = train(monkeypatch, tmp_path / "run", **base)
    assert not np.any(started["score"]["kernel"]) and np.any(ended["score"]["kernel"])
    capsys.readouterr()
    critic = f"{tmp_path}/run/critic"
    continued, _ = train(monkeypatch, tmp_path / "next", **base, critic__path=critic)
    jax.tree.map(np.testing.assert_array_equal, continued, ended)
    assert "critic.keep_head: on, since critic.path holds a critic" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_shared_trunk_is_exported_as_a_critic_that_a_separate_one_starts_from(
    tmp_path, monkeypatch
):
    _, ended = train(monkeypatch, tmp_path / "run", critic__shared_trunk=True)
    description = json.loads((tmp_path / "run/critic/config.json").read_text())
    assert description["architectures"] == ["LlamaForTokenClassification"]
    continued, _ = train(monkeypatch, tmp_path / "next", critic__path=f"{tmp_path}/run/critic")
    jax.tree.map(np.testing.assert_array_equal, continued, ended)


@pytest.mark.slow
def test_a_run_exports_only_the_actor_if_asked(tmp_path, monkeypatch):
    train(monkeypatch, tmp_path, trainer__export_critic=False)
    assert (tmp_path / "actor").exists() and not (tmp_path / "critic").exists()


@pytest.mark.exhaustive
def test_the_best_checkpoint_is_exported_beside_the_last(tmp_path, monkeypatch, capsys):
    evaluate = ppo_training.PPOTraining.evaluate

    def earlier_is_better(self, state, step, *arguments):
        return evaluate(self, state, step, *arguments) | {"accuracy": float(-step)}

    monkeypatch.setattr(ppo_training.PPOTraining, "evaluate", earlier_is_better)
    options = {
        "data__val_files": "arithmetic:4:heldout",
        "actor__optim__lr_schedule": "constant",
        "critic__optim__lr_schedule": "constant",
        "trainer__save_freq": 1,
        "trainer__test_freq": 1,
        "trainer__export_best": True,
    }
    for steps in (1, 2):
        run = tmp_path / str(steps)
        train(monkeypatch, run, **options, trainer__total_training_steps=steps)
        assert "the best checkpoint: after step 1\n" in capsys.readouterr().out
    for role in ("actor", "critic"):
        first, last, best = (
            (tmp_path / folder / role / "model.safetensors").read_bytes()
            for folder in ("1", "2", "2/best")
        )
        assert best == first != last, role
    best = f"{tmp_path}/2/best"
    config = loading.load_config(None, {"model.path": best, "data.train_files": "x"})
    models = standalone_evaluation.with_exported_models(config.model, config.critic, True)
    assert [model.path for model in models] == [f"{best}/actor", f"{best}/critic"]


def test_a_best_checkpoint_needs_evaluations():
    with pytest.raises(UserError, match=r"export_best=True: the best .* needs config\.data\.val"):
        loading.load_config("arithmetic", OPTIONS | {"trainer.export_best": True})
