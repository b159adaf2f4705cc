"""Values and advantages over the border between two contexts of a dialogue."""

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.runtime import placement, sharding
from jax_ppo.types import Rollout

GAMMA, LAM = 0.95, 0.8
FIRST, OBSERVED, SECOND = 2, 1, 3  # tokens of two turns, and of what stands between them
T = FIRST + tiny.P + FIRST + OBSERVED + SECOND


def make_rollout(mesh, replaces):
    """Return dialogues of two turns; before the second the context is replaced by itself, if so."""
    prompts = tiny.make_rollout(mesh).prompts
    rng = np.random.default_rng(0)
    turns = rng.integers(2, 32, (tiny.B, FIRST + OBSERVED + SECOND))
    arrays = {
        "responses": np.zeros((tiny.B, T), np.int32),
        "action_mask": np.zeros((tiny.B, T), bool),
        "turn_starts": np.zeros((tiny.B, T), bool),
        "contexts": np.zeros((tiny.B, T), np.int32),
    }
    lengths = np.zeros(tiny.B, np.int32)
    for row, turn in enumerate(turns):
        repeated = np.asarray(prompts.tokens[row, : prompts.lengths[row]]).tolist()
        repeated = [*repeated, *turn[:FIRST]] if replaces else []
        response = [*turn[:FIRST], *repeated, *turn[FIRST:]]
        lengths[row] = len(response)
        arrays["responses"][row, : len(response)] = response
        second = len(response) - SECOND
        arrays["action_mask"][row, :FIRST] = True
        arrays["action_mask"][row, second : len(response)] = True
        arrays["turn_starts"][row, [0, second]] = True
        arrays["contexts"][row, FIRST : len(response)] = replaces
    if not replaces:
        arrays["contexts"] = None
    rollout = Rollout(
        prompts=prompts,
        lengths=lengths,
        logprobs=np.zeros((tiny.B, T), np.float32),
        truncated=np.arange(tiny.B) % 2 == 0,
        **arrays,
    )
    return placement.place(rollout, sharding.rows(mesh))


def estimate(replaces, **changes):
    """Return figures of the actions, [B, FIRST + SECOND] each."""
    config = tiny.config(
        data__max_response_length=T,
        algorithm__whiten_advantages=False,
        algorithm__gamma=GAMMA,
        algorithm__lam=LAM,
        **changes,
    )
    mesh = tiny.make_mesh()
    with jax.set_mesh(mesh):
        state = tiny.make_state(config, mesh)
        rollout = make_rollout(mesh, replaces)
        experience, _ = tiny.make_experience(config, mesh, state, rollout, rows=8)
    experience = jax.device_get(experience)
    chosen = np.asarray(rollout.action_mask)
    return {
        name: getattr(experience, name)[chosen].reshape(tiny.B, FIRST + SECOND)
        for name in ("old_logprobs", "values", "rewards", "advantages", "returns")
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm__bootstrap_truncated": True},
        pytest.param({"algorithm__adv_estimator": "turn_gae"}, marks=pytest.mark.exhaustive),
    ],
    ids=["tokens", "turns"],
)
def test_a_context_that_is_replaced_by_itself_changes_nothing(changes):
    """Log-probs, values, also of final states, and advantages, which reach over the border."""
    expected = estimate(False, **changes)
    actual = estimate(True, **changes)
    for name, figures in expected.items():
        np.testing.assert_allclose(actual[name], figures, atol=2e-4, err_msg=name)
    if "algorithm__adv_estimator" in changes:
        return
    # The same by hand: one chain of the actions of both contexts; rows of odd numbers have ended.
    for row in range(1, tiny.B, 2):
        advantage = following = 0.0
        for place in reversed(range(FIRST + SECOND)):
            value = actual["values"][row, place]
            delta = actual["rewards"][row, place] + GAMMA * following - value
            advantage, following = delta + GAMMA * LAM * advantage, value
            assert actual["advantages"][row, place] == pytest.approx(advantage, abs=1e-4)
