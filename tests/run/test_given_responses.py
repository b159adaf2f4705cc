"""Distillation of which some steps learn from given responses (GKD)."""

import csv
import json
import shutil

import numpy as np
import pytest

import tiny
from jax_ppo.config.schema import Config
from jax_ppo.demonstration import arithmetic
from jax_ppo.errors import UserError
from jax_ppo.run import ppo_training
from llama_folder import write_llama

STEPS = 6
ALONE = {
    "teacher__loss_coef": 1.0,
    "teacher__reward_coef": 0.0,
    "teacher__use_task_rewards": False,
    "teacher__on_policy_fraction": 0.5,
    "algorithm__adv_estimator": "reinforce_plus_plus",
    "data__train_files": "",
    "rollout__n": 1,
}


def distilled(**changes) -> Config:
    paths = {"model__path": "a folder", "teacher__path": "a folder", "score__file": "rows.jsonl"}
    return tiny.config(**{**paths, **ALONE, **changes})


@pytest.mark.exhaustive
def test_a_draw_for_each_step_decides_whether_its_responses_are_given(tmp_path):
    texts = arithmetic.generate_worked_solutions(100, 0.5, 0)
    for name, changes in (("student", {}), ("teacher", {"num_layers": 1})):
        (tmp_path / name).mkdir()
        write_llama(tmp_path / name, ["".join(pair) for pair in texts], 192, **changes)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for prompt, response in texts:
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    config = distilled(
        model__path=f"{tmp_path}/student/llama",
        model__dtype="float32",
        teacher__path=f"{tmp_path}/teacher/llama",
        score__file=f"{tmp_path}/rows.jsonl",
        data__train_batch_size=8,
        data__max_prompt_length=80,
        data__max_response_length=48,
        actor__ppo_mini_batch_size=8,
        actor__optim__lr=3e-3,
        reward__terms="length[5:200]:1",
        trainer__save_freq=3,
        trainer__total_training_steps=STEPS,
        trainer__export=True,
    )
    run = tmp_path / "run"
    ppo_training.train_ppo(config, run)
    with (run / "training_metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    given = [bool(row["rollout/given"]) for row in rows]
    draws = [np.random.default_rng([0, step, 230613649]).random() for step in range(STEPS)]
    assert given == [draw >= 0.5 for draw in draws] and len(set(given)) == 2
    # Solutions end, and samples of a random model are cut off.
    cut_off = [float(row["response_length/truncated_share"]) for row in rows]
    assert all((share == 0) == is_given for share, is_given in zip(cut_off, given, strict=True))
    losses = [float(row["actor/teacher_kl"]) for row in rows if row["rollout/given"]]
    assert 0 < losses[-1] < losses[0]
    assert {float(row["actor/pg_loss"]) for row in rows} == {0.0}
    # The steps of a resumed run have the same kinds.
    expected = (run / "actor" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / str(STEPS))
    ppo_training.train_ppo(config, run)
    assert (run / "actor" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"score__file": "", "data__train_files": "arithmetic:8"},
            r"on_policy_fraction=0\.5: there are no responses",
        ),
        # Regression: the message asked for the training files that the next one refused.
        ({"score__file": ""}, r"there are no responses .* set config\.score\.file"),
        ({"data__train_files": "arithmetic:8"}, r"train_files='arithmetic:8': expected ''"),
        ({"rollout__n": 2}, r"rollout\.n=2: expected 1 with .*on_policy_fraction=0\.5"),
        ({"teacher__reward_coef": 1.0}, r"reward_coef=1\.0: expected 0\.0 with"),
        ({"algorithm__adv_estimator": "gae"}, r"adv_estimator='gae': expected one that needs only"),
    ],
)
def test_what_does_not_fit_given_responses_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        distilled(**changes)
