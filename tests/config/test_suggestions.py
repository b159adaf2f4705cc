"""What is said of options that do not exist: other frameworks', misspelled, or like none."""

import random
import re
import string

import pytest

from jax_ppo.config.schema import all_options
from jax_ppo.config.suggestions import (
    FRAMEWORKS,
    find_answer,
    find_nearest,
    read_framework,
    suggest_option,
)

NAMES = [option.name for option in all_options()]


def misspell(name, generator):
    """Drop, insert, replace or swap one letter."""
    place = generator.randrange(len(name) - 1)
    letter = generator.choice(string.ascii_lowercase)
    before, here, after = name[:place], name[place], name[place + 1 :]
    return generator.choice(
        [
            before + after,
            before + letter + here + after,
            before + letter + after,
            before + after[0] + here + after[1:],
        ]
    )


def test_misspelled_options_are_recognized():
    generator = random.Random(0)
    typos = [(misspell(name, generator), name) for name in NAMES]
    typos = [(typo, name) for typo, name in typos if typo not in NAMES]
    right = [find_nearest(typo, NAMES) == [name] for typo, name in typos]
    assert len(right) > 180 and sum(right) >= 0.97 * len(right)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        # The whole name counts, not only an equal last part in the first section that has it.
        ("crtic.optim.lr", ["critic.optim.lr"]),
        ("supervised.optm.lr", ["supervised.optim.lr"]),
        ("actor.clip_ration", ["actor.clip_ratio"]),
        ("rollouts.temperature", ["rollout.temperature"]),
        ("temprature", ["rollout.temperature", "rollout.val_kwargs.temperature"]),
        ("modeldtype", ["model.dtype"]),
        # A part of the last name; and a wrong name in a right section, which says nothing.
        ("data.batch_size", ["data.train_batch_size", "data.val_batch_size"]),
        ("rollout.multi_turn.env", ["rollout.multi_turn.environment"]),
        ("model.lora.r", ["model.lora.rank"]),
        ("reward.fn", ["reward.function"]),
        ("mesh.tp", []),
        ("algorithm.kl_ctrl.beta", []),
        ("critic.optim.learning_rate", []),
        # Another framework's section, which is like none, with a last part that many have.
        ("grpo.reward_scaling.enabled", []),
        ("foo.bar", []),
        ("Actor.Clip_Ratio", ["actor.clip_ratio"]),
        ("xyz", []),
        ("engine.max_batch_tokens", []),
    ],
)
def test_the_nearest_option_is_that_of_the_whole_name(name, nearest):
    assert find_nearest(name, NAMES) == nearest


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("actor.clip_ratio", "verl's actor.clip_ratio: config.actor.clip_ratio."),
        ("model.path", "verl's model.path: config.model.path."),
        ("actor.clip_rato", "Did you mean config.actor.clip_ratio?"),
    ],
)
def test_verls_section_around_the_actors_is_left_out(name, answer):
    assert suggest_option(f"actor_rollout_ref.{name}") == answer


def test_a_section_is_no_option():
    assert suggest_option("actor.optim").startswith("It is a section")


def test_the_options_of_a_small_section_are_listed_where_no_name_is_near():
    text = "config.algorithm.kl_ctrl.* are type, kl_coef, target_kl, target_unit, horizon."
    assert suggest_option("algorithm.kl_ctrl.beta") == text
    assert suggest_option("rollout.beam") == "`python -m jax_ppo config` lists all options."


def test_options_of_other_frameworks_are_explained():
    for framework in map(read_framework, FRAMEWORKS):
        for name, answer in framework.options.items():
            text = suggest_option(name)
            assert framework.title in text and name in text and answer in text
    assert sum(len(read_framework(name).options) for name in FRAMEWORKS) >= 700


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (
            "ref.megatron.router_replay.mode",
            "verl's ref.megatron.router_replay.mode: Megatron is not",
        ),
        ("critic.optim.min_lr", "config.critic.optim.min_lr_ratio is a share of lr"),
        ("critic.optim.lr_decay_style", "config.actor.optim.lr_schedule"),
        ("ref_num_gpus_per_node", "all roles run in one program"),
    ],
)
def test_options_of_megatron_are_not_taken_for_typos(name, answer):
    text = suggest_option(name)
    assert answer in text and "Did you mean" not in text


def test_the_answer_of_a_group_is_for_options_without_their_own():
    table = {"a.*": "all", "a.b.*": "some", "a.b.c": "one"}
    names = ["a.b.c", "a.b.d", "a.d", "a", "b.a"]
    answers = [find_answer(table, name) for name in names]
    assert answers == ["one", "some", "all", None, None]


def test_a_name_of_two_frameworks_is_explained_for_both():
    text = suggest_option("train_batch_size")
    assert "OpenRLHF's train_batch_size: config.actor.ppo_mini_batch_size" in text
    assert "verl's" in suggest_option("actor_rollout_ref.rollout.name")
    assert "config.reward.model_path" in suggest_option("reward-model-path")


def test_the_explanations_name_options_that_exist():
    mentioned = [
        (name, word.removeprefix("config.").partition("=")[0])
        for framework in FRAMEWORKS
        for name, answer in read_framework(framework).options.items()
        for word in re.split(r"[ ,;]+", answer)
        if word.startswith("config.") and not word.endswith("*")
    ]
    assert len(mentioned) > 200
    assert [(name, option) for name, option in mentioned if option not in NAMES] == []
