"""Rewards of a rollout: figures over all processes, and failures of the rule over steps."""

import dataclasses
import functools
import json
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from character_tokenizer import CharacterTokenizer
from jax_ppo.config.schema import MeshShape, Reward
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.errors import UserError
from jax_ppo.ppo import rewarding
from jax_ppo.ppo.rewarding import FailedSteps, RuleRewards, RuleScorer
from jax_ppo.rewards.reward_functions import resolve_reward_function
from jax_ppo.rewards.samples import RewardResult
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.types import Example, Prompts, Rollout
from waiting import HANG_SECONDS
from whole_run import finish, start_processes


def rewards(failures):
    scores = np.zeros(4, np.float32)
    return RuleRewards(
        scores=scores,
        correct=scores,
        failures=failures,
        scored=len(scores),
        first_failure="row 2 of the batch" if failures else "",
    )


def test_a_rule_that_fails_on_everything_for_some_steps_stops_the_run():
    """Regression: the run went on with fallback scores only."""
    steps = FailedSteps(dataclasses.replace(Reward(), function="mine.py:f"))
    for step, failures in enumerate([4, 4, 3, 4, 4]):  # 3 of 4 starts the count again
        steps.count(step, rewards(failures))
    with pytest.raises(UserError) as error:
        steps.count(5, rewards(4))
    assert str(error.value) == (
        "config.reward.function='mine.py:f' failed on every response of 3 consecutive steps. "
        "The first failure of step 6 was row 2 of the batch"
    )


class TwoProcesses:
    """The collectives of two processes, which are threads here."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=HANG_SECONDS)
        self.process = threading.local()
        self.values = [None, None]

    def exchange(self, value):
        self.barrier.wait()
        self.values[self.process.index] = value
        self.barrier.wait()
        return list(self.values)

    def all_rows(self, mesh, indices, values, total):
        rows = np.zeros((total, values.shape[1]), values.dtype)
        for other_indices, other_values in self.exchange((indices, values)):
            rows[other_indices] = other_values
        return rows


def test_figures_of_the_rules_cover_the_samples_of_all_processes(monkeypatch):
    """Regression: they covered the samples of process 0 only.

    Row 3 is on devices of both processes, and each process knows a name that the other does not.
    Row 4 fills up the batch: that it failed counts for nothing.
    """
    processes = TwoProcesses()
    monkeypatch.setattr(rewarding.distributed, "allgather_json", processes.exchange)
    monkeypatch.setattr(rewarding.placement, "all_rows", processes.all_rows)

    def describe(index, indices, **per_sample):
        processes.process.index = index
        per_sample = {name.replace("__", "/"): values for name, values in per_sample.items()}
        return rewarding._describe_rollout(None, np.array(indices), per_sample, 5, real=4)

    nan = float("nan")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(
            describe, 0, [0, 1, 3], reward__a=[1, 2, 6], reward__b=[nan, 1, nan], failed=[1, 0, 1]
        )
        second = threads.submit(
            describe, 1, [2, 3, 4], reward__a=[3, 6, nan], reward__c=[7, nan, nan], failed=[1, 1, 1]
        )
    expected = (3, {"reward/a": 3.0, "reward/b": 1.0, "reward/c": 7.0})
    assert first.result() == second.result() == expected


def make_scorer(mesh=None, rule=None, model_weight=1.0):
    return RuleScorer(
        mesh=mesh,
        tokenizer=CharacterTokenizer(),
        options=Reward(),
        rule=rule,
        model_weight=model_weight,
        reward_inputs=None,
    )


def test_the_reward_models_scores_are_weighted(monkeypatch):
    scorer = make_scorer(model_weight=0.25)
    scores = jnp.array([4.0, 8.0, -4.0, 0.0])
    monkeypatch.setattr(rewarding.forward_passes, "reward_model_scores", lambda *arguments: scores)
    state = types.SimpleNamespace(role_params=lambda role, nets: None)
    rule_rewards = dataclasses.replace(rewards(0), scores=jnp.array([1.0, 0.0, 1.0, 0.0]))
    nets = types.SimpleNamespace(reward="model")
    together = scorer.add_model_scores(nets, state, rule_rewards, rows=())
    assert together.tolist() == [2.0, 2.0, 0.0, 0.0]


def test_figures_that_no_sample_has_are_nan():
    figures = {"reward/a": [np.nan] * 2, "failed": [True, False], "model_inputs_cut": [True] * 2}
    failures, extra = rewarding._describe_rollout(None, np.arange(2), figures, 2, real=2)
    assert failures == 1 and np.isnan(extra["reward/a"])
    assert extra["reward/model_inputs_cut"] == 2


# Two processes of two devices: with mesh.model=4 each row is on both, with mesh.model=2 on one.
PROGRAM = """
import json, sys
import jax, numpy as np
from jax_ppo.config.schema import Distributed, MeshShape, Reward
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.ppo.rewarding import RuleScorer
from jax_ppo.rewards.samples import RewardResult
from jax_ppo.runtime import distributed, meshes, placement, sharding
from jax_ppo.types import Example, Prompts, Rollout

class Tokenizer:
    added_tokens_decoder = {}

    def batch_decode(self, responses, skip_special_tokens):
        return [" ".join(map(str, response)) for response in responses]

distributed.initialize(Distributed())
calls, found = [], {}

def rule(row, text):
    calls.append(text)
    return RewardResult(score=float(text.split()[0]), correct=True, extra={"length": len(text)})

for model in (4, 2):
    mesh = meshes.make_mesh(MeshShape(data=-1, model=model))
    rows = sharding.rows(mesh)
    tokens = np.arange(10, 26, dtype=np.int32).reshape(8, 2)
    prompts = Prompts(tokens=tokens[::2], lengths=np.full(4, 2, np.int32))
    examples = tuple(Example("prompt", "mine") for _ in range(4))
    placed = placement.place(
        {"responses": tokens, "lengths": np.array([1, 2] * 4, np.int32)}, rows
    )
    rollout = Rollout(
        prompts=prompts, logprobs=None, truncated=None, action_mask=None, **placed
    )
    scorer = RuleScorer(
        mesh=mesh, tokenizer=Tokenizer(), options=Reward(), rule=rule, model_weight=1.0,
        reward_inputs=None
    )
    rewards = scorer.score(PromptBatch(examples, prompts, np.arange(4), 4), rollout)
    found[model] = {
        "calls": calls.copy(),
        "scores": placement.to_host(rewards.scores).tolist(),
        "correct": placement.to_host(rewards.correct).tolist(),
        "length": rewards.extra["reward/length"],
    }
    calls.clear()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_sample_is_scored_once_where_tensor_parallelism_spans_processes(coordinator_address):
    processes = start_processes("-c", PROGRAM, address=coordinator_address, devices=2)
    first, second = (json.loads(output.splitlines()[-1]) for output in finish(processes))
    texts = ["10", "12 13", "14", "16 17", "18", "20 21", "22", "24 25"]
    for model in ("4", "2"):
        assert first[model].pop("calls") == texts[:4]
        assert second[model].pop("calls") == texts[4:]
        scores = [float(text.split()[0]) for text in texts]
        expected = {"scores": scores, "correct": [1.0] * 8, "length": 3.5}
        assert first[model] == second[model] == expected


def test_rules_do_not_read_what_a_tool_has_answered():
    """The environment writes the right answer; only the second response repeats it."""
    answered, repeated = "2*3=|6|#### 5", "2*3=|6|#### 6"
    responses, mask = np.zeros((2, 16), np.int32), np.zeros((2, 16), bool)
    for row, text in enumerate((answered, repeated)):
        characters = text.replace("|", "")
        responses[row, : len(characters)] = [ord(c) for c in characters]
        mask[row, : len(characters)] = True
        mask[row, 4] = False
    turn_rewards = np.zeros((2, 16), np.float32)
    turn_rewards[1, 3] = 0.5
    mesh = meshes.make_mesh(MeshShape(), jax.devices()[:1])
    read = []

    def rule(row, text):
        read.append(text)
        return RewardResult(score=float("6" in text))

    rollout = Rollout(
        prompts=Prompts(tokens=np.ones((2, 1), np.int32), lengths=np.ones(2, np.int32)),
        logprobs=None,
        truncated=None,
        **placement.place(
            {
                "responses": responses,
                "lengths": np.full(2, 11, np.int32),
                "action_mask": mask,
                "turn_rewards": turn_rewards,
                "environment_metrics": {"moves": np.array([2, np.nan], np.float32)},
            },
            sharding.rows(mesh),
        ),
    )
    scorer = make_scorer(mesh=mesh, rule=rule)
    examples = (Example("prompt", "mine"), Example("prompt", "mine"))
    rewards = scorer.score(PromptBatch(examples, rollout.prompts, np.arange(2), 2), rollout)
    assert read == ["2*3=\n#### 5", "2*3=\n#### 6"]
    assert np.asarray(rewards.scores).tolist() == [0.0, 1.0]
    np.testing.assert_array_equal(rewards.steps, turn_rewards)
    assert rewards.extra == {"environment/moves": 2.0}


def test_turns_with_nothing_between_them_are_lines_of_their_own():
    """Regression: after an empty observation the turns "1" and "2" were read as "12"."""
    response = np.array([ord(c) for c in "12=3 4"])
    is_action = np.array([1, 1, 1, 0, 0, 1, 0, 0], bool)
    starts = np.array([1, 1, 0, 0, 0, 1, 0, 0], bool)
    read = functools.partial(rewarding.policy_text, CharacterTokenizer(), response, is_action)
    assert read(starts) == "1\n2=\n4"
    assert read(np.zeros_like(starts)) == "12=\n4"


def test_a_thought_that_the_template_opens_before_a_turn_belongs_to_the_turn():
    """Regression: an answer within it, after a first turn that had ended its own, scored 1."""
    first, observation, second = "4?</think>call", "result<think>\n", "#### 5"
    response = np.array([ord(c) for c in first + observation + second])
    is_action = np.ones(len(response), bool)
    is_action[len(first) : -len(second)] = False
    read = rewarding.policy_text(
        CharacterTokenizer(), response, is_action, np.zeros_like(is_action)
    )
    assert read == "4?</think>call\n<think>#### 5"


def test_a_rule_knows_of_the_thought_that_the_prompt_has_opened():
    """Regression: only the response was read, and an answer within its thought scored 1."""
    prompts = ["5?<think>", "5?"]
    answers = ["#### 5", "4?</think>#### 5", "#### 5", "<think>#### 5"]

    def pad(texts, width):
        return np.array([[*map(ord, text), *[0] * (width - len(text))] for text in texts])

    lengths = np.array(list(map(len, answers)), np.int32)
    rollout = Rollout(
        prompts=None,
        responses=jnp.asarray(pad(answers, 16), jnp.int32),
        logprobs=None,
        lengths=jnp.asarray(lengths),
        truncated=None,
        action_mask=None,
    )
    scorer = make_scorer(
        mesh=meshes.make_mesh(MeshShape(), jax.devices()[:1]),
        rule=resolve_reward_function(Reward()),
    )
    batch = PromptBatch(
        tuple(Example(prompt, "openai/gsm8k", "5") for prompt in prompts),
        Prompts(tokens=pad(prompts, 16), lengths=np.array(list(map(len, prompts)))),
        np.arange(2),
        2,
    )
    rewards = scorer.score(batch, rollout)
    assert np.asarray(rewards.scores).tolist() == [0, 1, 1, 0]
    assert rewards.misses[0] == "looked for '5', in a thought that does not end: '<think>#### 5'"
