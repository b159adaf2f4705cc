"""What an option's facts mean for each command: what is required, read, and fixed on resume."""

import pytest

import tiny
from jax_ppo.config import schema, validation
from jax_ppo.errors import UserError

OPTIONS = {option.name: option for option in schema.all_options()}


def test_a_section_passes_its_facts_on_and_an_option_may_declare_its_own():
    assert OPTIONS["supervised.optim.lr"].read_by == ("sft", "reward_model")
    assert OPTIONS["supervised.response_key"].read_by == ("sft",)
    assert OPTIONS["rollout.val_kwargs.n"].read_by == ("train", "critic", "evaluate")
    assert OPTIONS["data.shuffle"].read_by == ("train", "critic", "sft", "reward_model")
    assert OPTIONS["model.lora.rank"].facts.fixed_on_resume
    assert OPTIONS["model.lora.rank"].read_by == ("train", "critic", "evaluate", "score")
    assert not OPTIONS["actor.optim.lr"].facts.fixed_on_resume


def test_types_and_defaults_are_the_fields():
    assert OPTIONS["actor.target_kl"].value_type is float and OPTIONS["actor.target_kl"].optional
    assert OPTIONS["critic.optim.lr"].default == 1e-5
    assert OPTIONS["supervised.optim.beta2"].default == 0.999


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"critic__normalize_values": True},
            r"normalize_values=True: there is no critic with .*rloo",
        ),
        ({"algorithm__bootstrap_truncated": True}, r"bootstrap_truncated=True: there is no critic"),
        (
            {"algorithm__adv_estimator": "turn_gae", "algorithm__bootstrap_truncated": True},
            r"bootstrap_truncated=True: .*'turn_gae' has a critic that learns values only where",
        ),
    ],
)
def test_requirements_name_the_option_and_what_is_missing(changes, message):
    with pytest.raises(UserError, match=message):
        tiny.config(**{"algorithm__adv_estimator": "rloo", "rollout__n": 2} | changes)


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
    most = {"algorithm__filter_groups__max_num_gen_batches": 3}
    (note,) = validation.train_notes(tiny.config(**most))
    assert note == (
        "config.algorithm.filter_groups.max_num_gen_batches=3 has no effect with the other "
        "options: it is read only if `algorithm.filter_groups.enable` is on"
    )
    filtered = tiny.config(algorithm__filter_groups__enable=True, rollout__n=2, **most)
    assert "max_num_gen_batches" not in " ".join(validation.train_notes(filtered))
