"""Held-out averages: every prompt counts once, and every response is sampled independently."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from character_tokenizer import CharacterTokenizer
from jax_ppo.data.prompt_batches import PromptBatch, evaluation_batches
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.run.evaluation import evaluate_batches
from jax_ppo.run.sample_reports import describe_samples, measure_sampling
from jax_ppo.types import NOTHING, Example, Prompts, Rollout, with_nan

N = 2  # responses per prompt


def evaluate_prompts(scores, batch_size, correct=None, sources=None):
    """Evaluate prompts that consist of one token, the number of their row.

    The responses to the prompt of row i have the score `scores[i]` and i + 1 tokens.
    """
    sources = sources or ["mine"] * len(scores)
    examples = tuple(Example(str(row), source) for row, source in enumerate(sources))
    dataset = PromptDataset(examples, [np.array([row]) for row in range(len(scores))], 16)
    first_indices = []

    def respond(batch, first):
        first_indices.append(first)
        rows = np.repeat(np.asarray(batch.prompts.tokens)[:, 0], N)
        rollout = Rollout(
            prompts=batch.prompts,
            responses=rows,
            lengths=jax.numpy.asarray(rows + 1),
            logprobs=None,
            truncated=None,
            action_mask=None,
            environment_metrics={"row": jnp.where(rows > 1, NOTHING, rows)},
        )
        correctness = [np.nan] * len(scores) if correct is None else correct
        of_rows = (np.asarray(x, float)[rows] for x in (scores, correctness))
        return rollout, *of_rows, [{"response": str(row), "answer": None} for row in rows]

    result = evaluate_batches(evaluation_batches(dataset, batch_size), respond)
    return result, first_indices


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_rows_that_fill_the_last_batch_are_not_counted(batch_size):
    """Scores 1, 2, 6 have mean 3. Lengths are 1, 2, 3. One of three answers is right."""
    result, _ = evaluate_prompts([1, 2, 6], batch_size, correct=[0, 0, 1])
    assert (result.reward_mean, result.length_mean) == (3, 2)
    assert result.accuracy == pytest.approx(1 / 3)
    # The mean of the dialogues that have the figure: 0 and 1, not 2.
    assert result.figures["environment/row"] == 0.5


@pytest.mark.parametrize("batch_size", [2, 3, 4])
def test_rows_that_fill_the_last_batch_count_for_no_source(batch_size):
    """The batches' last rows repeat rows of other sources."""
    sources = ["one", "two", "one", "two", "two"]
    result, _ = evaluate_prompts([1, 2, 6, 7, 9], batch_size, [0, 0, 1, 1, 1], sources)
    names = ("one/reward_mean", "two/reward_mean", "one/accuracy", "two/accuracy")
    assert [result.figures[name] for name in names] == pytest.approx([3.5, 6, 1 / 2, 2 / 3])


def test_samples_of_all_batches_have_addresses_of_their_own():
    _, first_rows = evaluate_prompts([1, 2, 6, 7, 8], 2)
    assert first_rows == [0, 4, 8]


def test_what_has_no_notion_of_right_has_no_accuracy():
    result, _ = evaluate_prompts([1, 2, 6], 2)
    assert result.accuracy is None and result.reward_mean == 3


def test_all_responses_are_kept_and_those_to_different_prompts_are_shown():
    result, _ = evaluate_prompts([1, 2, 6], 2)
    assert [row["response"] for row in result.records] == ["0", "0", "1", "1", "2", "2"]
    assert result.responses_per_prompt == 2


def test_accuracy_is_of_the_rows_whose_rule_defines_correctness():
    result, _ = evaluate_prompts([1, 2, 6], 2, correct=[0, np.nan, 1])
    assert result.accuracy == 0.5
    rollout = Rollout(
        prompts=None,
        responses=jnp.array([[5, 6, 9], [5, 6, 8], [5, 6, 8], [5, 5, 0]]),
        lengths=jnp.array([2, 2, 3, 1]),
        logprobs=None,
        truncated=jnp.array([True, False, False, False]),
        action_mask=None,
    )
    metrics = measure_sampling(
        rollout,
        jnp.array([1.0, NOTHING, 1.0, 0.0]),
        jnp.array([1.0, 1.0, 0.5, 0.5]),
        jnp.zeros((4, 3)).at[3, 0].set(0.25),
        responses_per_prompt=2,
        step=0,
    )
    # Tokens after the end of a response do not count: the first two are the same.
    assert float(metrics["rollout/duplicates"]) == 0.25
    assert float(metrics["rollout/most_common"]) == 0.5
    # The rewards of steps count: the second prompt's responses differ by one.
    assert float(metrics["reward/uniform_groups"]) == 0.5
    assert float(metrics["reward/accuracy"]) == pytest.approx(2 / 3)
    assert float(metrics["response_length/truncated_share"]) == 0.25
    with jax.debug_nans(True):
        undefined = measure_sampling(
            rollout, jnp.full(4, NOTHING), jnp.zeros(4), None, responses_per_prompt=2, step=0
        )
    assert with_nan(undefined["reward/accuracy"]).tolist() == pytest.approx(np.nan, nan_ok=True)


def test_a_record_names_its_prompt_and_its_sample_of_it():
    """The second batch of an evaluation with two responses to each of two prompts."""
    rollout = Rollout(
        prompts=None,
        responses=jnp.full((4, 1), ord("x")),
        lengths=jnp.ones(4, jnp.int32),
        logprobs=None,
        truncated=jnp.zeros(4, bool),
        action_mask=None,
    )
    prompts = Prompts(tokens=np.full((2, 1), ord("?")), lengths=np.ones(2, int))
    batch = PromptBatch((Example("?", "mine"),) * 2, prompts, np.arange(2), 2)
    rewarded = types.SimpleNamespace(correct=jnp.ones(4), answers={})
    records = describe_samples(
        range(4), batch, rollout, np.ones(4), rewarded, CharacterTokenizer(), {"sample": 4}
    )
    places = [(x["prompt_index"], x["sample_index"], x["address"]["sample"]) for x in records]
    assert places == [(2, 0, 4), (2, 1, 5), (3, 0, 6), (3, 1, 7)]
