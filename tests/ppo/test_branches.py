"""Values and advantages of an episode from whose context two others branch off."""

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.runtime import placement, sharding
from jax_ppo.types import Prompts, Rollout

GAMMA, LAM, TURN_GAMMA, TURN_LAM = 0.95, 0.8, 0.9, 0.7
# The parts of the episode in the order of time: context, tokens, whether the policy chose them. The
# main context asks a helper, hears of its answer, asks another one, and goes on unasked.
PARTS = (
    (0, 2, True),
    (1, 3, False),
    (1, 2, True),
    (0, 2, False),
    (0, 1, True),
    (2, 2, False),
    (2, 3, True),
    (0, 2, True),
)
T = sum(length for _, length, _ in PARTS)
OF_CONTEXT = np.concatenate([[context] * length for context, length, _ in PARTS])
CHOSEN = np.concatenate([[chosen] * length for _, length, chosen in PARTS]).astype(bool)
FIRST = np.cumsum([0, *(length for _, length, _ in PARTS)])[:-1]
STARTS = np.isin(np.arange(T), FIRST) & CHOSEN
ENDS = np.isin(np.arange(T) + 1, [*FIRST, T]) & CHOSEN
TOKENS = np.random.default_rng(0).integers(2, 32, (tiny.B, T)).astype(np.int32)
REWARDS = np.where(ENDS, np.random.default_rng(1).normal(size=(tiny.B, T)), 0).astype(np.float32)


def score(config, prompts, tokens, **arrays):
    """Return the experience of responses of one length, on the host."""
    mesh = tiny.make_mesh()
    length = tokens.shape[1]

    def pad(x):
        return np.pad(x, ((0, 0), (0, T - length)))

    arrays = {name: pad(np.broadcast_to(x, tokens.shape)) for name, x in arrays.items()}
    rewards = arrays.pop("rewards")
    rollout = Rollout(
        prompts=prompts,
        responses=pad(tokens),
        lengths=np.full(tiny.B, length, np.int32),
        logprobs=np.zeros((tiny.B, T), np.float32),
        truncated=np.zeros(tiny.B, bool),
        **arrays,
    )
    with jax.set_mesh(mesh):
        rollout, rewards = placement.place((rollout, rewards), sharding.rows(mesh))
        state = tiny.make_state(config, mesh)
        final = np.zeros(tiny.B, np.float32)
        experience, _ = tiny.make_experience(
            config, mesh, state, rollout, final, rows=8, step_rewards=rewards
        )
    return jax.device_get(experience)


def expected_advantages(estimator, rewards, values):
    """Return the advantages of one episode, one token of the policy after the other."""
    advantages = np.zeros(T)
    tokens = np.flatnonzero(CHOSEN).tolist()
    starts = np.flatnonzero(STARTS).tolist()
    advantage = following = 0.0
    turns = {T: (0.0, 0.0)}  # by first token: advantage and value over turns
    for first, after in zip(reversed(starts), [T, *reversed(starts)], strict=False):
        earned = sum(rewards[t] for t in tokens if first <= t < after)
        later, value = turns[after]
        delta = earned + TURN_GAMMA * value - values[first]
        turns[first] = (delta + TURN_GAMMA * TURN_LAM * later, values[first])
    for t in reversed(tokens):
        first = max(start for start in starts if start <= t)
        after = min(start for start in [*starts, T] if start > t)
        if estimator == "turn_gae":
            advantages[t] = turns[first][0]
            continue
        if estimator == "bi_level_gae" and ENDS[t]:
            later, value = turns[after]
            advantage = rewards[t] + TURN_GAMMA * (value + TURN_LAM * later) - values[t]
        else:
            advantage = rewards[t] + GAMMA * following - values[t] + GAMMA * LAM * advantage
        following = values[t]
        advantages[t] = advantage
    return advantages


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["gae", "turn_gae", "bi_level_gae"])
def test_branches_are_scored_alone_and_credited_in_the_order_of_time(estimator):
    config = tiny.config(
        data__max_response_length=T,
        algorithm__adv_estimator=estimator,
        algorithm__whiten_advantages=False,
        algorithm__gamma=GAMMA,
        algorithm__lam=LAM,
        algorithm__turn_gamma=TURN_GAMMA,
        algorithm__turn_lam=TURN_LAM,
    )
    main = jax.device_get(tiny.make_rollout(tiny.make_mesh()).prompts)
    whole = score(
        config,
        main,
        TOKENS,
        action_mask=CHOSEN,
        turn_starts=STARTS,
        contexts=OF_CONTEXT.astype(np.int32),
        rewards=REWARDS,
    )
    # What is computed of each context as a prompt with a response that nothing interrupts.
    logprobs, values = np.zeros((2, tiny.B, T), np.float32)
    for context in range(3):
        columns = np.flatnonzero(OF_CONTEXT == context)
        prompts = main
        if context:
            (asked,) = np.nonzero((OF_CONTEXT == context) & ~CHOSEN)
            columns = columns[len(asked) :]
            padded = np.pad(TOKENS[:, asked], ((0, 0), (0, tiny.P - len(asked))))
            prompts = Prompts(padded, np.full(tiny.B, len(asked), np.int32))
        alone = score(
            config,
            prompts,
            TOKENS[:, columns],
            action_mask=CHOSEN[columns],
            turn_starts=STARTS[columns],
            rewards=REWARDS[:, columns],
        )
        logprobs[:, columns] = alone.old_logprobs[:, : len(columns)]
        values[:, columns] = alone.values[:, : len(columns)]
    np.testing.assert_allclose(whole.old_logprobs, logprobs * CHOSEN, atol=1e-4)
    read = STARTS if estimator == "turn_gae" else CHOSEN
    np.testing.assert_allclose(whole.values * read, values * read, atol=1e-4)
    assert (whole.rewards == REWARDS).all()
    for row in range(tiny.B):
        expected = expected_advantages(estimator, REWARDS[row], values[row])
        np.testing.assert_allclose(whole.advantages[row] * CHOSEN, expected, atol=1e-3)
