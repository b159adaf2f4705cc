"""Notes about options that are permitted but may not be meant. Refusals are in test_loading.py."""

import pytest

import tiny
from jax_ppo.config import schema, training_options, validation
from jax_ppo.errors import UserError


def test_what_may_not_be_meant_is_noted():
    assert validation.train_notes(tiny.config()) == []
    noted = " ".join(
        validation.train_notes(
            tiny.config(
                algorithm__adv_estimator="grpo",
                rollout__n=4,
                algorithm__lam=0.9,
                actor__policy_loss="gspo",
                rollout__top_p=0.9,
                algorithm__use_kl_in_reward=True,
                algorithm__kl_penalty="abs",
            )
        )
    )
    for name in ("algorithm.lam=0.9", "policy_loss='gspo'", "top_p", "kl_penalty='abs'"):
        assert name in noted, name


def test_turns_are_noted_where_no_environment_divides_responses():
    turns = {"algorithm__adv_estimator": "turn_gae", "algorithm__turn_lam": 0.9}
    (noted,) = validation.train_notes(tiny.config(**turns))
    assert "adv_estimator='turn_gae': every response is one turn" in noted
    environment = {"rollout__multi_turn__environment": "jax_ppo.environments.calculator:Calculator"}
    assert validation.train_notes(tiny.config(**turns, **environment)) == []


def test_a_warm_up_as_long_as_the_run_is_noted():
    optims = {
        section: training_options.Optim(lr=1e-3, lr_warmup_steps=steps)
        for section, steps in (("actor", 2), ("critic", 4))
    }
    assert list(validation.note_long_warmups(5, 3, optims)) == []
    [actor] = validation.note_long_warmups(4, 3, optims)
    assert actor.startswith(
        "config.actor.optim.lr_warmup_steps=2: in 1 step the learning rate only"
    )
    never, critic = validation.note_long_warmups(3, 3, optims)
    assert "the actor is never trained in 3 steps" in never and "in 3 steps" in critic
    optims = {"supervised": training_options.Optim(lr=1e-3, lr_warmup_steps=100)}
    [supervised] = validation.note_long_warmups(5, 0, optims)
    assert supervised == (
        "config.supervised.optim.lr_warmup_steps=100: in 5 steps the learning rate only "
        "rises to 5e-05, not to lr=0.001"
    )


def test_adapters_that_an_external_engine_gets_merged_are_noted():
    adapters = {"model__lora__rank": 4}
    external = tiny.config(rollout__engine="transformers", **adapters)
    assert "gets the adapters merged" in " ".join(validation.train_notes(external))
    server = {"rollout__engine": "openai", "rollout__url": "http://127.0.0.1:8000"}
    for others in ({}, server):
        assert "merged" not in " ".join(validation.train_notes(tiny.config(**adapters, **others)))


def test_an_option_of_another_command_is_noted_instead_of_required():
    config = tiny.config(reward__model_path="x", reward__max_length=64)
    without = schema.Config(
        reward=schema.Reward(max_length=64), data=config.data, model=schema.Model(path="x")
    )
    with pytest.raises(UserError, match="max_length=64: there is no reward model"):
        validation.validate_config(without, "train")
    validation.validate_config(without, "sft")
    first = next(validation.note_unread_options(without, "sft"))
    assert "config.reward.max_length=64 is not read" in first


def test_a_note_says_when_an_option_has_an_effect():
    """Regression: the coefficient of a KL that is off, or a clip that no loss reads, had none."""
    unread = {"actor__policy_loss": "reinforce", "algorithm__adv_estimator": "rloo"}
    adaptive = {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"}
    for name, value, effective in (
        ("algorithm.kl_ctrl.kl_coef", 0.1, {"algorithm__use_kl_in_reward": True}),
        ("algorithm.kl_ctrl.target_kl", 1.0, adaptive),
        ("actor.kl_loss_coef", 0.1, {"actor__use_kl_loss": True}),
        ("actor.clip_ratio_high", 0.3, {"actor__policy_loss": "cispo"}),
        ("actor.clip_ratio_c", 2.0, {}),
        ("actor.loss_scale_factor", 7, {"critic__loss_agg_mode": "seq-mean-token-sum-norm"}),
        ("critic.cliprange_value", 0.2, {}),
        ("reward.overlong_penalty_factor", 2.0, {"reward__overlong_buffer_len": 1}),
        ("rollout.val_kwargs.top_p", 0.5, {"rollout__val_kwargs__temperature": 1.0}),
    ):
        note = f"config.{name}={value} has no effect with the other options: it is read only if `"
        for options, is_noted in ((unread, True), (effective, False)):
            config = tiny.config(**options, rollout__n=2, **{name.replace(".", "__"): value})
            notes = " ".join(validation.train_notes(config))
            assert (note in notes) == is_noted, notes
