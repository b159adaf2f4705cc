"""Reward functions for whole batches, as verl and TRL call them."""

import numpy as np
import pytest

from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError
from jax_ppo.rewards.batch import _warn_once, score_batch
from jax_ppo.rewards.custom import BatchFunction, validate_columns
from jax_ppo.rewards.reward_functions import resolve_reward_function
from jax_ppo.rewards.worker_pool import RewardWorkers
from jax_ppo.types import Example

CHAT = ({"role": "user", "content": "Hi"},)
EXAMPLES = [
    Example("text", "mine", "3", {"level": 1}),
    Example(CHAT, "mine", "", {"split": "train"}),
]
RESPONSES = ["3", "long answer"]
MODULE = """
import asyncio
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

def none(completions, **kwargs):
    return [None] * len(completions)

def exits(completions, **kwargs):
    os._exit(3)

def hangs(completions, **kwargs):
    time.sleep(3600)

def wrong(solution_strs):
    return []

def ids(completions, completion_ids, **kwargs):
    return [sum(ids) for ids in completion_ids]

def narrow(completions, ground_truth):
    return [float(c == g) for c, g in zip(completions, ground_truth)]

def optional(*, completions, level=None):
    return [level[0], 0]

def strange(completions, solution, **kwargs):
    return [0.0] * len(completions)

async def awaited(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.5, 1]

async def awaited_single(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return {"score": len(solution_str), "why": "long"}
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return str(path)


def score_file(function, workers, tokens=(), takes_batches=True):
    """Score the responses by a function of a file, in this process or in workers."""
    options = Reward(function=function)
    if not workers:
        return score_batch(resolve_reward_function(options), EXAMPLES, RESPONSES, tokens=tokens)
    with RewardWorkers(options, workers, takes_batches) as pool:
        return score_batch(pool, EXAMPLES, RESPONSES, tokens=tokens)


@pytest.mark.parametrize("workers", [0, 1])
def test_whole_batches_are_scored_in_one_call(module, workers, caplog):
    def score(name):
        return score_file(f"{module}:{name}", workers)

    _warn_once.cache_clear()  # which says so once in a process
    scored = score("verl")
    assert scored.scores.tolist() == scored.correct.tolist() == [1, 0]
    assert scored.extra["n"].tolist() == [2, 2] and scored.failures == 0
    assert score("trl").scores.tolist() == [0.25, 0]
    assert score("none").scores.tolist() == score("none").scores.tolist() == [0, 0]
    assert [line.split(" responses")[0] for line in caplog.messages] == [
        f"the reward function returned None for {which}" for which in ("some", "all")
    ], "never silent, and said once each"


@pytest.mark.parametrize(
    ("returned", "failed", "words"),
    [
        ([1.0], 2, "mine.py:f returned 1 rewards for 2 responses"),
        ([float("nan"), 0.5], 1, "nan"),
        (KeyError("stumbled here"), 2, "stumbled here"),
        ({0: 1.0, 1: 0.0}, 2, "mine.py:f returned {0: 1.0, 1: 0.0}; expected a list of 2 rewards"),
        (np.array(0.5), 2, "mine.py:f returned array(0.5); expected a list of 2 rewards"),
        (None, 2, "mine.py:f returned None; expected a list of 2 rewards"),
    ],
)
def test_a_function_that_fails_costs_its_batch(returned, failed, words):
    def call(rows, responses):
        if isinstance(returned, Exception):
            raise returned
        return returned

    function = BatchFunction("mine.py:f", call)
    scored = score_batch(function, EXAMPLES, RESPONSES, Reward(fallback_score=-1.0))
    assert scored.failures == failed and words in scored.first_failure
    # A traceback of our own code would say nothing.
    assert ("Traceback" in scored.first_failure) == isinstance(returned, Exception)
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


def test_a_batch_that_hangs_takes_no_longer_than_responses_that_hang_one_by_one(module):
    """Regression: it took the time limits of all of its responses, hours."""
    options = Reward(function=f"{module}:hangs", timeout=0.05, max_timeouts=3)
    with RewardWorkers(options, 1, takes_batches=True) as pool:
        scored = score_batch(pool, EXAMPLES * 50, RESPONSES * 50)
    assert scored.failures == 100
    assert "timeout=0.05 seconds for each of 3 responses" in scored.first_failure


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_get_the_tokens_and_the_columns_that_they_take_and_are_awaited(module, workers):
    def score(name):
        takes_batches = name != "awaited_single"
        return score_file(f"{module}:{name}", workers, tokens, takes_batches)

    tokens = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    assert score("ids").scores.tolist() == [3, 3]
    assert score("narrow").scores.tolist() == [1, 0]
    assert score("optional").scores.tolist() == [1, 0]
    # A required column that no row of a batch has is None in each of them.
    assert score("strange").failures == 0
    assert score("awaited").scores.tolist() == [0.5, 1]
    assert score("awaited_single").scores.tolist() == [1, 11]


def test_a_column_that_no_row_has_is_refused_before_a_run(module):
    function = resolve_reward_function(Reward(function=f"{module}:strange"))
    assert function.columns == ("solution",)
    validate_columns(function, [*EXAMPLES, Example("q", "s", "", {"solution": 1})])
    expected = "^config.reward.function='.*:strange': its argument 'solution'"
    with pytest.raises(UserError, match=expected):
        validate_columns(function, EXAMPLES)
    with pytest.raises(UserError, match="completions, data_source, ground_truth, level, prompts"):
        validate_columns(function, EXAMPLES)
    for name in ("trl", "ids", "narrow", "optional", "verl"):
        validate_columns(resolve_reward_function(Reward(function=f"{module}:{name}")), EXAMPLES)


def test_a_wrong_signature_and_a_batch_function_as_a_term_are_refused(module):
    with pytest.raises(UserError, match=r"expected signature f\(data_sources=..., solution_strs"):
        resolve_reward_function(Reward(function=f"{module}:wrong"))
    with pytest.raises(UserError, match="takes whole batches"):
        resolve_reward_function(Reward(terms=f"{module}:trl:1.0"))
