"""Responses that continue from step to step: which prompts leave the pool, and what they have."""

import collections
import contextlib
import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.data.prompt_batches import make_batch
from jax_ppo.ppo.samples.continued import ContinuedSource, choose_prompts
from jax_ppo.runtime import placement, sharding
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.sampling import sample_keys
from jax_ppo.training.progress import Progress
from jax_ppo.training.random_streams import SampleKeys, Stream


def test_a_prompt_at_the_bound_is_waited_for_and_the_oldest_leave_first():
    batches = np.array([3, 1, 2, 3])
    ended = np.array([[True, True], [True, False], [True, True], [True, True]])
    # In step 2 the prompt of batch 1, which entered in step 0, has reached the bound of 2 steps.
    assert choose_prompts(ended, batches, 2, 2, 2) is None
    assert choose_prompts(ended, batches, 2, 2, 3).tolist() == [2, 0]
    ended[1] = True
    assert choose_prompts(ended, batches, 2, 2, 2).tolist() == [1, 2]


G, N, LONGEST = 3, 2, 20  # prompts of a step, responses to each, tokens of the longest


class Engine(BuiltInEngine):
    """Draws a sample's length and tokens from its key and a seed, a stage at a time."""

    def __init__(self, mesh, seed, partial_length, share_of_longest):
        self.seed = seed
        self.layout = sharding.batch_rows(mesh, 2 * G * N)
        self.partial_length = partial_length
        self.share_of_longest = share_of_longest

    def update_weights(self, params):
        pass

    def release_weights(self):
        pass

    def sample(self, key):
        """Return the tokens of a response."""
        rng = np.random.default_rng([*key, self.seed])
        length = LONGEST if rng.random() < self.share_of_longest else rng.integers(1, 4)
        return rng.integers(1, 1_000_000, length)

    def continue_responses(self, rollout, draws, version, options):
        arrays = {
            name: np.array(getattr(rollout, name))
            for name in ("responses", "lengths", "truncated", "action_mask", "versions")
        }
        for row, key in enumerate(np.asarray(draws.keys)):
            tokens, start = self.sample(key), arrays["lengths"][row]
            new = slice(start, min(start + self.partial_length, len(tokens)))
            arrays["responses"][row, new] = tokens[new]
            arrays["versions"][row, new] = version
            arrays["action_mask"][row, new] = True
            arrays["lengths"][row] = max(start, new.stop)
            arrays["truncated"][row] = new.stop < len(tokens)
        placed = {name: placement.place(x, self.layout) for name, x in arrays.items()}
        return dataclasses.replace(rollout, **placed), draws, jnp.ones(1, jnp.int32)


OBSERVER = types.SimpleNamespace(
    phase=lambda name: contextlib.nullcontext(), write_pending_report=lambda: None
)


def make_parts(mesh, engine, prompts, n=N, max_staleness=2, stop="", total_steps=0):
    """Return the parts of steps over a number of prompts."""
    return types.SimpleNamespace(
        config=types.SimpleNamespace(
            rollout=types.SimpleNamespace(n=n, max_staleness=max_staleness, stop=stop),
            data=types.SimpleNamespace(train_batch_size=G),
        ),
        mesh=mesh,
        engine=engine,
        sampling=SamplingOptions(LONGEST, 1.0),
        samples=G * n,
        total_steps=total_steps,
        sample_keys=SampleKeys(0, mesh),
        training=types.SimpleNamespace(
            tokens=[[i] for i in range(prompts)],
            examples=range(prompts),
            first_row=0,
            max_prompt_length=2,
        ),
        policy_params=lambda state: {},
    )


class Batches:
    """Batches of G prompts in order."""

    def __init__(self, training):
        self.training, self.position = training, 0

    def __next__(self):
        self.position += G
        return make_batch(self.training, np.arange(self.position - G, self.position), G)


def test_no_token_is_older_than_the_bound_and_no_response_is_lost_or_taken_twice():
    """Over random lengths, stages and bounds, from the first step on."""
    steps, mesh, oldest = 12, tiny.make_mesh(1), collections.defaultdict(int)
    count = (steps + 1) * G
    base_keys = SampleKeys(0, mesh)
    samples = [(number, sample) for number in range(steps + 1) for sample in range(G * N)]
    step_keys = (base_keys(Stream.TRAINING, number) for number in range(steps + 1))
    keys = [jax.random.key_data(sample_keys(key, np.arange(G * N))) for key in step_keys]
    cases = itertools.product((1, 3), (2, 3, 4), (0.05, 0.4))
    for seed, (partial_length, max_staleness, share_of_longest) in enumerate(cases):
        engine = Engine(mesh, seed, partial_length, share_of_longest)
        parts = make_parts(mesh, engine, count, max_staleness=max_staleness, total_steps=steps)
        source, taken = ContinuedSource(parts, Batches(parts.training)), []
        for step in range(steps):
            with jax.set_mesh(mesh):
                sampled = source.take({}, step, OBSERVER)
            assert bool(sampled.note) == (step == steps - 1)
            rollout = jax.device_get(sampled.rollout)
            pairs = np.stack([sampled.addresses["step"], sampled.addresses["sample"]], axis=1)
            taken += map(tuple, pairs.tolist())
            for row, (number, sample) in enumerate(pairs):
                length = rollout.lengths[row]
                np.testing.assert_array_equal(
                    rollout.responses[row, :length], engine.sample(np.asarray(keys[number][sample]))
                )
                np.testing.assert_array_equal(rollout.action_mask[row], np.arange(LONGEST) < length)
                ages = step - rollout.versions[row, :length]
                assert 0 <= ages.min() and ages.max() <= max_staleness
                assert (np.diff(ages) <= 0).all(), "later tokens are of newer weights"
                oldest[max_staleness] = max(oldest[max_staleness], ages.max())
        left = np.asarray(source.checkpoint_trees()["pool"]["prompts"])
        left = left[left[:, 1] >= 0]
        assert sampled.note.startswith(f"responses to {len(left)} prompts were unfinished")
        waiting = [(number, first + i) for _, number, first in left.tolist() for i in range(N)]
        assert sorted(taken + waiting) == samples
    assert oldest == {2: 2, 3: 3, 4: 4}, "each bound was reached"


SKIPS = f"the checkpoint's unfinished responses to {G} prompts do not fit"


@pytest.mark.parametrize(
    ("n", "changed", "told"),
    [(N, {}, ""), (N + 1, {}, SKIPS), (N, {"stop": "end"}, SKIPS), (N, {"first_token": 1}, SKIPS)],
    ids=["same", "another n", "stop string", "prompts"],
)
def test_a_resumed_run_says_if_it_skips_unfinished_responses(n, changed, told):
    mesh = tiny.make_mesh(1)
    parts = make_parts(mesh, Engine(mesh, 0, 3, 0.4), 2 * G)
    first_token = (changed := dict(changed)).pop("first_token", 0)
    options = {"rollout__max_staleness": 2, "rollout__partial_length": 3, "rollout__n": N}
    options |= {"algorithm__rollout_is": "token"}
    with jax.set_mesh(mesh):
        source = ContinuedSource(parts, Batches(parts.training))
        source.take({}, 0, OBSERVER)
        arrays = source.checkpoint_trees()["pool"]
        meta = {"config": dataclasses.asdict(tiny.config(**options))}
        del meta["config"]["rollout"]["stop"]  # as if the option had come after the checkpoint
        checkpoints = types.SimpleNamespace(
            saved_tree=lambda step, name: arrays if name == "pool" else None,
            restore=lambda step, _: types.SimpleNamespace(meta=meta, arrays={"pool": arrays}),
        )
        parts = make_parts(mesh, None, 2 * G, n, **changed)
        # A chat template may write another date.
        parts.training.tokens = [[row + first_token] for row in range(2 * G)]
        resumed = ContinuedSource(parts, Batches(parts.training))
        lines = resumed.restore(checkpoints, Progress(step=1, position=8))
        restored = resumed.checkpoint_trees()
    if told:
        assert len(lines) == 1 and lines[0].startswith(told) and restored == {}
    else:
        assert lines == []
        jax.tree.map(np.testing.assert_array_equal, restored, {"pool": arrays})
