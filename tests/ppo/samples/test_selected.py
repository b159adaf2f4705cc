"""Groups with equal rewards are replaced, and some responses of each group are kept."""

import itertools
import json
import shutil
import types

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.ppo.samples import selected as selected_samples
from jax_ppo.ppo.samples.selected import choose_groups, choose_responses, is_uniform
from jax_ppo.reporting.files import read_samples
from jax_ppo.run import ppo_training
from llama_folder import write_arithmetic_llama
from whole_run import read_rows

FILTERED = {"algorithm__filter_groups__enable": True}
# Prompts with an odd answer earn nothing; other responses earn a number that they determine.
REWARD = """
import zlib
def reward(data_source, solution_str, ground_truth, extra_info):
    odd = int(ground_truth) % 2
    score = 0.0 if odd else zlib.crc32(solution_str.encode()) % 97 / 97
    return {"score": score, "odd": odd, "acc": score > 0.5}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_arithmetic_llama(folder, problems=200)
    (folder / "reward.py").write_text(REWARD)
    return folder


def train(files, workdir, **changes):
    options = dict(
        data__train_files="arithmetic:128",
        data__max_prompt_length=48,
        data__max_response_length=8,
        model__path=str(files / "llama"),
        reward__function=f"{files}/reward.py:reward",
        reward__workers=0,
        rollout__n=3,
        trainer__total_training_steps=4,
        trainer__save_freq=2,
        trainer__max_checkpoints=9,
        trainer__log_rollouts=99,
        trainer__log_rollouts_freq=1,
        trainer__export=False,
    )
    ppo_training.train_ppo(tiny.config(**options | changes), workdir)


def records_of_steps(workdir):
    return {step: records for kind, step, records in read_samples(workdir) if kind == "training"}


def groups_of(records, size=3):
    return [records[start : start + size] for start in range(0, len(records), size)]


@pytest.mark.parametrize("by", ["spread", "best"])
def test_the_kept_responses_are_those_of_an_exhaustive_search(by):
    scores = np.random.default_rng(0).normal(size=(40, 6))
    for keep in range(1, 7):
        chosen = choose_responses(scores, keep, by)
        assert chosen.shape == (40, keep)
        for row, indices in zip(scores, chosen, strict=True):
            assert len(set(indices)) == keep and list(indices) == sorted(indices)
            value = np.mean if by == "best" else np.var
            best = max(value(subset) for subset in itertools.combinations(row, keep))
            assert value(row[indices]) == pytest.approx(best)


def test_of_equal_scores_the_same_responses_are_kept_each_time():
    scores = np.array([[1.0, 0.0, 1.0, 0.0]])
    assert choose_responses(scores, 2, "best").tolist() == [[0, 2]]
    assert choose_responses(scores, 2, "spread").tolist() == [[1, 2]]


def test_a_group_is_uniform_if_its_known_figures_are_equal():
    nan = np.nan
    figures = np.array([[1, 1, 1], [1, 0, 1], [nan, 1, 1], [nan, 0, 1], [nan, nan, nan]])
    assert is_uniform(figures).tolist() == [True, False, True, False, True]
    by_rounding = np.array([[0.3, np.nextafter(np.float32(0.3), 1)], [0.3, 0.30001]], np.float32)
    assert is_uniform(by_rounding).tolist() == [True, False]


def test_groups_that_differ_fill_the_places_in_the_order_of_the_draws():
    # Of the first draw, numbered from 4, the second and fourth differ; the others hold their places
    # until the second draw replaces them.
    first, filled = choose_groups(np.array([False, True, False, True]), filled=0)
    assert (first.tolist(), filled) == ([5, 7, 4, 6], 2)
    second, filled = choose_groups(np.array([True, False, False, False]), filled)
    assert (second.tolist(), filled) == ([0, 1, 4, 5], 3)
    third, filled = choose_groups(np.array([True, True, True, False]), filled)
    assert (third.tolist(), filled) == ([0, 1, 2, 4], 4)


@pytest.fixture(scope="module")
def filtered(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("filtered")
    train(files, workdir, **FILTERED)
    return workdir


@pytest.mark.slow
def test_every_group_of_a_filtered_run_has_different_rewards(filtered):
    steps = records_of_steps(filtered)
    assert sorted(steps) == [1, 2, 3, 4]
    prompts = []
    for records in steps.values():
        # No two samples share random numbers.
        assert len({tuple(record["address"].values()) for record in records}) == len(records) == 24
        for group in groups_of(records):
            assert len({record["score"] for record in group}) > 1
            (prompt,) = {record["prompt"] for record in group}
            prompts.append(prompt)
    # No prompt is drawn again before the data are used up.
    assert len(set(prompts)) == len(prompts)
    assert {record["address"]["draw"] for records in steps.values() for record in records} > {0}


@pytest.mark.slow
def test_metrics_tell_how_many_draws_were_needed_and_what_all_of_them_earned(filtered):
    for row in read_rows(filtered):
        draws = float(row["rollout/draws"])
        assert 1 <= draws <= 10
        # Of all draws, not only of the samples that were kept.
        assert 0 < float(row["rollout/slot_use"]) <= 1
        # Half of the prompts have an odd answer: all their responses earn 0.
        assert float(row["rollout/uniform_groups"]) >= float(row["reward/odd"]) > 0 or draws == 1


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["score", "accuracy"])
def test_a_resumed_run_selects_the_same_samples(files, tmp_path, metric):
    options = {**FILTERED, "algorithm__filter_groups__metric": metric}
    train(files, tmp_path / "undisturbed", **options)
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
    train(files, tmp_path / "resumed", **options)
    resumed = records_of_steps(tmp_path / "resumed")
    assert resumed == records_of_steps(tmp_path / "undisturbed") and len(resumed) == 4


@pytest.mark.slow
def test_places_that_the_last_draw_leaves_hold_groups_with_equal_rewards(files, tmp_path):
    once = {"algorithm__filter_groups__max_num_gen_batches": 1}
    train(files, tmp_path, **FILTERED, **once, trainer__total_training_steps=2)
    records = records_of_steps(tmp_path)
    scores = [[r["score"] for r in group] for group in groups_of(records[1])]
    differs = [len(set(group)) > 1 for group in scores]
    assert differs == sorted(differs, reverse=True) and not all(differs)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_best_responses_of_each_prompt_are_learned_from(files, tmp_path, devices):
    shape = {"mesh__model": 2, "mesh__fsdp": 4} if devices == 8 else {"mesh__data": 8}
    train(
        files,
        tmp_path,
        rollout__n=6,
        rollout__keep=2,
        rollout__keep_by="best",
        algorithm__adv_estimator="grpo",
        trainer__total_training_steps=1,
        **shape,
    )
    (records,) = records_of_steps(tmp_path).values()
    assert len(records) == 16
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1
    # Each group's rewards are the highest of six responses: above the mean of a uniform draw.
    earned = [record["score"] for record in records if int(record["ground_truth"]) % 2 == 0]
    assert np.mean(earned) > 0.6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout__keep": 4}, "config.rollout.keep=4: expected at most config.rollout.n=3"),
        ({"rollout__n": 1, **FILTERED}, "config.rollout.n=1: .*2 or"),
        ({"rollout__keep": 1, "algorithm__adv_estimator": "rloo"}, "rollout.keep=1: .*2 or"),
        ({"reward__model_path": "m", **FILTERED}, "filter_groups.enable=True.*rewards of rules"),
    ],
)
def test_selections_that_cannot_work_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        tiny.config(**{"rollout__n": 3} | options)


def test_rewards_of_steps_count_in_the_choice():
    """Two prompts, three responses each, whose scores are equal without the rewards of steps."""
    steps = np.zeros((6, 4), np.float32)
    steps[1, 2], steps[5, 0], steps[5, 3] = 1.0, 0.25, 0.25
    zeros = jax.numpy.zeros(6)
    config = tiny.config(rollout__n=3, rollout__keep=1, rollout__keep_by="best")
    algorithm = types.SimpleNamespace(config=config, mesh=tiny.make_mesh())
    sampled = types.SimpleNamespace(
        batch=types.SimpleNamespace(indices=np.array([7, 3])),
        rollout=types.SimpleNamespace(responses=jax.numpy.arange(6)[:, None]),
    )
    steps = jax.numpy.asarray(steps)
    rewards = types.SimpleNamespace(scores=zeros, correct=zeros, steps=steps)
    selected, _ = selected_samples._select_responses(algorithm, sampled, rewards, draw=2)
    assert selected.addresses.tolist() == [[2, 1], [2, 5]]
    assert np.asarray(selected.arrays["responses"]).ravel().tolist() == [1, 5]
