"""A batch that was sampled ahead, in a run that resumes with other options."""

import contextlib
import types

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.data.prompt_batches import PromptBatches
from jax_ppo.errors import UserError
from jax_ppo.ppo.samples.on_policy import OnPolicySource
from jax_ppo.ppo.samples.one_step_ahead import OneStepAheadSource
from jax_ppo.ppo.samples.source import ROLLOUT, read_rollout, rollout_arrays
from jax_ppo.sampler.continuation import begin_responses
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.training.progress import Progress
from jax_ppo.types import Prompts

OBSERVER = types.SimpleNamespace(phase=lambda name: contextlib.nullcontext())
G, N, T = 4, 2, 5  # prompts of a step, responses to each, tokens of the longest


class Rows(types.SimpleNamespace):
    """A data set of one-token prompts."""

    name, first_row, max_prompt_length, examples = "data", None, 2, range(16)

    def __len__(self):
        return len(self.tokens)


def make_batches(config, first_token=0):
    rows = Rows(tokens=[np.array([row + first_token]) for row in range(16)])
    size, shuffle = config.data.train_batch_size, config.data.shuffle
    return PromptBatches(rows, size, shuffle, position=G)


@pytest.mark.parametrize(
    ("changed", "first_token", "environment"),
    [
        ({}, 0, None),
        ({"rollout__max_staleness": 0}, 0, None),
        ({"data__train_batch_size": G * N, "rollout__n": 1}, 0, None),
        ({"data__shuffle": False}, 0, None),
        ({}, 1, None),
        ({}, 0, object()),
    ],
    ids=["same", "not ahead", "as many samples", "another order", "another date", "environment"],
)
def test_a_resumed_run_takes_the_batch_sampled_ahead_if_its_prompts_are_the_next(
    changed, first_token, environment
):
    options = {"rollout__max_staleness": 1, "algorithm__rollout_is": "token", "rollout__n": N}
    options |= {"data__train_batch_size": G, "data__max_response_length": T}
    options |= {"actor__ppo_mini_batch_size": G}
    before = make_batches(tiny.config(**options))
    prompts = next(before).prompts
    rollout = begin_responses(
        Prompts(*(x.repeat(N, 0) for x in (prompts.tokens, prompts.lengths))), T
    )
    saved = rollout_arrays(rollout)
    restored = types.SimpleNamespace(arrays={ROLLOUT: jax.tree.map(jax.numpy.asarray, saved)})
    checkpoints = types.SimpleNamespace(
        saved_tree=lambda step, name: saved if name == ROLLOUT else None,
        restore=lambda step, abstract: restored,
    )
    config = tiny.config(**options | changed)
    batches = make_batches(config, first_token)
    parts = types.SimpleNamespace(
        config=config,
        sampling=SamplingOptions(T, 1.0, environment=environment),
        mesh=tiny.make_mesh(1),
        training=batches.dataset,
    )
    source = (OneStepAheadSource if config.rollout.max_staleness else OnPolicySource)(
        parts, batches
    )
    lines = source.restore(checkpoints, Progress(step=1, position=G))
    if not (changed or first_token or environment):
        assert lines == [] and batches.position == 2 * G
        taken = source.take(None, 1, OBSERVER)
        np.testing.assert_array_equal(taken.rollout.prompts.tokens[::N], taken.batch.prompts.tokens)
        assert taken.position == 2 * G and taken.weights_step == 0
    else:
        assert source.checkpoint_trees() == {} and batches.position == G, "they are sampled anew"
        (line,) = lines
        assert "sampled one step ahead do not fit this run's data and options" in line


def test_responses_of_another_version_in_a_checkpoint_are_refused():
    with pytest.raises(UserError, match="checkpoint 7: its responses are of another version of"):
        read_rollout({"prompts": {}, "contexts": np.zeros((1, 2), bool)}, 7)
