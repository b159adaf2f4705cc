"""Reward functions for whole batches, as verl and TRL call them."""

import pytest

from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError
from jax_ppo.rewards.batch import score_batch
from jax_ppo.rewards.registry import resolve_reward_function
from jax_ppo.rewards.worker_pool import RewardWorkers
from jax_ppo.types import Example

CHAT = ({"role": "user", "content": "Hi"},)
EXAMPLES = [
    Example("text", "mine", "3", {"level": 1}),
    Example(CHAT, "mine", "", {"split": "train"}),
]
RESPONSES = ["3", "long answer"]
MODULE = """
import os
import time

def verl(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert data_sources == ["mine", "mine"] and extra_infos[0] == {"level": 1}
    return [{"score": float(s == g), "acc": s == g, "n": len(solution_strs)}
            for s, g in zip(solution_strs, ground_truths)]

def trl(prompts, completions, level, split, **kwargs):
    assert prompts == ["text", [{"role": "user", "content": "Hi"}]]
    assert completions == ["3", [{"role": "assistant", "content": "long answer"}]]
    assert level == [1, None] and split == [None, "train"]
    assert kwargs["ground_truth"] == ["3", ""] and kwargs["data_source"] == ["mine", "mine"]
    return [0.25, None]

def too_few(completions, **kwargs):
    return [1.0]

def nan(completions, **kwargs):
    return [float("nan"), 0.5]

def stumbles(completions, **kwargs):
    raise KeyError("stumbled here")

def exits(completions, **kwargs):
    os._exit(3)

def hangs(completions, **kwargs):
    time.sleep(3600)

def wrong(solution_strs):
    return []
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return str(path)


@pytest.mark.parametrize("workers", [0, 1])
def test_whole_batches_are_scored_in_one_call(module, workers):
    def score(name):
        function = f"{module}:{name}"
        if not workers:
            return score_batch(resolve_reward_function(function), EXAMPLES, RESPONSES)
        with RewardWorkers(Reward(function=function), 1, takes_batches=True) as pool:
            return score_batch(pool, EXAMPLES, RESPONSES)

    scored = score("verl")
    assert scored.scores.tolist() == scored.correct.tolist() == [1, 0]
    assert scored.extra["n"].tolist() == [2, 2] and scored.failures == 0
    assert score("trl").scores.tolist() == [0.25, 0]


@pytest.mark.parametrize(
    ("name", "failed", "words"),
    [
        ("too_few", 2, "returned 1 rewards for 2 responses"),
        ("nan", 1, "nan"),
        ("stumbles", 2, "stumbled here"),
    ],
)
def test_a_function_that_fails_costs_its_batch(module, name, failed, words):
    scored = score_batch(resolve_reward_function(f"{module}:{name}"), EXAMPLES, RESPONSES, -1.0)
    assert scored.failures == failed and words in scored.first_failure
    assert scored.scores.tolist().count(-1.0) == failed


@pytest.mark.parametrize(
    ("name", "timeout", "words"),
    [("exits", 3600.0, "exit code 3"), ("hangs", 0.2, "config.reward.timeout=0.2")],
)
def test_a_worker_that_dies_or_hangs_costs_the_batch_and_not_the_run(module, name, timeout, words):
    options = Reward(function=f"{module}:{name}", timeout=timeout)
    with RewardWorkers(options, 1, takes_batches=True) as pool:
        scored = score_batch(pool, EXAMPLES, RESPONSES)
    assert scored.failures == 2 and words in scored.first_failure


def test_a_wrong_signature_and_a_batch_function_as_a_term_are_refused(module):
    with pytest.raises(UserError, match=r"expected signature f\(data_sources=..., solution_strs"):
        resolve_reward_function(f"{module}:wrong")
    with pytest.raises(UserError, match="takes whole batches"):
        resolve_reward_function(terms=f"{module}:trl:1.0")
