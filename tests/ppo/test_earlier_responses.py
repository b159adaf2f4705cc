"""The responses of earlier epochs: what is found of them, and with which random numbers."""

import contextlib
import types

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.errors import UserError
from jax_ppo.ppo.earlier_responses import EarlierResponses, step_addresses
from jax_ppo.ppo.response_sampling import keys_of_samples
from jax_ppo.run.carried_over import restore_earlier_responses
from jax_ppo.run.ppo_training import require_prompts_that_come_again
from jax_ppo.runtime import sharding
from jax_ppo.sampler.sampling import sample_keys
from jax_ppo.training.progress import Progress
from jax_ppo.training.random_streams import SampleKeys, Stream
from jax_ppo.types import Prompts


def batch(*rows):
    """Return a batch of prompts, each of which is its row's number."""
    tokens = np.array(rows, np.int32)[:, None]
    prompts = Prompts(tokens, np.ones(len(rows), np.int32))
    return PromptBatch((), prompts, np.array(rows), len(rows))


def repeats(lengths):
    """Return responses of which each repeats a token as often as it says."""
    lengths = np.array(lengths, np.int32)
    return np.where(np.arange(5) < lengths[:, None], lengths[:, None], 0), lengths


def test_the_last_responses_are_found_with_the_addresses_of_the_first_ones():
    earlier = EarlierResponses(2)
    drafts, addresses = earlier.find(batch(7, 3), step=0, longest=5)
    assert drafts is None and addresses.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    earlier.replace(np.array([7, 3]), *repeats([5, 1, 2, 4]), addresses)
    # Row 9 is new, and row 7 has one draft for its first place in the batch.
    drafts, addresses = earlier.find(batch(9, 3, 7, 7), step=4, longest=5)
    assert drafts.prompts.tokens.ravel().tolist() == [9, 9, 3, 3, 7, 7, 7, 7]
    assert drafts.lengths.tolist() == [1, 1, 2, 4, 5, 1, 1, 1]
    assert drafts.responses[:, 0].tolist() == [-1, -1, 2, 4, 5, 1, -1, -1]
    assert drafts.responses[2:4].tolist() == [[2, 2, 0, 0, 0], [4, 4, 4, 4, 0]]
    assert addresses.tolist() == [
        *([4, 0], [4, 1]),
        *([0, 2], [0, 3], [0, 0], [0, 1]),
        *([4, 6], [4, 7]),
    ]
    earlier.replace(np.array([9, 3]), *repeats([1, 1, 3, 5]), addresses[:4])
    # As from a checkpoint; responses may be shorter now.
    for responses in (earlier, EarlierResponses.from_arrays(earlier.arrays())):
        drafts, addresses = responses.find(batch(3, 9, 7), step=8, longest=4)
        assert drafts.lengths.tolist() == [3, 4, 1, 1, 4, 1]
        assert drafts.responses[:2].tolist() == [[3, 3, 3, 0], [5, 5, 5, 5]]
        assert addresses[:4].tolist() == [[0, 2], [0, 3], [4, 0], [4, 1]]


@pytest.mark.parametrize(
    ("n", "position", "told"),
    [
        (2, 8, ""),
        (3, 8, "the checkpoint's responses to 2 prompts do not fit this run's data and options"),
        (2, 0, "the checkpoint's responses to 2 prompts do not fit this run's data and options"),
    ],
    ids=["same", "another n", "other data"],
)
def test_a_resumed_run_says_if_it_takes_no_drafts_of_the_checkpoint(n, position, told, capsys):
    earlier = EarlierResponses(2)
    earlier.replace(np.array([7, 3]), *repeats([5, 1, 2, 4]), step_addresses(0, 4))
    arrays = earlier.arrays()
    checkpoints = types.SimpleNamespace(
        saved_tree=lambda step, name: arrays,
        restore_item=lambda step, name, shapes: jax.tree.map(jax.numpy.asarray, arrays),
    )
    config = tiny.config(rollout__verify_drafts=True, rollout__n=n)
    run = types.SimpleNamespace(config=config, mesh=tiny.make_mesh(1))
    restored = restore_earlier_responses(run, checkpoints, Progress(step=1, position=position))
    assert (restored is None) == bool(told)
    printed = capsys.readouterr().out
    assert told in printed and bool(printed) == bool(told)


@pytest.mark.parametrize(
    ("steps", "data", "may_come_again"),
    [
        (2, {}, False),
        (3, {}, True),
        (2, {"data__curriculum": "solve_rate"}, True),
        (2, {"data__train_files": "arithmetic:4*0.6,sums:4*0.4"}, True),
    ],
    ids=["one epoch", "more", "curriculum", "weights"],
)
def test_runs_are_refused_whose_prompts_cannot_come_again(steps, data, may_come_again):
    config = tiny.config(rollout__verify_drafts=True, **data)
    run = types.SimpleNamespace(
        config=config,
        training=range(8),
        total_steps=steps,
        step_options=types.SimpleNamespace(prompts_per_step=4),
    )
    refused = pytest.raises(UserError, match="more prompts than the 8 of the data.*got 8")
    with contextlib.nullcontext() if may_come_again else refused:
        require_prompts_that_come_again(run)


def test_the_keys_of_addresses_are_those_with_which_steps_sample():
    mesh = tiny.make_mesh(1)
    layout = sharding.batch_rows(mesh, 6)
    step_key = SampleKeys(3, mesh)(Stream.TRAINING, 5)
    keys = keys_of_samples(jax.device_put(step_addresses(5, 6), layout), 3, layout)
    expected = jax.random.key_data(sample_keys(step_key, np.arange(6)))
    np.testing.assert_array_equal(keys, expected)
    assert keys.sharding.is_equivalent_to(layout, 2)
