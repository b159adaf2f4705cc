"""A batch that was sampled ahead, in a run that resumes with other options."""

import types

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.data.prompt_batches import PromptBatches
from jax_ppo.run.carried_over import restore_sampled_batch, rollout_arrays
from jax_ppo.sampler.continuation import begin_responses
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.training.progress import Progress
from jax_ppo.types import Prompts

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
    changed, first_token, environment, capsys
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
    checkpoints = types.SimpleNamespace(
        saved_tree=lambda step, name: saved,
        restore_item=lambda step, name, shapes: jax.tree.map(jax.numpy.asarray, saved),
    )
    config = tiny.config(**options | changed)
    batches = make_batches(config, first_token)
    run = types.SimpleNamespace(
        config=config,
        sampling=SamplingOptions(T, 1.0, environment=environment),
        mesh=tiny.make_mesh(1),
        training=batches.dataset,
    )
    restored = restore_sampled_batch(run, checkpoints, Progress(step=1, position=G), batches)
    printed = capsys.readouterr().out
    if not (changed or first_token or environment):
        np.testing.assert_array_equal(
            restored.rollout.prompts.tokens[::N], restored.batch.prompts.tokens
        )
        assert restored.position == batches.position == 2 * G and not printed
    else:
        assert restored is None and batches.position == G, "they are sampled anew"
        assert "sampled one step ahead do not fit this run's data and options" in printed
