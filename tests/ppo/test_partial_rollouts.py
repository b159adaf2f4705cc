"""Which prompts leave the pool whose responses continue from step to step."""

import numpy as np
import pytest

from jax_ppo.ppo.partial_rollouts import choose_prompts, entry_steps


@pytest.mark.parametrize("max_staleness", [2, 4])
def test_every_prompt_leaves_within_the_bound_and_some_at_it(max_staleness):
    """Responses take up to 40 calls; a step makes as many calls as it must."""
    rng = np.random.default_rng(0)
    G, n = 4, 2
    durations = {batch: 1 + rng.geometric(0.3, (G, n)) ** 2 for batch in range(203)}
    durations = {batch: np.minimum(calls, 40) for batch, calls in durations.items()}
    batches = np.repeat([0, 1], G)
    left = np.concatenate([durations[0], durations[1]])
    ages, have_left = [], []
    for step in range(200):
        calls = 0
        while True:
            left = np.maximum(left - 1, 0)
            calls += 1
            places = choose_prompts(left == 0, batches, step, G, max_staleness)
            if places is not None:
                break
        assert calls <= 40 and len(set(places)) == G
        assert (left[places] == 0).all()
        ages.append((step - entry_steps(batches[places])).max())
        have_left.extend(batches[places])
        batches = batches.copy()
        batches[places] = step + 2
        left[places] = durations[step + 2]
    assert max(ages) == max_staleness and min(ages) < max_staleness
    # Each prompt of the batches that are too old to be in the pool has left once.
    assert all(have_left.count(batch) == G for batch in range(200 - max_staleness))


def test_a_prompt_at_the_bound_is_waited_for_and_the_oldest_leave_first():
    batches = np.array([3, 1, 2, 3])
    ended = np.array([[True, True], [True, False], [True, True], [True, True]])
    # In step 2 the prompt of batch 1, which entered in step 0, has reached the bound of 2 steps.
    assert choose_prompts(ended, batches, 2, 2, 2) is None
    younger = choose_prompts(ended, batches, 2, 2, 3)
    assert younger.tolist() == [2, 0]
    ended[1] = True
    assert choose_prompts(ended, batches, 2, 2, 2).tolist() == [1, 2]
