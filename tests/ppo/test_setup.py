"""The parts of a run that hold no model: mini-batches, keys, and what the rules get to see."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.data.prompts import PromptBatch
from jax_ppo.ppo import setup as experiment
from jax_ppo.ppo.setup import EVALUATION, TRAINING, Experiment
from jax_ppo.rewards.rules import RewardResult
from jax_ppo.runtime import sharding
from jax_ppo.types import Example


def make_run(config, mesh=None):
    """An Experiment without what it would load."""
    run = object.__new__(Experiment)
    run.config, run.mesh, run.nets, run.reward_inputs = (
        config,
        mesh or tiny.make_mesh(),
        tiny.networks(config),
        None,
    )
    return run


def members(run, step):
    """The samples of each mini-batch of a step, [epochs, mini-batches, samples of one]."""
    lengths = np.full(tiny.B, 4)
    chosen = np.asarray(run.plan(step, lengths).actor.members)
    return np.array([np.flatnonzero(row) for row in chosen]).reshape(
        run.config.actor.ppo_epochs, -1, chosen[0].sum()
    )


def test_every_epoch_of_every_step_cuts_the_whole_rollout_anew():
    run = make_run(tiny.config(actor__ppo_epochs=2, actor__ppo_mini_batch_size=2))
    cuts = [cut for step in (0, 1) for cut in members(run, step)]
    for cut in cuts:
        assert cut.shape == (4, 2) and sorted(cut.ravel().tolist()) == list(range(tiny.B))
    assert len({cut.tobytes() for cut in cuts}) == 4
    np.testing.assert_array_equal(members(run, 1), cuts[2:])


def test_roles_cut_a_rollout_as_their_options_say():
    mesh, lengths = tiny.make_mesh(2), np.full(tiny.B, 4)
    plans = make_run(tiny.config(critic__ppo_epochs=1), mesh).plan(0, lengths)
    assert plans.critic is plans.actor  # the same cut is made and sent once
    other = dict(
        critic__ppo_epochs=3,
        critic__ppo_mini_batch_size=4,
        critic__ppo_micro_batch_size_per_device=1,
    )
    plans = make_run(tiny.config(**other), mesh).plan(0, lengths)
    assert plans.actor.members.shape == (1, tiny.B) and plans.critic.members.shape == (6, tiny.B)
    assert plans.critic.packing.sample.shape[:3] == (
        6,
        2,
        2,
    )  # 4 samples in rows of 2 devices, one a device
    assert (
        plans.critic.members.sum(1).tolist() == [4] * 6 and plans.critic.counts.tolist() == [1] * 6
    )  # packed into two rows
    assert (
        plans.critic.packing.sample.sharding.shard_shape(plans.critic.packing.sample.shape)[2] == 1
    )
    without = make_run(tiny.config(algorithm__adv_estimator="reinforce_plus_plus"), mesh).plan(
        0, lengths
    )
    assert without.critic is None


def test_keys_differ_by_seed_stream_and_step():
    addresses = itertools.product((0, 1), (TRAINING, EVALUATION), (0, 1))
    keys = [experiment._sample_key(*address) for address in addresses]
    assert len({np.asarray(jax.random.key_data(key)).tobytes() for key in keys}) == 8


class Letters:
    """Token i is letter i; 0 is padding and 1 the end of sequence, both special."""

    def batch_decode(self, rows, skip_special_tokens=False):
        specials = ("", "") if skip_special_tokens else ("<pad>", "<eos>")
        return ["".join(chr(96 + i) if i > 1 else specials[i] for i in row) for row in rows]


def test_rules_see_each_response_beside_its_own_example_and_nothing_special():
    seen, mesh = [], tiny.make_mesh()
    run = make_run(tiny.config(rollout__n=2), mesh)
    run.tokenizer = Letters()
    run._reward_function = lambda example, text: (
        seen.append((example.ground_truth, text)) or RewardResult(len(seen) / 2)
    )
    examples = tuple(Example(name, "mine", name) for name in ("first", "second"))
    batch = PromptBatch(examples, None, np.arange(2), 2)
    rollout = tiny.make_rollout(mesh)
    responses = np.array([[2, 3, 1], [4, 0, 9], [5, 6, 7], [1, 9, 9]], np.int32)
    rollout = dataclasses.replace(
        rollout,
        responses=sharding.place(responses, sharding.rows(mesh)),
        lengths=sharding.place(np.array([3, 2, 3, 1], np.int32), sharding.rows(mesh)),
    )
    rewarded, samples = run.reward(batch, rollout, keep=3)
    assert seen == [("first", "bc"), ("first", "d"), ("second", "efg"), ("second", "")]
    assert rewarded.scores.tolist() == [0.5, 1.0, 1.5, 2.0] and rewarded.scores.dtype == np.float32
    assert [sample["response"] for sample in samples] == ["bc", "d", "efg"]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"rollout__top_p": 0.9}, True), ({"rollout__top_k": 5}, True), ({}, False)],
)
def test_filters_are_said_to_make_what_is_learned_off_policy(options, said, monkeypatch):
    def stop(*_):
        raise KeyError("folders")

    monkeypatch.setattr(Experiment, "_folders", stop)
    lines = []
    with pytest.raises(KeyError, match="folders"):
        Experiment(tiny.config(**options), None, tiny.make_mesh(), lines.append)
    assert any("off-policy" in line for line in lines) == said
