"""The parts of a run without a model: mini-batches, random keys, and the input of the rules."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.ppo import mini_batches
from jax_ppo.ppo.rewarding import RuleScorer
from jax_ppo.rewards.samples import RewardResult
from jax_ppo.run import build, run_models
from jax_ppo.runtime import faults, placement, sharding
from jax_ppo.training.random_streams import Stream, sample_key
from jax_ppo.types import NOTHING, Example, Prompts


def make_packer(config, mesh=None):
    has_critic = tiny.networks(config).critic is not None
    return mini_batches.RolloutPacker(config, mesh or tiny.make_mesh(), has_critic)


def mini_batch_members(config, step):
    """Return the samples of a step's mini-batches, [epochs, mini-batches, samples per batch]."""
    lengths = np.full(tiny.B, 4)
    mask = np.asarray(make_packer(config).pack(step, lengths).mini_batches["actor"].members)
    groups = np.array([np.flatnonzero(row) for row in mask])
    return groups.reshape(config.actor.ppo_epochs, -1, mask[0].sum())


def test_every_epoch_of_every_step_cuts_the_whole_rollout_anew():
    config = tiny.config(actor__ppo_epochs=2, actor__ppo_mini_batch_size=2)
    cuts = [cut for step in (0, 1) for cut in mini_batch_members(config, step)]
    for cut in cuts:
        assert cut.shape == (4, 2) and sorted(cut.ravel().tolist()) == list(range(tiny.B))
    assert len({cut.tobytes() for cut in cuts}) == 4
    np.testing.assert_array_equal(mini_batch_members(config, 1), cuts[2:])


def test_roles_cut_a_rollout_as_their_options_say():
    mesh, lengths = tiny.make_mesh(2), np.full(tiny.B, 4)
    unset = tiny.config(actor__ppo_epochs=3, actor__ppo_micro_batch_size_per_device=2)
    same = make_packer(unset, mesh).pack(0, lengths).mini_batches
    assert same["critic"] is same["actor"]  # one packing is made and transferred
    other_options = dict(
        critic__ppo_epochs=3,
        critic__ppo_mini_batch_size=4,
        critic__ppo_micro_batch_size_per_device=1,
    )
    other = make_packer(tiny.config(**other_options), mesh).pack(0, lengths).mini_batches
    assert other["actor"].members.shape == (1, tiny.B)
    assert other["critic"].members.shape == (6, tiny.B)
    sample = other["critic"].packing.sample
    assert sample.shape[:3] == (6, 2, 2)  # 4 samples in rows of 2 devices, one per device
    assert other["critic"].members.sum(1).tolist() == [4] * 6
    assert other["critic"].counts.tolist() == [1] * 6  # packed into two rows
    assert sample.sharding.shard_shape(sample.shape)[2] == 1
    no_critic = tiny.config(algorithm__adv_estimator="reinforce_plus_plus")
    assert make_packer(no_critic, mesh).pack(0, lengths).mini_batches.keys() == {"actor"}


def test_keys_differ_by_seed_stream_and_step():
    addresses = itertools.product((0, 1), (Stream.TRAINING, Stream.EVALUATION), (0, 1))
    keys = [sample_key(*address) for address in addresses]
    assert len({np.asarray(jax.random.key_data(key)).tobytes() for key in keys}) == 8


class Letters:
    """A tokenizer whose token i is letter i; 0 (padding) and 1 (end of sequence) are special."""

    added_tokens_decoder = {}

    def batch_decode(self, rows, skip_special_tokens=False):
        specials = ("", "") if skip_special_tokens else ("<pad>", "<eos>")
        return ["".join(chr(96 + i) if i > 1 else specials[i] for i in row) for row in rows]


def test_rules_see_each_response_beside_its_own_example_and_nothing_special(monkeypatch):
    seen, tokens, reports, mesh = [], [], [], tiny.make_mesh()
    monkeypatch.setattr(faults, "report_progress", lambda: reports.append(1))

    def rule(example, text):
        seen.append((example.ground_truth, text))
        tokens.append(list(example.completion_ids))
        return RewardResult(len(seen) / 2, correct=True)

    scorer = RuleScorer(
        mesh=mesh,
        tokenizer=Letters(),
        options=tiny.config(rollout__n=2).reward,
        rule=rule,
        model_weight=1.0,
        reward_inputs=None,
    )
    examples = tuple(Example(name, "mine", name) for name in ("first", "second"))
    prompts = Prompts(np.full((2, 1), 2), np.ones(2, int))
    batch = PromptBatch(examples, prompts, np.arange(2), 2)
    rollout = tiny.make_rollout(mesh)
    responses = np.array([[2, 3, 1], [4, 0, 9], [5, 6, 7], [1, 9, 9]], np.int32)
    rollout = dataclasses.replace(
        rollout,
        responses=placement.place(responses, sharding.rows(mesh)),
        lengths=placement.place(np.array([3, 2, 3, 1], np.int32), sharding.rows(mesh)),
    )
    rewarded = scorer.score(batch, rollout)
    assert seen == [("first", "bc"), ("first", "d"), ("second", "efg"), ("second", "")]
    assert tokens == [[2, 3, 1], [4, 0], [5, 6, 7], [1]]
    assert rewarded.scores.tolist() == [0.5, 1.0, 1.5, 2.0] and rewarded.scores.dtype == np.float32
    # Regression: a slow rule made progress that was taken for none, and the run was ended.
    assert len(reports) == 2 + len(seen), "the start, each score and the end"
    # Regression: rows that fill up a batch were scored, too, by a judge for money.
    seen.clear()
    rewarded = scorer.score(dataclasses.replace(batch, count=1), rollout)
    assert [truth for truth, _ in seen] == ["first", "first"]
    assert rewarded.scores.tolist() == [0.5, 1.0, 0.0, 0.0]
    np.testing.assert_array_equal(rewarded.correct, [1, 1, NOTHING, NOTHING])
    assert (rewarded.failures, rewarded.scored) == (0, 2)


@pytest.mark.parametrize(
    ("options", "reported"),
    [({"rollout__top_p": 0.9}, True), ({"rollout__top_k": 5}, True), ({}, False)],
)
def test_filters_are_said_to_make_what_is_learned_off_policy(options, reported, monkeypatch):
    def stop(*_):
        raise KeyError("folders")

    monkeypatch.setattr(run_models, "resolve_role_folders", stop)
    lines = []
    with pytest.raises(KeyError, match="folders"):
        build.build_run(tiny.config(**options), None, tiny.make_mesh(), lines.append)
    assert any("off-policy" in line for line in lines) == reported
